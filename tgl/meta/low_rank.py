"""Output specs of ``grouped_gemm_low_rank``; see ``specs``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .specs import TensorSpec, grouped_gemm

_OP = "grouped_gemm_low_rank"


class LowRankCall(NamedTuple):
    """The operands of the op."""

    a: Tensor
    b: Tensor
    low: Tensor
    up: Tensor
    offs: Tensor
    bias: Tensor | None = None
    bias_scale: Tensor | None = None


def grouped_gemm_low_rank(
    a: Tensor,
    b: Tensor,
    low: Tensor,
    up: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> TensorSpec:
    """``[T, K] x [G, K, N] + [T, R] x [G, R, N] -> [T, N]``."""
    op = _OP
    made = grouped_gemm(a, b, offs, bias, bias_scale, out_dtype=out_dtype, op=op)
    dtype, device, (groups, _, columns) = a.dtype, a.device, b.shape
    checks.ndim(op, "low", low, 2, "[T, R]")
    checks.same_dtype(op, "low", low, "a", dtype)
    checks.same_device(op, "low", low, "a", device)
    count, rank = low.shape
    if (same := count == a.shape[0]) is not True:
        checks.require(same, op, "low", f"[T, R] with T = {a.shape[0]} like `a`", low.shape)
    checks.dense_matrix(op, "low", low)
    checks.shape(op, "up", up, (groups, rank, columns), "[G, R, N]")
    checks.same_dtype(op, "up", up, "a", dtype)
    checks.same_device(op, "up", up, "a", device)
    checks.dense_matrix(op, "up", up)
    return made


def grouped_gemm_low_rank_out(
    a: Tensor,
    b: Tensor,
    low: Tensor,
    up: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    *,
    out: Tensor,
) -> None:
    """Checks of ``grouped_gemm_low_rank.out``: those of the op, and a buffer that fits."""
    shape, _, device, _ = grouped_gemm_low_rank(a, b, low, up, offs, bias, bias_scale)
    checks.out_buffer(_OP, "out", out, shape, "[T, N]", device)
    checks.out_dtype(_OP, "out", a.dtype, out.dtype)
