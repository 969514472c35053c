"""Token permutation: sort by expert, gather tokens to grouped rows, and weighted sum back to tokens.

No gradient uses scatter-add: every row and every token is written once, so results are deterministic on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import debug
from ..meta.specs import accumulator
from ..ops._library import unobserved_call
from ..ops.route import route as route_op
from . import _routing_expressions as expressions
from . import _routing_function as function
from ._errors import fail, not_a_tensor, shown
from ._repr import one_line
from ._transforms import compiled_for_cpu


class Routing(NamedTuple):
    """The permutation between top-k slots of tokens and rows grouped by expert, in both directions.

    S tokens with k slots each, T rows (``S k``, or ``num_rows`` of ``route``), G experts.

    Attributes:
        source: int32 ``[T]``: row ``t`` of the grouped order is slot ``source[t] % k`` of token ``source[t] // k``.
            -1 from row ``offs[-1]`` on: these rows are unused.
        position: int32 ``[S k]``, the inverse: ``position[i]`` is the row of slot ``i % k`` of token ``i // k``; -1 for
            a dropped slot.
        offs: int32 ``[G]``: cumulative ends of the experts' rows.
        top_k: k.
        token: int32 ``[T]``: the token of every row, ``source // k``; -1 from row ``offs[-1]`` on.
    """

    source: Tensor
    position: Tensor
    offs: Tensor
    top_k: int
    token: Tensor

    def __repr__(self) -> str:
        return one_line(self)


def route(top_k_index: Tensor, num_experts: int, num_rows: int | None = None, *, sentinels: bool = False) -> Routing:
    """Group the top-k slots by expert, on the device; slots of one expert keep the order of their tokens.

    Args:
        top_k_index: integer ``[S, k]`` or ``[..., k]``: experts chosen by each token. Values out of range, negative or
            ``num_experts`` and more, are dropped slots: they have no row, and add nothing to a token. As many rows at
            the end are unused: ``dispatch`` fills them with zeros. Inside ``tgl.debug_checks()`` such values are an
            error, unless ``sentinels``.
        num_experts: G.
        num_rows: T, the capacity, for a known bound below ``S k`` or buffers of a fixed size; ``S k`` by default. If
            more slots have an expert, the rows of the last experts do not fit and their slots are dropped, which is an
            error inside ``tgl.debug_checks()``.
        sentinels: values out of range are intended, as in expert parallelism and from ``round_tokens``.

    Returns:
        The ``Routing``.

    Raises:
        TypeError: ``top_k_index`` is of no integer dtype, or ``num_experts`` or ``num_rows`` no integer.
        ValueError: ``top_k_index`` has fewer than two dimensions, no choices or 2^31 elements, or ``num_experts`` is
            negative, or ``num_rows`` is negative or 2^31.
    """
    if not isinstance(top_k_index, Tensor):
        not_a_tensor("tgl::route: `top_k_index`", top_k_index)
    if isinstance(num_experts, bool) or not isinstance(num_experts, (int, torch.SymInt)):
        fail(f"tgl::route: `num_experts` must be an integer, but got {num_experts!r}", TypeError)
    if num_rows is not None and (isinstance(num_rows, bool) or not isinstance(num_rows, (int, torch.SymInt))):
        fail(f"tgl::route: `num_rows` must be an integer or None, but got {num_rows!r}", TypeError)
    if not isinstance(sentinels, bool):
        fail(f"tgl::route: `sentinels` must be True or False, but got {shown(sentinels)}", TypeError)
    if top_k_index.dim() > 2:
        top_k_index = top_k_index.flatten(0, -2)
    if unobserved_call(top_k_index):
        return route_directly(top_k_index, num_experts, num_rows, sentinels)
    if compiled_for_cpu(top_k_index.device) and not debug.checking:
        source, position, token, offs = expressions.route(top_k_index, num_experts, num_rows)
    else:
        options = {"sentinels": True} if sentinels else {}
        source, position, token, offs = torch.ops.tgl.route.default(top_k_index, num_experts, num_rows, **options)
    return Routing(source, position, offs, top_k_index.shape[1], token)


def route_directly(
    top_k_index: Tensor, num_experts: int, num_rows: int | None = None, sentinels: bool = False
) -> Routing:
    """Call ``route`` without the dispatcher, in an ``unobserved_call``."""
    source, position, token, offs = route_op(top_k_index, num_experts, num_rows, sentinels=sentinels)
    return Routing(source, position, offs, top_k_index.shape[1], token)


def _check_size(op: str, argument: str, t: Tensor, dim: int, letters: str, expected: int | torch.SymInt) -> None:
    """Check dimension ``dim`` of ``t``, whose dimensions are named ``letters``, which is not ``expected`` or symbolic.

    Callers have compared the two, so that a call whose sizes are right does not enter this function.
    """
    same = t.shape[dim] == expected
    letter = letters.strip("[]").split(", ")[dim]
    if same is False:
        must = f"{letters} with {letter} = {expected} like `routing`"
        fail(f"tgl::{op}: `{argument}` must be {must}, but got shape {tuple(t.shape)}")
    message = f"tgl::{op}: `{argument}` must be {letters} with {letter} like `routing`"
    # `same` is symbolic, so the message cannot contain sizes. It is a default argument, because torch 2.11's Dynamo
    # does not support a message with a closure.
    torch._check(same, lambda message=message: message)


def check_rows(op: str, argument: str, t: Tensor, routing: Routing, letters: str) -> None:
    """Check that ``t`` has the T rows or S tokens of ``routing`` (by the first of ``letters``) and is on its device."""
    if not isinstance(routing, Routing):
        fail(f"tgl::{op}: `routing` must be a tgl.Routing, but got {type(routing).__name__}", TypeError)
    if not isinstance(t, Tensor):
        not_a_tensor(f"tgl::{op}: `{argument}`", t)
    if t.dim() != 2:
        fail(f"tgl::{op}: `{argument}` must be 2-D {letters}, but got shape {tuple(t.shape)}")
    in_rows = letters.startswith("[T")
    count = routing.source.shape[0] if in_rows else routing.position.shape[0] // routing.top_k
    if (t.shape[0] == count) is not True:
        _check_size(op, argument, t, 0, letters, count)
    if t.device != routing.position.device:
        fail(f"tgl::{op}: `{argument}` must be on {routing.position.device} like `routing`, but got {t.device}")


def check_weights(op: str, weights: Tensor, routing: Routing) -> None:
    check_rows(op, "weights", weights, routing, "[S, k]")
    if (weights.shape[1] == routing.top_k) is not True:
        _check_size(op, "weights", weights, 1, "[S, k]", routing.top_k)


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """Copy every token to the rows of the experts it chose.

    Args:
        x: ``[S, H]`` or ``[..., H]`` of any dtype.
        routing: from ``route``.

    Returns:
        ``[T, H]`` of that dtype, grouped by expert. Differentiable, to second order.

    Raises:
        ValueError: ``x`` does not have the tokens of ``routing``, or is on another device.
    """
    if isinstance(x, Tensor) and x.dim() > 2:
        x = x.flatten(0, -2)
    check_rows("dispatch", "x", x, routing, "[S, H]")
    return _dispatch(x, routing.token, routing.position, routing.top_k)


def _dispatch(x: Tensor, token: Tensor, position: Tensor, top_k: int) -> Tensor:
    if unobserved_call(x, token, position):
        return function.dispatch(token, position, top_k, x)
    if compiled_for_cpu(x.device):
        return expressions.dispatch(x, token, position, top_k)
    return torch.ops.tgl.dispatch(x, token, position, top_k)


def dispatch_both(x: Tensor, weights: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Return ``dispatch`` of ``x [S, H]`` and ``dispatch_weights`` of ``weights [S, k]``."""
    check_rows("dispatch_both", "x", x, routing, "[S, H]")
    check_weights("dispatch_both", weights, routing)
    if unobserved_call(x, weights, *routing[:2], routing.token):
        return function.dispatch_both(routing.token, routing.source, routing.position, routing.top_k, x, weights)
    rows = _dispatch(x, routing.token, routing.position, routing.top_k)
    return rows, _weights_in_order(weights, routing)


def dispatch_weights(weights: Tensor, routing: Routing) -> Tensor:
    """Permute the routing weights to the order of the rows, for ``probs`` of ``GroupedMLP``.

    Args:
        weights: ``[S, k]`` or ``[..., k]``: routing weight of every top-k slot, of any floating dtype.
        routing: from ``route``.

    Returns:
        ``[T]`` of that dtype. Differentiable, to second order.

    Raises:
        ValueError: ``weights`` does not have the tokens and slots of ``routing``, or is on another device.
    """
    if isinstance(weights, Tensor) and weights.dim() > 2:
        weights = weights.flatten(0, -2)
    check_weights("dispatch_weights", weights, routing)
    return _weights_in_order(weights, routing)


def _weights_in_order(weights: Tensor, routing: Routing) -> Tensor:
    # A dispatch of S k tokens with one slot each.
    return _dispatch(weights.reshape(-1), routing.source, routing.position, 1)


def combine(y: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Sum the experts' results for every token.

    Args:
        y: ``[T, H]``, grouped by expert, in the order of ``dispatch``.
        routing: from ``route``.
        weights: ``[S, k]`` or ``[..., k]``: routing weight of every top-k slot; None if the experts have already
            applied the weights, as ``GroupedMLP`` does with ``probs``, which is cheaper.

    Returns:
        ``[S, H]`` of the dtype of ``y`` (``[..., H]`` with such ``weights``). For token ``s``, the sum over its slots
        ``j`` of ``weights[s, j] * y[row of (s, j)]``.

    Raises:
        ValueError: ``y`` does not have the rows of ``routing``, or ``weights`` its tokens and slots, or one of them is
            on another device.
    """
    if isinstance(weights, Tensor) and weights.dim() > 2:
        return combine(y, routing, weights.flatten(0, -2)).unflatten(0, weights.shape[:-1])
    check_rows("combine", "y", y, routing, "[T, H]")
    if weights is not None:
        check_weights("combine", weights, routing)
    token, position, top_k = routing.token, routing.position, routing.top_k
    if weights is None and unobserved_call(y, token, position):
        return function.combine(token, position, top_k, y)
    if compiled_for_cpu(y.device):
        rows = y if weights is None else y.to(accumulator(y.dtype)) * _weights_in_order(weights, routing)[:, None]
        return expressions.combine(rows, token, position, top_k).to(y.dtype)
    if weights is not None and weights.dtype != y.dtype:
        weights = weights.to(accumulator(y.dtype))
    return torch.ops.tgl.combine(y, token, position, top_k, weights)
