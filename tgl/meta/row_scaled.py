"""Output specs of the GEMMs on FP8 operands with one scale per row.

A row runs along the contraction, so both scales factor out of the sum. Letters as in ``specs``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .formats import ELEMENTS
from .scaled import OUT_DTYPES
from .specs import Dim, RowsSpec, TensorSpec

OP, WGRAD = "grouped_gemm_row_scaled", "grouped_gemm_row_scaled_wgrad"
_ELEMENTS = "float8_e4m3fn or float8_e5m2"


def grouped_gemm_row_scaled(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, *, out_dtype: torch.dtype | None = None
) -> TensorSpec:
    """Rows ``[T, K]`` times the transposes of ``[G, N, K]`` -> ``[T, N]``."""
    _operand(OP, "a", a, 2, "[T, K]")
    _operand(OP, "b", b, 3, "[G, N, K]")
    (rows, depth), (groups, columns, _), device = a.shape, b.shape, a.device
    checks.same_device(OP, "b", b, "a", device)
    checks.size(OP, "b", b, 2, depth, lambda: f"[G, N, K] with K = {depth} like `a`")
    checks.offsets(OP, offs, groups, "a", device)
    _scale(OP, "a_scale", a_scale, (rows,), "[T]", device)
    _scale(OP, "b_scale", b_scale, (groups, columns), "[G, N]", device)
    return RowsSpec((rows, columns), _out_dtype(OP, out_dtype), device)


def grouped_gemm_row_scaled_wgrad(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, *, out_dtype: torch.dtype | None = None
) -> TensorSpec:
    """``[M, T]`` times the transpose of ``[N, T]``, whose columns lie in groups -> ``[G, M, N]``."""
    _operand(WGRAD, "a", a, 2, "[M, T]")
    _operand(WGRAD, "b", b, 2, "[N, T]")
    (m, tokens), (n, _), device = a.shape, b.shape, a.device
    checks.same_device(WGRAD, "b", b, "a", device)
    checks.size(WGRAD, "b", b, 1, tokens, lambda: f"[N, T] with T = {tokens} like `a`")
    checks.offsets(WGRAD, offs, None, "a", device)
    groups = offs.shape[0]
    _scale(WGRAD, "a_scale", a_scale, (groups, m), "[G, M]", device)
    _scale(WGRAD, "b_scale", b_scale, (groups, n), "[G, N]", device)
    return TensorSpec((groups, m, n), _out_dtype(WGRAD, out_dtype), device)


def _operand(op: str, argument: str, t: Tensor, dims: int, letters: str) -> None:
    if t.dtype not in ELEMENTS:
        checks.require(False, op, argument, _ELEMENTS, t.dtype, TypeError)
    checks.ndim(op, argument, t, dims, letters)


def _scale(op: str, argument: str, t: Tensor, shape: tuple[Dim, ...], letters: str, device: torch.device) -> None:
    checks.either_dtype(op, argument, t, torch.float32)
    checks.shape(op, argument, t, shape, letters)
    checks.same_device(op, argument, t, "a", device)


def _out_dtype(op: str, requested: torch.dtype | None) -> torch.dtype:
    if requested is None:
        return torch.bfloat16
    checks.require(requested in OUT_DTYPES, op, "out_dtype", "float32, bfloat16 or float16", requested, TypeError)
    return requested
