"""``grouped_mlp`` on a CPU: a few groups at a time go through all of their steps while their rows are in the cache.

Between one op and the next the rows of all groups would go out to memory and come back, and every op would cost its
share of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..meta.mlp import by_columns
from . import _activation_cpu, _batched_cpu, _mlp
from ._segments import below_autograd, native_matmul, segment_sizes

if TYPE_CHECKING:
    from .grouped_activation import Params

_TOGETHER = 1 << 18  # bytes of ``h`` of the groups that are taken together; a larger group is taken alone
_LOCALITY = 100  # what an element of ``h`` gains by that, in the unit of ``_batched_cpu``; measured


class _Groups(NamedTuple):
    """Neighbouring groups: their indices, their rows, and the sizes of all."""

    first: int
    last: int
    start: int
    end: int
    sizes: list[int]

    @property
    def rows(self) -> int:
        return self.end - self.start

    def parts(self, t: Tensor) -> tuple[Tensor, ...]:
        """The groups' parts of ``t``, which has their rows alone."""
        return (t,) if len(self.sizes) == 1 else torch.split_with_sizes(t, self.sizes)


def _in_turn(sizes: list[int], h: Tensor) -> list[_Groups]:
    most = _TOGETHER // max(h.shape[1] * h.element_size(), 1)
    turns, first, start, rows = [], 0, 0, 0
    for g, size in enumerate(sizes):
        if rows and rows + size > most:
            turns.append(_Groups(first, g, start, start + rows, sizes[first:g]))
            first, start, rows = g, start + rows, 0
        rows += size
    turns.append(_Groups(first, len(sizes), start, start + rows, sizes[first:]))
    return turns


def _prefers_batches(h: Tensor, sizes: tuple[int, ...], depth: int) -> bool:
    """Whether small groups gain more by being multiplied in batches."""
    if h.dtype != torch.bfloat16:
        return False
    saved, _ = _batched_cpu.plan(sizes, *sorted((depth, h.shape[1])))
    return saved > _LOCALITY * h.numel()


def supports_forward(
    x: Tensor, w1: Tensor, w2: Tensor, offs: Tensor, probs: Tensor | None, *biases: Tensor | None, **_: object
) -> backends.Reason:
    """Why the groups cannot be taken in turn."""
    if any(bias is not None for bias in biases):
        return "takes no biases"
    return None if native_matmul(x) else f"has no fast matrix product for {x.dtype} here"


def supports_backward(
    dy: Tensor,
    x: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    h: Tensor,
    act: Tensor | None,
    probs: Tensor | None,
    bias2: Tensor | None,
    *,
    dbias1: Tensor | None,
    dbias2: Tensor | None,
    **_: object,
) -> backends.Reason:
    """Likewise."""
    return supports_forward(dy, w1, w2, offs, probs, bias2, dbias1, dbias2)


def forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    *,
    params: Params,
    y: Tensor,
    h: Tensor,
    act: Tensor | None,
) -> None:
    """See ``_mlp.forward``, whose bits these are."""
    *sizes, tail = all_sizes = segment_sizes(offs, x.shape[0])
    if _prefers_batches(h, all_sizes, w1.shape[1]):
        return _mlp.forward(x, w1, w2, offs, probs, bias1, bias2, params=params, y=y, h=h, act=act)
    mm = torch.mm
    with below_autograd():
        turns = _in_turn(sizes, h)
        x_parts, h_parts, y_parts = (torch.split_with_sizes(t, all_sizes) for t in (x, h, y))
        w1_parts, w2_parts = w1.unbind(), w2.unbind()
        most = max(t.rows for t in turns)
        room: Any = h.new_empty(most, w2.shape[1]) if act is None else None
        steps, column = _activation_cpu.Steps(h, w2.shape[1], most, params), _activation_cpu.column(probs)
        for turn in turns:
            groups, rows = slice(turn.first, turn.last), slice(turn.start, turn.end)
            for part, w, out in zip(x_parts[groups], w1_parts[groups], h_parts[groups]):
                mm(part, w, out=out)
            a = room[: turn.rows] if act is None else act[rows]
            p = None if column is None else column[rows]
            _activation_cpu.forward_rows(steps, h[rows], p, turn.rows, out=a)
            for part, w, out in zip(turn.parts(a), w2_parts[groups], y_parts[groups]):
                mm(part, w, out=out)
        if tail:
            for t in (y, h, act):
                if t is not None:
                    t[t.shape[0] - tail :].zero_()


def backward(
    dy: Tensor,
    x: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    h: Tensor,
    act: Tensor | None,
    probs: Tensor | None,
    bias2: Tensor | None,
    *,
    params: Params,
    dx: Tensor | None,
    dw1: Tensor | None,
    dw2: Tensor | None,
    dprobs: Tensor | None,
    dbias1: Tensor | None,
    dbias2: Tensor | None,
) -> None:
    """See ``_mlp.backward``, whose bits these are."""
    *sizes, tail = all_sizes = segment_sizes(offs, dy.shape[0])
    wanted = {"dx": dx, "dw1": dw1, "dw2": dw2, "dprobs": dprobs, "dbias1": dbias1, "dbias2": dbias2}
    if _prefers_batches(h, all_sizes, w1.shape[1]):
        return _mlp.backward(dy, x, w1, w2, offs, h, act, probs, bias2, params=params, **wanted)
    mm = torch.mm
    with below_autograd():
        turns = _in_turn(sizes, h)
        most = max(t.rows for t in turns)
        needs_dh = dx is not None or dw1 is not None or dprobs is not None
        w1_parts, w2_parts = (w.transpose(1, 2).unbind() for w in (w1, w2))
        dy_parts = torch.split_with_sizes(dy, all_sizes)
        x_parts, dx_parts = (() if t is None else torch.split_with_sizes(t, all_sizes) for t in (x, dx))
        wgrad1, wgrad2 = (None if dw is None else _wgrad(dw, by_columns(w)) for dw, w in ((dw1, w1), (dw2, w2)))
        room: Any = h.new_empty(most, w2.shape[1]) if act is None and dw2 is not None else None
        dact_room: Any
        dh_room: Any
        dact_room, dh_room = (h.new_empty(most, t) if needs_dh else None for t in (w2.shape[1], h.shape[1]))
        steps = _activation_cpu.Steps(h, w2.shape[1], most, params, backward=needs_dh)
        column = _activation_cpu.column(probs)
        sums: Any = dprobs
        if dprobs is not None and dprobs.dtype != steps.dtype:
            sums = torch.empty(dprobs.shape, dtype=steps.dtype)
        for turn in turns:
            groups, rows = slice(turn.first, turn.last), slice(turn.start, turn.end)
            hidden, p = h[rows], None if column is None else column[rows]
            a: Any = act[rows] if act is not None else None if room is None else room[: turn.rows]
            if needs_dh:
                dact, dh = dact_room[: turn.rows], dh_room[: turn.rows]
                for part, w, out in zip(dy_parts[groups], w2_parts[groups], turn.parts(dact)):
                    mm(part, w, out=out)
                dp, value = None if sums is None else sums[rows], a if act is None else None
                _activation_cpu.backward_rows(steps, dact, hidden, p, turn.rows, dx=dh, dprobs=dp, y=value)
                dh_parts = turn.parts(dh)
                if wgrad1 is not None:
                    wgrad1(x_parts[groups], dh_parts, groups)
                for part, w, out in zip(dh_parts, w1_parts[groups], dx_parts[groups]):
                    mm(part, w, out=out)
            elif act is None:
                _activation_cpu.forward_rows(steps, hidden, p, turn.rows, out=a)
            if wgrad2 is not None:
                wgrad2(turn.parts(a), dy_parts[groups], groups)
        if dprobs is not None and sums is not dprobs:
            dprobs.copy_(sums)
        if tail:
            for t in (dx, dprobs):
                if t is not None:
                    t[t.shape[0] - tail :].zero_()


def _wgrad(dw: Tensor, swapped: bool) -> Callable[[Sequence[Tensor], Sequence[Tensor], slice], None]:
    """``f(a, b, groups)`` that writes ``a^T b`` of the groups into their slots, ``swapped`` where those lie transposed.

    Groups without rows come out as zeros.
    """
    mm, slots = torch.mm, (dw.transpose(1, 2) if swapped else dw).unbind()

    def write(a: Sequence[Tensor], b: Sequence[Tensor], groups: slice) -> None:
        for left, right, slot in zip(b if swapped else a, a if swapped else b, slots[groups]):
            mm(left.t(), right, out=slot)

    return write
