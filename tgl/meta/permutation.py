"""Output specs of ``dispatch`` and ``combine``: every function checks its arguments and returns the result's spec.

Letters: S tokens, k top-k slots per token, T rows grouped by expert, H columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .specs import Dim, TensorSpec, accumulator

INDICES = (torch.int32, torch.int64)


def as_rows(t: Tensor) -> Tensor:
    """Return ``t [n, H]``, or a vector ``[n]`` as one column."""
    return t if t.dim() == 2 else t[:, None]


def _rows(op: str, argument: str, t: Tensor, letter: str) -> None:
    """Check that ``t`` is a matrix or a vector."""
    if t.dim() != 2 and t.dim() != 1:
        checks.require(False, op, argument, f"2-D [{letter}, H] or 1-D [{letter}]", t.shape)


def check_index(op: str, argument: str, t: Tensor, letters: str, reference: str, device: torch.device) -> None:
    """Check that ``t`` is a vector of indices, on the device of the argument ``reference``."""
    if t.dtype not in INDICES:
        checks.require(False, op, argument, "int32 or int64", t.dtype, TypeError)
    checks.ndim(op, argument, t, 1, letters)
    checks.same_device(op, argument, t, reference, device)


def check_pairs(op: str, token: Tensor, position: Tensor, top_k: Dim, reference: str, device: torch.device) -> None:
    """Check that ``token`` and ``position`` are indices, on the device of the argument ``reference``."""
    if (some := top_k >= 1) is not True:
        checks.require(some, op, "top_k", "at least 1", top_k)
    check_index(op, "token", token, "[T]", reference, device)
    check_index(op, "position", position, "[S k]", reference, device)


def check_weights(op: str, weights: Tensor, tokens: Dim, top_k: Dim, reference: str, t: Tensor) -> None:
    """Check that ``weights`` is ``[S, k]``, in the dtype of ``t`` or the accumulator's."""
    checks.floating(op, reference, t)
    checks.operand(
        op, "weights", weights, (tokens, top_k), "[S, k]", (t.dtype, accumulator(t.dtype)), (reference, t.device)
    )


def dispatch(x: Tensor, token: Tensor, position: Tensor, top_k: Dim, weights: Tensor | None = None) -> TensorSpec:
    """``[S, H] -> [T, H]``, or ``[S] -> [T]``."""
    op = "dispatch"
    _rows(op, "x", x, "S")
    tokens = x.shape[0]
    check_pairs(op, token, position, top_k, "x", x.device)
    if (same := position.shape[0] == tokens * top_k) is not True:
        checks.require(same, op, "position", lambda: f"[S k] with S = {tokens} like `x`, k = {top_k}", position.shape)
    if weights is not None:
        check_weights(op, weights, tokens, top_k, "x", x)
    return TensorSpec((token.shape[0], *x.shape[1:]), x.dtype, x.device)


def combine(
    y: Tensor,
    token: Tensor,
    position: Tensor,
    top_k: Dim,
    weights: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> TensorSpec:
    """``[T, H] -> [S, H]``, or ``[T] -> [S]``, in ``out_dtype`` or the dtype of ``y``."""
    out = _combine("combine", y, token, position, top_k, weights)
    return out._replace(dtype=checks.out_dtype("combine", "out_dtype", y.dtype, out_dtype))


def _combine(op: str, y: Tensor, token: Tensor, position: Tensor, top_k: Dim, weights: Tensor | None) -> TensorSpec:
    _rows(op, "y", y, "T")
    checks.floating(op, "y", y)
    check_pairs(op, token, position, top_k, "y", y.device)
    rows, pairs = y.shape[0], position.shape[0]
    if (same := token.shape[0] == rows) is not True:
        checks.require(same, op, "token", lambda: f"[T] with T = {rows} like `y`", token.shape)
    tokens = pairs // top_k
    if (whole := tokens * top_k == pairs) is not True:
        checks.require(whole, op, "position", lambda: f"[S k] with k = {top_k}", position.shape)
    if weights is not None:
        check_weights(op, weights, tokens, top_k, "y", y)
    return TensorSpec((tokens, *y.shape[1:]), y.dtype, y.device)


def combine_backward(
    grad: Tensor, y: Tensor, token: Tensor, position: Tensor, top_k: Dim, weights: Tensor
) -> tuple[TensorSpec, TensorSpec]:
    """``dy`` like ``y``, and ``dweights [S, k]`` in the accumulator's dtype."""
    op = "combine_backward"
    out = _combine(op, y, token, position, top_k, weights)
    checks.shape(op, "grad", grad, out.shape, "[S, H]" if y.dim() == 2 else "[S]")
    checks.like(op, "grad", grad, "y", y.dtype, y.device)
    dweights = TensorSpec((out.shape[0], top_k), accumulator(y.dtype), y.device)
    return TensorSpec(tuple(y.shape), y.dtype, y.device), dweights
