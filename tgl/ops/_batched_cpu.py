"""Many small bfloat16 groups on a CPU as a few ``torch.bmm`` over padded rows.

A ``torch.mm`` of bfloat16 matrices spends about 17 us on setting up its oneDNN primitive, whatever the size; ``bmm``
pays that once for all groups. With one thread and 128 groups of 64 rows, K = N = 128: 3440 us for the loop of ``mm``
(and for ATen's own grouped_mm), 1380 us for one ``bmm``, 1990 us with rows gathered and 30 % of padding. In float32 the
set-up is small, and the padding costs more than it saves.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

# Costs in units of one multiply-add of a bfloat16 product (about 9 ps), measured.
_SETUP = 1_800_000  # one torch.mm
_BATCH = 10_000_000  # planning one bmm, and the calls around it
_COPIED = 16  # one element of a gathered row or matrix


def choose(sizes: list[int], k: int, n: int) -> list[int]:
    """The groups, ascending, that take less time as ``bmm`` padded to the largest of them than in the loop.

    They are the smallest of those that have rows, or none, or often all; then also those without rows, so that no
    matrix need be copied. ``sizes`` ends with the tail.
    """
    return _best(sizes, k, n)[1]


def _best(sizes: list[int], k: int, n: int) -> tuple[int, list[int]]:
    """What the batch saves, and its groups."""
    room = _room(sizes, k, n)
    total = len(sizes) - 1
    groups = sorted((g for g, size in enumerate(sizes[:-1]) if size), key=sizes.__getitem__)
    if not k * n or len(groups) * _SETUP <= _BATCH:
        return 0, []
    best, count, rows = 0, 0, 0
    for i, g in enumerate(groups, 1):
        rows += sizes[g]
        places, matrices = (i * sizes[g], i) if i < len(groups) else (total * sizes[g], 0)
        copied = places * (k + n) + matrices * k * n
        batches = -(-copied // room)
        saved = i * _SETUP - (places - rows) * k * n - copied * _COPIED - batches * _BATCH
        if saved > best:
            best, count = saved, i
    return best, sorted(groups[:count]) if count < len(groups) else list(range(total))


def _room(sizes: list[int], k: int, n: int) -> int:
    """How many elements the copies of one batch may have.

    As many as the smaller of the two tensors of rows: a forward and backward then need no more memory at their peak
    than those of a loop that keeps the saved rows while it makes their gradient.
    """
    return sum(sizes) * min(k, n)


def _batches(sizes: list[int], groups: list[int], k: int, n: int, copied_matrices: bool) -> list[list[int]]:
    """``groups`` in batches whose copies keep to ``_room``."""
    each = max(sizes[g] for g in groups) * (k + n) + (k * n if copied_matrices else 0)
    count = max(1, _room(sizes, k, n) // each)
    return [groups[i : i + count] for i in range(0, len(groups), count)]


class _Places(NamedTuple):
    """Where the rows of the chosen groups lie in the batch: ``height`` places for each group.

    Attributes:
        groups: indices of the groups.
        height: rows of the largest group.
        source: the row of every place; in padding, the last row of the group or another.
        used: whether a place is no padding.
    """

    groups: Tensor
    height: int
    source: Tensor
    used: Tensor

    @classmethod
    def of(cls, sizes: list[int], groups: list[int]) -> _Places:
        index = torch.tensor(groups)
        ends = torch.tensor(list(accumulate(sizes))).index_select(0, index)[:, None]
        size = torch.tensor([sizes[g] for g in groups])[:, None]
        height = max(sizes[g] for g in groups)
        row = (ends - size) + torch.arange(height)
        return cls(index, height, torch.minimum(row, ends - 1).clamp_(min=0).view(-1), (row < ends).view(-1))

    def rows(self, t: Tensor) -> Tensor:
        """``[groups, height, columns]``: the rows of ``t`` in their places."""
        return t.index_select(0, self.source).view(len(self.groups), self.height, t.shape[1])


def _suits(*operands: Tensor) -> bool:
    return all(t.dtype == torch.bfloat16 and t.device.type == "cpu" and t.stride(1) == 1 for t in operands)


def choose_rows(a: Tensor, sizes: list[int], k: int, n: int) -> list[int]:
    """The groups for ``gemm``."""
    return choose(sizes, k, n) if _suits(a) else []


def saves_rows(a: Tensor, sizes: list[int], k: int, n: int, *, more_than: int) -> bool:
    """Whether ``gemm`` saves that much, in the unit of the costs above, by the groups chosen for it."""
    return _suits(a) and len(sizes) * _SETUP > more_than and _best(sizes, k, n)[0] > more_than


def choose_wgrad(a: Tensor, b: Tensor, sizes: list[int]) -> list[int]:
    """The groups for ``wgrad``."""
    return choose(sizes, a.shape[1], b.shape[1]) if _suits(a, b) else []


def gemm(a: Tensor, b: Tensor, sizes: list[int], groups: list[int], bias: Tensor | None, out: Tensor) -> set[int]:
    """Write ``a @ b[g] + bias[g]`` for ``groups``, which it returns as a set."""
    everything = len(groups) == b.shape[0]
    for batch in _batches(sizes, groups, b.shape[1], b.shape[2], not everything):
        _gemm(a, b, sizes, batch, everything, bias, out)
    return set(groups)


def _gemm(
    a: Tensor, b: Tensor, sizes: list[int], groups: list[int], consecutive: bool, bias: Tensor | None, out: Tensor
) -> None:
    # baddbmm of bfloat16 adds the bias before it rounds, as addmm does.
    at = _Places.of(sizes, groups)
    matrices = b[groups[0] : groups[-1] + 1] if consecutive else _select(b, at.groups)
    if bias is None:
        value = torch.bmm(at.rows(a), matrices)
    else:
        value = torch.baddbmm(bias.index_select(0, at.groups)[:, None], at.rows(a), matrices)
    if consecutive:
        used, start = at.used.nonzero().view(-1), sum(sizes[: groups[0]])
        torch.index_select(value.view(-1, b.shape[2]), 0, used, out=out[start : start + len(used)])
    else:
        parts = torch.split_with_sizes(out, sizes)
        torch._foreach_copy_([parts[g] for g in groups], [v[: sizes[g]] for g, v in zip(groups, value.unbind())])


def _select(matrices: Tensor, index: Tensor) -> Tensor:
    # In memory order: index_select of a transposed view takes ten times as long.
    if matrices.stride(1) == 1:
        return matrices.transpose(1, 2).index_select(0, index).transpose(1, 2)
    return matrices.index_select(0, index)


def wgrad(a: Tensor, b: Tensor, sizes: list[int], groups: list[int], out: Tensor) -> set[int]:
    """Write ``a[rows]^T @ b[rows]`` likewise."""
    everything = len(groups) == out.shape[0]
    for batch in _batches(sizes, groups, a.shape[1], b.shape[1], not everything):
        _wgrad(a, b, sizes, batch, everything, out)
    return set(groups)


def _wgrad(a: Tensor, b: Tensor, sizes: list[int], groups: list[int], consecutive: bool, out: Tensor) -> None:
    # Padding is zero on both sides: 0 * NaN would be NaN.
    at = _Places.of(sizes, groups)
    padding = at.used.logical_not().nonzero().view(-1)
    x, y = at.rows(a), at.rows(b)
    for rows in (x, y):
        rows.view(-1, rows.shape[2]).index_fill_(0, padding, 0)
    if consecutive:
        torch.bmm(x.transpose(1, 2), y, out=out[groups[0] : groups[-1] + 1])
    else:
        slots = out.unbind()
        torch._foreach_copy_([slots[g] for g in groups], torch.bmm(x.transpose(1, 2), y).unbind())
