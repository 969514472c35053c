"""Output specs of ``moe`` and its backward.

Letters: S tokens, k top-k slots per token, T rows grouped by expert, G experts, H width of the input, N of FC1's result
(2 I for gated activations, else I), O of the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import SymInt, Tensor

from . import activations, checks, permutation
from .mlp import Matrix, bias, check_mask, masked, of_weight, operands, weight_gradient
from .specs import Dim, TensorSpec, Unasked, accumulator


def moe(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    source: Tensor,
    position: Tensor,
    token: Tensor,
    offs: Tensor,
    weights: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    top_k: Dim,
    kind: str = "swiglu",
    out_dtype: torch.dtype | None = None,
    compute_h: bool = True,
    expected_rows: Dim | None = None,
) -> tuple[TensorSpec, TensorSpec]:
    """``y [S, O]``, in ``out_dtype`` or the dtype of ``x``, and ``h [T, N]``, or ``[0, N]`` without ``compute_h``."""
    op, tokens, groups = "moe", x.shape[:1], w1.shape[:1]
    width, _, columns = operands(op, Matrix("x", x, "[S, H]"), w1, w2, offs, kind)
    rows = _places(op, Matrix("x", x), source, position, token, top_k, weights)
    bias(op, "bias1", bias1, "[G, N]", (*groups, width), Matrix("x", x))
    bias(op, "bias2", bias2, "[G, O]", (*groups, columns), Matrix("x", x))
    check_expected(op, expected_rows)
    y = TensorSpec((*tokens, columns), checks.out_dtype(op, "out_dtype", x.dtype, out_dtype), x.device)
    return y, TensorSpec((rows, width), x.dtype, x.device) if compute_h else Unasked((0, width), x.dtype, x.device)


def _places(
    op: str,
    matrix: Matrix,
    source: Tensor,
    position: Tensor,
    token: Tensor,
    top_k: Dim,
    weights: Tensor | None,
) -> Dim:
    """Check the routing and return T; ``matrix`` has the tokens."""
    name, t, _ = matrix
    tokens = t.shape[0]
    permutation.check_pairs(op, token, position, top_k, name, t.device)
    if (same := position.shape[0] == tokens * top_k) is not True:
        checks.require(
            same, op, "position", lambda: f"[S k] with S = {tokens} like `{name}`, k = {top_k}", position.shape
        )
    permutation.check_index(op, "source", source, "[T]", name, t.device)
    checks.shape(op, "source", source, (token.shape[0],), "[T]")
    if weights is not None:
        permutation.check_weights(op, weights, tokens, top_k, name, t)
    rows: Dim = token.shape[0]
    return rows


def moe_backward_hidden(
    dy: Tensor,
    w2: Tensor,
    source: Tensor,
    position: Tensor,
    token: Tensor,
    offs: Tensor,
    h: Tensor,
    weights: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    top_k: Dim,
    output_mask: Sequence[bool],
    kind: str = "swiglu",
    expected_rows: Dim | None = None,
) -> tuple[TensorSpec, ...]:
    """The gradients of h, w2, weights and bias2, ``[0]`` where ``output_mask`` is False."""
    op, matrix = "moe_backward_hidden", Matrix("dy", dy, "[S, O]")
    activation = activations.named(kind, op=op)
    _with_weight(op, matrix, "w2", w2, "[G, I, O]", "O", offs)
    groups, inter, columns = w2.shape
    rows = _places(op, matrix, source, position, token, top_k, weights)
    of_weight(op, "h", h, "[T, N]", (rows, activation.width(inter)), "w2", w2)
    bias(op, "bias2", bias2, "[G, O]", (groups, columns), matrix)
    check_mask(op, output_mask, 4, {2: ("absent weights", weights)})
    check_expected(op, expected_rows)
    dtype: torch.dtype = dy.dtype if weights is None else weights.dtype
    made = (
        TensorSpec(tuple(h.shape), h.dtype, h.device),
        weight_gradient(w2),
        TensorSpec((dy.shape[0], top_k), dtype, dy.device),
        TensorSpec((groups, columns), accumulator(dy.dtype), dy.device),
    )
    return masked(made, output_mask)


def moe_backward_input(
    dh: Tensor,
    x: Tensor | None,
    w1: Tensor,
    position: Tensor,
    token: Tensor,
    offs: Tensor,
    *,
    top_k: Dim,
    output_mask: Sequence[bool],
    out_dtype: torch.dtype | None = None,
    expected_rows: Dim | None = None,
) -> tuple[TensorSpec, ...]:
    """The gradients of x, w1 and bias1, ``[0]`` where ``output_mask`` is False.

    The gradient of x is in ``out_dtype``, or the dtype of ``dh``.
    """
    op, matrix = "moe_backward_input", Matrix("dh", dh, "[T, N]")
    _with_weight(op, matrix, "w1", w1, "[G, H, N]", "N", offs)
    groups, depth, columns = w1.shape
    permutation.check_pairs(op, token, position, top_k, "dh", dh.device)
    checks.shape(op, "token", token, (dh.shape[0],), "[T]")
    tokens = position.shape[0] // top_k
    of_weight(op, "x", x, "[S, H]", (tokens, depth), "w1", w1)
    check_mask(op, output_mask, 3, {1: ("w1 without `x`", x)})
    check_expected(op, expected_rows)
    made = (
        TensorSpec((tokens, depth), checks.out_dtype(op, "out_dtype", dh.dtype, out_dtype), dh.device),
        weight_gradient(w1),
        TensorSpec((groups, columns), accumulator(dh.dtype), dh.device),
    )
    return masked(made, output_mask)


def check_expected(op: str, rows: Dim | None) -> None:
    """Check ``expected_rows``; values beyond the capacity mean the capacity."""
    if rows is None:
        return
    if not isinstance(rows, (int, SymInt)):
        checks.require(False, op, "expected_rows", "an integer or None", repr(rows), TypeError)
    if (some := rows >= 1) is not True:
        checks.require(some, op, "expected_rows", "at least 1", rows)


def _with_weight(op: str, matrix: Matrix, name: str, w: Tensor, letters: str, last: str, offs: Tensor) -> None:
    """Check that ``w`` has a matrix for each group, with as many columns as ``matrix``."""
    given, t, _ = matrix
    checks.ndim(op, given, t, 2, matrix.letters)
    checks.floating(op, given, t)
    checks.ndim(op, name, w, 3, letters)
    checks.like(op, name, w, given, t.dtype, t.device)
    checks.size(op, name, w, 2, t.shape[1], lambda: f"{letters} with {last} = {t.shape[1]} like `{given}`")
    checks.offsets(op, offs, w.shape[0], given, t.device)
