"""Output specs of ``grouped_gemm_low_rank`` and ``grouped_gemm_low_rank_activation``; see ``specs``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .specs import TensorSpec, grouped_gemm, grouped_gemm_activation, with_out

_OP = "grouped_gemm_low_rank"
_ACTIVATION = "grouped_gemm_low_rank_activation"


class LowRankCall(NamedTuple):
    """The operands of ``grouped_gemm_low_rank``."""

    a: Tensor
    b: Tensor
    low: Tensor
    up: Tensor
    offs: Tensor
    bias: Tensor | None = None
    bias_scale: Tensor | None = None


class LowRankActivationCall(NamedTuple):
    """The operands of ``grouped_gemm_low_rank_activation``."""

    a: Tensor
    b: Tensor
    low: Tensor
    up: Tensor
    offs: Tensor
    bias: Tensor | None = None
    probs: Tensor | None = None


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
    made = grouped_gemm(a, b, offs, bias, bias_scale, out_dtype=out_dtype, op=_OP)
    _check_pair(_OP, a, b, low, up)
    return made


grouped_gemm_low_rank_out = with_out(grouped_gemm_low_rank, "[T, N]", checks.out_dtype)


def grouped_gemm_low_rank_activation(
    a: Tensor,
    b: Tensor,
    low: Tensor,
    up: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    kind: str = "swiglu",
    out_dtype: torch.dtype | None = None,
) -> tuple[TensorSpec, TensorSpec]:
    """``y [T, I]`` and ``h [T, 2 I]`` for gated kinds, ``[T, I]`` both for the others."""
    made = grouped_gemm_activation(a, b, offs, bias, probs, kind=kind, out_dtype=out_dtype, op=_ACTIVATION)
    _check_pair(_ACTIVATION, a, b, low, up)
    return made


def _check_pair(op: str, a: Tensor, b: Tensor, low: Tensor, up: Tensor) -> None:
    """Check that ``low [T, R]`` and ``up [G, R, N]`` fit ``a`` and ``b``, which have been checked."""
    dtype, device, (groups, _, columns) = a.dtype, a.device, b.shape
    checks.ndim(op, "low", low, 2, "[T, R]")
    checks.like(op, "low", low, "a", dtype, device)
    count, rank = low.shape
    if (same := count == a.shape[0]) is not True:
        checks.require(same, op, "low", f"[T, R] with T = {a.shape[0]} like `a`", low.shape)
    checks.shape(op, "up", up, (groups, rank, columns), "[G, R, N]")
    checks.like(op, "up", up, "a", dtype, device)
