"""The Mixture-of-Experts block behind the router: tokens to rows of experts, the experts, and their weighted sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.grouped_gemm import grouped_gemm
from . import routing as _routing
from ._activation import activate, is_one_op
from .routing import Routing, combine, dispatch, dispatch_weights, route


def moe(
    x: Tensor,
    routing: Routing | Tensor,
    weights: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    kind: str = "swiglu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    offset: float | None = None,
) -> Tensor:
    """Run a Mixture-of-Experts block behind its router: ``dispatch``, ``grouped_mlp`` and ``combine`` as one op.

    For token ``s`` the sum over its choices ``j``, with ``g`` the expert chosen, of
    ``weights[s, j] * (activation(x[s] @ w1[g] + bias1[g]) @ w2[g] + bias2[g])``, with the bits of ``dispatch``,
    ``grouped_mlp`` with the weights as ``probs``, and ``combine``. Differentiable in all floating arguments, twice. The
    backward is one op too. It holds ``x``, what goes into the activation ``[T, N]``, the weights and the routing; the
    rows ``[T, H]`` and the activation's result ``[T, I]`` are formed again. In a graph compiled for a CPU the GEMMs are
    ops of their own, and the compiler fuses the rest and decides what is held.

    Args:
        x: ``[S, H]``, float64, float32, bfloat16 or float16, row- or column-major (or expanded).
        routing: from ``route``, or the experts chosen by each token, integer ``[S, k]``, as ``route`` takes them.
        weights: ``[S, k]``: routing weights, dtype of ``x`` or float32; None for ones.
        w1: ``[G, H, N]`` of the dtype of ``x``, either major; ``N = 2 I`` for the gated kinds, ``I`` for the others.
        w2: ``[G, I, O]`` of the dtype of ``x``, either major.
        bias1, bias2: ``[G, N]`` and ``[G, O]``, dtype of ``x`` or float32.
        kind, interleaved, limit, alpha, offset: the activation, see ``grouped_activation``.

    Returns:
        ``[S, O]`` in the dtype of ``x``.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: a forward-mode derivative is requested.
    """
    routing = routed(routing, w1.shape[0])
    _routing.check_rows("moe", "x", x, routing, "[S, H]")
    if weights is not None:
        _routing.check_weights("moe", weights, routing)
    constants = {"limit": limit, "alpha": alpha, "offset": offset}  # None: see ``grouped_activation``
    activation: dict[str, Any] = {name: value for name, value in constants.items() if value is not None}
    activation |= {"kind": kind, "interleaved": interleaved}
    if is_one_op(x.device, w1, w2):
        source, position, offs, top_k, token = routing
        operands = x, w1, w2, source, position, token, offs, weights, bias1, bias2
        return torch.ops.tgl.moe(*operands, top_k=top_k, **activation)[0]
    probs = None if weights is None else dispatch_weights(weights, routing)
    hidden = grouped_gemm(dispatch(x, routing), w1, routing.offs, bias1)
    hidden = activate(hidden, routing.offs, probs, **activation)
    rows = grouped_gemm(hidden, w2, routing.offs, bias2, None if bias2 is None else probs)
    return combine(rows, routing)


def routed(routing: Routing | Tensor, num_experts: int) -> Routing:
    """``routing``, or that of the experts that it chooses."""
    return route(routing, num_experts) if isinstance(routing, Tensor) else routing
