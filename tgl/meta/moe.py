"""Output specs of ``moe`` and its backward.

Letters: S tokens, k choices of each, T rows in the order of experts, G experts, H width of the input, N of FC1's result
(2 I for gated activations, else I), O of the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import checks, permutation
from .mlp import Matrix, bias, check_mask, gradients, of_weights, operands
from .specs import Dim, TensorSpec


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
) -> tuple[TensorSpec, TensorSpec]:
    """``y [S, O]`` and ``h [T, N]``."""
    op, tokens, groups = "moe", x.shape[:1], w1.shape[:1]
    width, _, columns = operands(op, Matrix("x", x, "[S, H]"), w1, w2, offs, kind)
    rows = _places(op, Matrix("x", x), source, position, token, top_k, weights)
    bias(op, "bias1", bias1, "[G, N]", (*groups, width), Matrix("x", x))
    bias(op, "bias2", bias2, "[G, O]", (*groups, columns), Matrix("x", x))
    return TensorSpec((*tokens, columns), x.dtype, x.device), TensorSpec((rows, width), x.dtype, x.device)


def _places(
    op: str,
    matrix: Matrix,
    source: Tensor,
    position: Tensor,
    token: Tensor,
    top_k: Dim,
    weights: Tensor | None,
) -> Dim:
    """T, where ``matrix`` has the tokens."""
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


def moe_backward(
    dy: Tensor,
    x: Tensor | None,
    w1: Tensor,
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
) -> tuple[TensorSpec, ...]:
    """The gradients of x, w1, w2, weights, bias1 and bias2, ``[0]`` where ``output_mask`` does not ask for one."""
    op, tokens = "moe_backward", dy.shape[:1]
    checks.ndim(op, "dy", dy, 2, "[S, O]")
    matrix = Matrix("dy", dy, "[S, O]") if x is None else Matrix("x", x, "[S, H]")
    width, _, columns = operands(op, matrix, w1, w2, offs, kind)
    rows = _places(op, matrix, source, position, token, top_k, weights)
    of_weights(op, "dy", dy, "[S, O]", (*matrix.t.shape[:1], columns), w1)
    of_weights(op, "h", h, "[T, N]", (rows, width), w1)
    bias(op, "bias2", bias2, "[G, O]", (*w1.shape[:1], columns), Matrix("dy", dy))
    check_mask(op, output_mask, {1: ("w1 without `x`", x), 3: ("absent weights", weights)})
    dx = TensorSpec((*tokens, w1.shape[1]), dy.dtype, dy.device)
    dtype: torch.dtype = dy.dtype if weights is None else weights.dtype
    return gradients(dx, TensorSpec((*tokens, top_k), dtype, dy.device), w1, w2, output_mask)
