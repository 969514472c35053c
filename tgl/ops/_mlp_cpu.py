"""``grouped_mlp`` on a CPU: a few groups at a time go through all of their steps while their rows are in the cache.

Between one op and the next the rows of all groups would go out to memory and come back, and every op would cost its
share of Python. One thread, float32, 8 groups of 128 rows, 128 x 256: 10.8 ms for forward and backward, 12.9 ms for the
composition of the ops.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..meta.mlp import by_columns
from . import _activation_cpu, _batched_cpu, _mlp
from ._segments import below_autograd, native_matmul, segment_sizes

if TYPE_CHECKING:
    from .grouped_activation import Params

_TOGETHER = 1 << 17  # elements of ``h`` in the groups that are taken together; a larger group is taken alone
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


def _in_turn(sizes: list[int], width: int) -> list[_Groups]:
    most = _TOGETHER // max(width, 1)
    turns, first, start, rows = [], 0, 0, 0
    for g, size in enumerate(sizes):
        if rows and rows + size > most:
            turns.append(_Groups(first, g, start, start + rows, sizes[first:g]))
            first, start, rows = g, start + rows, 0
        rows += size
    turns.append(_Groups(first, len(sizes), start, start + rows, sizes[first:]))
    return turns


def _prefers_batches(h: Tensor, sizes: list[int], depth: int) -> bool:
    """Whether small groups gain more by being multiplied in one batch."""
    saved = _batched_cpu.saving_rows(h, sizes, depth, h.shape[1])
    return saved > _LOCALITY * sum(sizes[:-1]) * h.shape[1]


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
    with below_autograd():
        turns = _in_turn(sizes, h.shape[1])
        x_parts, h_parts, y_parts = (torch.split_with_sizes(t, all_sizes) for t in (x, h, y))
        w1_parts, w2_parts = w1.unbind(), w2.unbind()
        room = h.new_empty(max(t.rows for t in turns), w2.shape[1]) if act is None else None
        for turn in turns:
            if not turn.rows:
                continue
            groups, rows = range(turn.first, turn.last), slice(turn.start, turn.end)
            for g in groups:
                if sizes[g]:
                    torch.mm(x_parts[g], w1_parts[g], out=h_parts[g])
            a = room[: turn.rows] if act is None else act[rows]
            p = probs[rows] if probs is not None else None
            _activation_cpu.forward_rows(h[rows], p, turn.rows, params=params, out=a)
            for g, part in zip(groups, turn.parts(a)):
                if sizes[g]:
                    torch.mm(part, w2_parts[g], out=y_parts[g])
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
    with below_autograd():
        turns = _in_turn(sizes, h.shape[1])
        most = max(t.rows for t in turns)
        dy_parts = torch.split_with_sizes(dy, all_sizes)
        through = dx is not None or dw1 is not None or dprobs is not None
        act_room = h.new_empty(most, w2.shape[1]) if dw2 is not None and act is None else None
        if through:
            w1_parts, w2_parts = (w.transpose(1, 2).unbind() for w in (w1, w2))
            x_parts = torch.split_with_sizes(x, all_sizes) if x is not None else dy_parts  # not read
            dx_parts = torch.split_with_sizes(dx, all_sizes) if dx is not None else None
            dact_room, dh_room = h.new_empty(most, w2.shape[1]), h.new_empty(most, h.shape[1])
            sums = dprobs
            if dprobs is not None and dprobs.dtype != torch.promote_types(h.dtype, torch.float32):
                sums = torch.empty(dprobs.shape)
        put1, put2 = (_slots(w, dw) for w, dw in ((w1, dw1), (w2, dw2)))
        for turn in turns:
            groups, rows = range(turn.first, turn.last), slice(turn.start, turn.end)
            hidden, p = h[rows], probs[rows] if probs is not None else None
            a = act_room[: turn.rows] if act_room is not None else act[rows] if act is not None else None
            if through:
                dact, dh = dact_room[: turn.rows], dh_room[: turn.rows]
                for g, part in zip(groups, turn.parts(dact)):
                    if sizes[g]:
                        torch.mm(dy_parts[g], w2_parts[g], out=part)
                _activation_cpu.backward_rows(
                    dact,
                    hidden,
                    p,
                    turn.rows,
                    params=params,
                    dx=dh,
                    dprobs=sums[rows] if sums is not None else None,
                    y=a if act_room is not None else None,
                )
                for g, part in zip(groups, turn.parts(dh)):
                    put1(g, sizes[g], x_parts[g], part)
                    if dx_parts is not None and sizes[g]:
                        torch.mm(part, w1_parts[g], out=dx_parts[g])
            elif act_room is not None:
                _activation_cpu.forward_rows(hidden, p, turn.rows, params=params, out=a)
            if dw2 is not None:
                for g, part in zip(groups, turn.parts(a)):
                    put2(g, sizes[g], part, dy_parts[g])
        if through and dprobs is not None and sums is not dprobs:
            dprobs.copy_(sums)
        if tail:
            for t in (dx, dprobs):
                if t is not None:
                    t[t.shape[0] - tail :].zero_()


def _slots(w: Tensor, dw: Tensor | None):
    """``put(g, size, a, b)`` that writes ``a^T b`` into slot ``g`` of ``dw``, in the memory order of ``w``."""
    if dw is None:
        return lambda g, size, a, b: None
    swapped = by_columns(w)
    slots = dw.transpose(1, 2).unbind() if swapped else dw.unbind()

    def put(g: int, size: int, a: Tensor, b: Tensor) -> None:
        if not size:
            slots[g].zero_()
        elif swapped:
            torch.mm(b.t(), a, out=slots[g])
        else:
            torch.mm(a.t(), b, out=slots[g])

    return put
