"""From a router's choice to groups of rows and back: sort by expert, gather, and weighted sum.

Forward and backward are gathers only, never a scatter-add, so they are deterministic on every device and need no
atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..meta import checks
from ._errors import fail
from ._transforms import applier


class Routing(NamedTuple):
    """The row of every (token, choice) pair, in both directions. S tokens, k choices each, T = S k rows, G experts.

    Attributes:
        source: int64 ``[T]``: row ``t`` of the grouped order is choice ``source[t] % k`` of token ``source[t] // k``.
        position: int64 ``[T]``, the inverse: pair ``i`` (token ``i // k``, choice ``i % k``) is row ``position[i]``.
        offs: int32 ``[G]``: cumulative ends of the experts' rows.
        top_k: k.
        token: int64 ``[T]``: the token of every row, ``source // k``.
    """

    source: Tensor
    position: Tensor
    offs: Tensor
    top_k: int
    token: Tensor


def route(top_k_index: Tensor, num_experts: int) -> Routing:
    """Group the (token, choice) pairs by expert, on the device; pairs of one expert keep the order of their tokens.

    Args:
        top_k_index: integer ``[S, k]``: experts chosen by each token. Values out of range, negative or ``num_experts``
            and more (the sentinels of expert parallelism), go to the tail: no expert's rows, and zeros in every grouped
            op.
        num_experts: G.

    Returns:
        The ``Routing``.

    Raises:
        TypeError: ``top_k_index`` is of no integer dtype, or ``num_experts`` no integer.
        ValueError: ``top_k_index`` does not have two dimensions or no choices, or ``num_experts`` is negative.
    """
    op = "route"
    checks.ndim(op, "top_k_index", top_k_index, 2, "[S, k]")
    dtype = top_k_index.dtype
    checks.require(dtype in checks.INTEGERS, op, "top_k_index", "an integer tensor", dtype, TypeError)
    if not isinstance(num_experts, (int, torch.SymInt)):
        fail(f"tgl::{op}: `num_experts` must be an integer, but got {num_experts!r}", TypeError)
    if num_experts < 0:
        fail(f"tgl::{op}: `num_experts` must be at least 0, but got {num_experts}")
    if top_k_index.shape[1] == 0:
        fail(f"tgl::{op}: `top_k_index` must be [S, k] with k of at least 1, but got shape {tuple(top_k_index.shape)}")
    choices = top_k_index.reshape(-1)
    if choices.dtype.itemsize < 4:
        choices = choices.int()  # a dtype that may be too narrow to count the experts
    choices = choices.masked_fill(choices < 0, num_experts)
    experts, source = torch.sort(choices, stable=True)
    top_k = top_k_index.shape[-1]
    position = torch.empty_like(source).scatter_(0, source, torch.arange(source.shape[0], device=source.device))
    groups = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    offs = torch.searchsorted(experts, groups, right=True, out_int32=True)
    return Routing(source, position, offs, top_k, source // top_k if top_k != 1 else source)


def _sum_choices(rows: Tensor, position: Tensor, top_k: int) -> Tensor:
    """``[S, ...]``: for every token the sum of its ``top_k`` rows, accumulated in float32 and rounded once."""
    if top_k == 1:
        return rows.index_select(0, position)
    if torch.compiler.is_compiling():  # the compiler makes one loop of them
        return rows.index_select(0, position).unflatten(0, (-1, top_k)).sum(1)
    # One pass over the rows, where a gather and a sum would write and read another [T, H].
    starts = torch.arange(0, position.shape[0], top_k, device=position.device)
    return torch.embedding_bag(rows, position, starts, mode=0)[0]


def _transposed_dispatch(grad: Tensor, token: Tensor, position: Tensor, top_k: int) -> Tensor:
    if torch.is_grad_enabled():  # a second order may follow
        return _sum(grad, token, position, top_k)
    return _sum_choices(grad, position, top_k)


class _Dispatch(torch.autograd.Function):
    """Row ``t`` of the result is row ``token[t]`` of ``x``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, token: Tensor, position: Tensor, top_k: int) -> Tensor:
        return x.index_select(0, token)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, token, position, ctx.top_k = inputs
        ctx.save_for_backward(token, position)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        token, position = ctx.saved_tensors
        return _transposed_dispatch(grad, token, position, ctx.top_k), None, None, None


class _DispatchBoth(torch.autograd.Function):
    """``_Dispatch`` of tokens ``[S, H]`` and of weights ``[S, k]``, as one node."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weights: Tensor, token: Tensor, source: Tensor, position: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor]:
        return x.index_select(0, token), weights.reshape(-1).index_select(0, source)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        _, _, token, source, position, ctx.top_k = inputs
        ctx.save_for_backward(token, source, position)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        token, source, position = ctx.saved_tensors
        dx = _transposed_dispatch(grad, token, position, ctx.top_k) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None, None, None
        dweights = _transposed_dispatch(grad_weights, source, position, 1).view(-1, ctx.top_k)
        return dx, dweights, None, None, None, None


class _Sum(torch.autograd.Function):
    """The transpose of ``_Dispatch``: each is the other's derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor, token: Tensor, position: Tensor, top_k: int) -> Tensor:
        return _sum_choices(y, position, top_k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, token, position, ctx.top_k = inputs
        ctx.save_for_backward(token, position)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        token, position = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second order may follow
            return _dispatch(grad, token, position, ctx.top_k), None, None, None
        return grad.index_select(0, token), None, None, None


_dispatch, _dispatch_both, _sum = applier(_Dispatch), applier(_DispatchBoth), applier(_Sum)


def _check_size(op: str, argument: str, t: Tensor, dim: int, letters: str, expected: int | torch.SymInt) -> None:
    """Dimension ``dim`` of ``t``, whose dimensions are called ``letters``, is what ``routing`` says."""
    same = t.shape[dim] == expected
    if same is True:
        return
    letter = letters.strip("[]").split(", ")[dim]
    if same is False:
        must = f"{letters} with {letter} = {expected} like `routing`"
        fail(f"tgl::{op}: `{argument}` must be {must}, but got shape {tuple(t.shape)}")
    message = f"tgl::{op}: `{argument}` must be {letters} with {letter} like `routing`"
    torch._check(same, lambda: message)  # of symbols, which a message cannot hold


def _check_rows(op: str, argument: str, t: Tensor, routing: Routing, letters: str) -> None:
    """``t`` has the rows of ``routing`` that the first of ``letters`` means, and is on its device."""
    if not isinstance(routing, Routing):
        fail(f"tgl::{op}: `routing` must be a tgl.Routing, but got {type(routing).__name__}", TypeError)
    if t.dim() != 2:
        fail(f"tgl::{op}: `{argument}` must be 2-D {letters}, but got shape {tuple(t.shape)}")
    pairs = routing.position.shape[0]
    _check_size(op, argument, t, 0, letters, pairs if letters.startswith("[T") else pairs // routing.top_k)
    if t.device != routing.position.device:
        fail(f"tgl::{op}: `{argument}` must be on {routing.position.device} like `routing`, but got {t.device}")


def _check_weights(op: str, weights: Tensor, routing: Routing) -> None:
    _check_rows(op, "weights", weights, routing, "[S, k]")
    _check_size(op, "weights", weights, 1, "[S, k]", routing.top_k)


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """Copy every token to the rows of the experts it chose.

    Args:
        x: ``[S, H]`` of any dtype.
        routing: from ``route``.

    Returns:
        ``[T, H]`` of that dtype, grouped by expert. Differentiable, to second order.

    Raises:
        ValueError: ``x`` does not have the tokens of ``routing``, or is on another device.
    """
    _check_rows("dispatch", "x", x, routing, "[S, H]")
    return _dispatch(x, routing.token, routing.position, routing.top_k)


def dispatch_both(x: Tensor, weights: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """``dispatch`` of ``x [S, H]`` and ``dispatch_weights`` of ``weights [S, k]`` at the price of one."""
    _check_rows("dispatch_both", "x", x, routing, "[S, H]")
    _check_weights("dispatch_both", weights, routing)
    return _dispatch_both(x, weights, routing.token, routing.source, routing.position, routing.top_k)


def dispatch_weights(weights: Tensor, routing: Routing) -> Tensor:
    """Permute the routing weights to the order of the rows, for ``probs`` of ``GroupedMLP``.

    Args:
        weights: ``[S, k]``: routing weight of every choice, of any floating dtype.
        routing: from ``route``.

    Returns:
        ``[T]`` of that dtype. Differentiable, to second order.

    Raises:
        ValueError: ``weights`` does not have the tokens and choices of ``routing``, or is on another device.
    """
    _check_weights("dispatch_weights", weights, routing)
    return _weights_in_order(weights, routing)


def _weights_in_order(weights: Tensor, routing: Routing) -> Tensor:
    # A dispatch of k times as many tokens of one choice.
    return _dispatch(weights.reshape(-1), routing.source, routing.position, 1)


def combine(y: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Sum the experts' results for every token.

    Args:
        y: ``[T, H]``, grouped by expert, in the order of ``dispatch``.
        routing: from ``route``.
        weights: ``[S, k]``: routing weight of every choice; None if the experts have applied the weights already, as
            ``GroupedMLP`` does with ``probs``, which is cheaper.

    Returns:
        ``[S, H]`` of the dtype of ``y``: for token ``s``, the sum over its choices ``j`` of
        ``weights[s, j] * y[row of (s, j)]``.

    Raises:
        ValueError: ``y`` does not have the rows of ``routing``, or ``weights`` its tokens and choices, or one of them
            is on another device.
    """
    _check_rows("combine", "y", y, routing, "[T, H]")
    if weights is not None:
        _check_weights("combine", weights, routing)
    rows = y if weights is None else y * _weights_in_order(weights, routing)[:, None]
    return _sum(rows, routing.token, routing.position, routing.top_k).to(y.dtype)
