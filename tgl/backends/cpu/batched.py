"""Many small bfloat16 groups on a CPU as a few ``torch.bmm`` over padded rows.

A ``torch.mm`` of bfloat16 matrices spends about 15 us on setting up its oneDNN primitive, whatever the size; ``bmm``
pays that once for all groups. With one thread, 11 groups of 64 rows, padded to 86, K = N = 128: 330 us for the ``mm``,
160 us for one ``bmm`` and 20 us for moving rows. In float32 the set-up is small, and the padding costs more than it
saves.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .indexed import InScratch

# Costs in units of one multiply-add of a bfloat16 product (about 9 ps), measured.
_SETUP = 1_700_000  # one torch.mm
_BATCH = 7_000_000  # one bmm, with its gathers and copies
_COPIED = 10  # one element of a gathered row or matrix
_SLICED = 250_000  # finding the rows or the matrix of one group
_LOOP = 12_000_000  # the loop over the remaining groups, in Python instead of ATen

Batches = tuple[tuple[int, ...], ...]


def plan(sizes: tuple[int, ...], k: int, n: int) -> tuple[int, Batches]:
    """Return the cost that batches save, and the groups that are faster in them, for matrices ``k`` x ``n``; k <= n.

    A batch has either all groups, also those without rows, in order, so that no matrix need be copied; or groups of
    similar size; every batch is padded to its largest group. Groups of a batch ascend. ``sizes`` ends with the tail.
    """
    groups = sorted((g for g, size in enumerate(sizes[:-1]) if size), key=sizes.__getitem__, reverse=True)
    if not k * n or len(groups) * _SETUP <= _BATCH:
        return 0, ()
    # The copies of a batch have at most as many elements as the smaller of the two tensors of rows: a forward and
    # backward then peak no higher than a loop that keeps the saved rows while it computes their gradient.
    room, place = sum(sizes) * k, k * n + (k + n) * _COPIED
    nothing: tuple[int, Batches] = (0, ())
    return max(nothing, _of_all_groups(sizes, k, n, room, place), _of_similar_size(sizes, groups, k, n, room, place))


def _of_all_groups(sizes: tuple[int, ...], k: int, n: int, room: int, place: int) -> tuple[int, Batches]:
    """Batch all groups, in as many consecutive ones at a time as the capacity allows."""
    total = len(sizes) - 1
    count = max(1, room // (max(sizes[:-1]) * (k + n)))
    batches = tuple(tuple(range(g, min(g + count, total))) for g in range(0, total, count))
    places = sum(len(batch) * max(sizes[g] for g in batch) for batch in batches)
    rows = sum(sizes[:-1])
    loop = sum(size > 0 for size in sizes[:-1]) * _SETUP + rows * k * n
    return loop - places * place - len(batches) * _BATCH, batches


def _of_similar_size(
    sizes: tuple[int, ...], groups: list[int], k: int, n: int, room: int, place: int
) -> tuple[int, Batches]:
    """Batch groups of similar size; ``groups`` descend by size."""
    saved, batches, start = -_LOOP, [], 0
    while start < len(groups):
        height = sizes[groups[start]]
        most = max(1, room // (height * (k + n) + k * n))
        end, padding = start + 1, 0
        while end < len(groups) and end - start < most:
            padding += (height - sizes[groups[end]]) * place
            if padding > _BATCH:  # another batch is cheaper
                break
            end += 1
        batch = groups[start:end]
        rows = sum(sizes[g] for g in batch)
        loop = len(batch) * _SETUP + rows * k * n
        gained = loop - len(batch) * (height * place + k * n * _COPIED + _SLICED) - _BATCH
        if gained > 0:
            saved += gained
            batches.append(tuple(sorted(batch)))
        start = end
    return saved, tuple(batches)


class _BatchLayout(NamedTuple):
    """Positions of the chosen groups' rows in the batch: ``height`` places for each group.

    Attributes:
        groups: indices of the groups.
        height: rows of the largest group.
        source: the row of every place; in padding, any row.
        used: the places that are not padding.
        padding: the places that are.
    """

    groups: Tensor
    height: int
    source: Tensor
    used: Tensor
    padding: Tensor

    def rows(self, t: Tensor | InScratch) -> Tensor:
        """Return ``[groups, height, columns]``: the rows of ``t`` in their places."""
        return t.index_select(0, self.source).view(len(self.groups), self.height, t.shape[1])


@functools.lru_cache(maxsize=16)  # repeated by the products of a layer; some 17 bytes per place
def _places(sizes: tuple[int, ...], groups: tuple[int, ...]) -> _BatchLayout:
    index = torch.tensor(groups, dtype=torch.int64, device="cpu")
    ends, size = (
        torch.tensor([n[g] for g in groups], dtype=torch.int64, device="cpu")[:, None]
        for n in (list(accumulate(sizes)), sizes)
    )
    height = max(sizes[g] for g in groups)
    row = (ends - size) + torch.arange(height, device="cpu")
    used = (row < ends).view(-1)
    source = torch.minimum(row, ends - 1).clamp_(min=0).view(-1)
    return _BatchLayout(index, height, source, used.nonzero().view(-1), used.logical_not_().nonzero().view(-1))


def gemm(
    a: Tensor | InScratch, b: Tensor, sizes: tuple[int, ...], batches: Batches, bias: Tensor | None, out: Tensor
) -> set[int]:
    """Write ``a @ b[g] + bias[g]`` for the groups of ``batches``, and return those groups as a set."""
    for batch in batches:
        _gemm(a, b, sizes, batch, bias, out)
    return {g for batch in batches for g in batch}


def _consecutive(groups: tuple[int, ...]) -> bool:
    return groups[-1] - groups[0] + 1 == len(groups)


def _gemm(
    a: Tensor | InScratch,
    b: Tensor,
    sizes: tuple[int, ...],
    groups: tuple[int, ...],
    bias: Tensor | None,
    out: Tensor,
) -> None:
    # baddbmm of bfloat16 adds the bias before it rounds, like addmm.
    at, consecutive = _places(sizes, groups), _consecutive(groups)
    matrices = b[groups[0] : groups[-1] + 1] if consecutive else _select(b, at.groups)
    if bias is None:
        value = torch.bmm(at.rows(a), matrices)
    else:
        value = torch.baddbmm(bias.index_select(0, at.groups)[:, None], at.rows(a), matrices)
    if consecutive:
        start = sum(sizes[: groups[0]])
        torch.index_select(value.view(-1, b.shape[2]), 0, at.used, out=out[start : start + len(at.used)])
    else:
        parts = torch.split_with_sizes(out, sizes)
        torch._foreach_copy_([parts[g] for g in groups], [v[: sizes[g]] for g, v in zip(groups, value.unbind())])


def _select(matrices: Tensor, index: Tensor) -> Tensor:
    # In memory order: index_select of a transposed view takes ten times as long.
    if matrices.stride(1) == 1:
        return matrices.transpose(1, 2).index_select(0, index).transpose(1, 2)
    return matrices.index_select(0, index)


def wgrad(
    a: Tensor | InScratch, b: Tensor | InScratch, sizes: tuple[int, ...], batches: Batches, out: Tensor
) -> set[int]:
    """Write ``a[rows]^T @ b[rows]`` for the groups of ``batches``, and return those groups as a set."""
    for batch in batches:
        _wgrad(a, b, sizes, batch, out)
    return {g for batch in batches for g in batch}


def _wgrad(
    a: Tensor | InScratch, b: Tensor | InScratch, sizes: tuple[int, ...], groups: tuple[int, ...], out: Tensor
) -> None:
    # Padding is zero on both sides: 0 * NaN would be NaN.
    at = _places(sizes, groups)
    x, y = at.rows(a), at.rows(b)
    for rows in (x, y):
        rows.view(-1, rows.shape[2]).index_fill_(0, at.padding, 0)
    if _consecutive(groups):
        torch.bmm(x.transpose(1, 2), y, out=out[groups[0] : groups[-1] + 1])
    else:
        slots = out.unbind()
        torch._foreach_copy_([slots[g] for g in groups], torch.bmm(x.transpose(1, 2), y).unbind())
