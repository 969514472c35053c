"""Validation of index tensors on the device, such as ``offs``, whose values are otherwise never read on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

active = 0  # number of open contexts
checking = False  # active > 0: compiled graphs guard on this flag, because a guard on `active` recompiles per depth
_INT32_MAX = 2**31 - 1


@contextmanager
def debug_checks() -> Iterator[None]:
    """Validate every ``offs`` that reaches an op: non-negative, non-decreasing, and not beyond the number of rows.

    Other values are validated too: group sizes are not negative and their sum fits int32; ``slots`` lie within the
    packed tensor, and matrices that are written do not overlap; row indices are in range; the map from rows to tokens
    and the map from top-k slots to rows are each other's inverse; every top-k slot names an expert, unless ``route``
    was called with ``sentinels=True``, and has a row; experts given to ``topk_router`` exist or are -1; router logits
    and bias are not NaN; a ``GroupedTensor`` that is a layer's input was quantised with the group ends of the call.

    Works around an eager call and around the call of a compiled function (the check runs inside the op; a graph
    compiled for a CPU, which has no op for ``route``, is compiled once more). Inside a compiled function it is a graph
    break, hence an error with ``fullgraph=True``. Each checked op copies the checked tensors to the host: it
    synchronises and cannot run under CUDA graph capture. Contexts nest.

    Raises (from the op inside): ``ValueError`` naming the op and the first bad entry.
    """
    if torch.compiler.is_compiling():  # traced, the two assignments would cancel out before the graph runs
        torch._dynamo.graph_break("tgl.debug_checks() goes around the call of a compiled function, not inside it")
    global active, checking
    active += 1
    checking = True
    try:
        yield
    finally:
        active -= 1
        checking = active > 0


def check_offs(op: str, offs: Tensor, rows: int) -> None:
    """Raise ``ValueError`` for the first bad entry of ``offs`` if inside ``debug_checks()``; free otherwise."""
    if not active:
        return
    previous = 0
    for group, end in enumerate(offs.tolist()):
        if end < previous:
            bound = f"offs[{group - 1}] = {previous}" if group else "0"
            raise ValueError(f"tgl::{op}: `offs` must not descend, but offs[{group}] = {end} is less than {bound}")
        if end > rows:
            raise ValueError(f"tgl::{op}: `offs` must stay within {rows} rows, but offs[{group}] = {end}")
        previous = end


def check_same_offs(offs: Tensor, quantized_with: Tensor) -> None:
    """Raise ``ValueError`` for the first group whose two ends differ if inside ``debug_checks()``; free otherwise."""
    if not active:
        return
    for group, (end, other) in enumerate(zip(offs.tolist(), quantized_with.tolist())):
        if end != other:
            raise ValueError(
                f"`inp` must be quantised with the group ends of the call, but was with offs[{group}] = {other} where "
                f"`m_splits` add up to {end}"
            )


def check_slots(op: str, slots: Tensor | None, argument: str, packed: Tensor, *, written: bool) -> None:
    """Raise ``ValueError`` for the first bad entry of ``slots`` if inside ``debug_checks()``; free otherwise.

    Args:
        argument: the argument name of ``packed``.
        written: whether ``packed`` is written, so that the slots must not overlap.
    """
    if not active or slots is None:
        return
    count, table = packed.shape[0], slots.tolist()
    for group, slot in enumerate(table):
        if not 0 <= slot < count:
            raise ValueError(
                f"tgl::{op}: `slots` must stay within the {count} slots of `{argument}`, but slots[{group}] = {slot}"
            )
    if written and packed.numel():
        distance, row, column = packed.stride()
        extent = 1 + (packed.shape[1] - 1) * row + (packed.shape[2] - 1) * column
        order = sorted(range(len(table)), key=table.__getitem__)
        for group, other in itertools.pairwise(order):
            if (table[other] - table[group]) * distance < extent:
                raise ValueError(
                    f"tgl::{op}: `slots` must be matrices of `{argument}` that do not overlap, but slots[{group}] = "
                    f"{table[group]} and slots[{other}] = {table[other]} do"
                )


def check_rows(op: str, argument: str, index: Tensor | None, offs: Tensor, t: Tensor) -> None:
    """Raise ``ValueError`` for the first index before the tail that is out of range if inside ``debug_checks()``; free
    otherwise.

    Args:
        op: name of the op.
        argument: the argument name of ``index``.
        index: for every row of the groups, the row of ``t`` that it reads.
        offs: the groups' ends.
        t: the tensor that is gathered from.
    """
    if not active or index is None or not offs.shape[0]:
        return
    count, routed = t.shape[0], offs[-1].item()
    for row, number in enumerate(index[:routed].tolist()):
        if not 0 <= number < count:
            raise ValueError(
                f"tgl::{op}: `{argument}` must be numbers below {count} before row offs[-1] = {routed}, but "
                f"{argument}[{row}] = {number}"
            )


def check_places(op: str, token: Tensor, position: Tensor, top_k: int, name: str = "token") -> None:
    """Raise ``ValueError`` for the first row or top-k slot on which the two maps disagree if inside ``debug_checks()``;
    free otherwise.

    Args:
        token: the token of every row.
        position: the row of every top-k slot of every token.
        name: the argument name of ``token``.
    """
    if not active:
        return
    tokens, rows = token.tolist(), position.tolist()
    owner: dict[int, int] = {}
    for pair, row in enumerate(rows):
        if 0 <= row < len(tokens):
            if row in owner:
                raise ValueError(
                    f"tgl::{op}: `position` must give every slot a row of its own, but position[{owner[row]}] and "
                    f"position[{pair}] are both {row}"
                )
            owner[row] = pair
            if tokens[row] != pair // top_k:
                raise ValueError(
                    f"tgl::{op}: `{name}` must be the inverse of `position`, but position[{pair}] = {row}, which is a "
                    f"slot of token {pair // top_k}, and {name}[{row}] = {tokens[row]}"
                )
    for row, owned in enumerate(tokens):
        if row not in owner and 0 <= owned < len(rows) // top_k:
            raise ValueError(
                f"tgl::{op}: `{name}` must be the inverse of `position`, but {name}[{row}] = {owned} and no slot has "
                f"row {row}"
            )


def check_choices(op: str, top_k_index: Tensor, num_experts: int) -> None:
    """Raise ``ValueError`` for the first top-k slot that names no expert, or for more slots than experts, if inside
    ``debug_checks()``; free otherwise.
    """
    if not active:
        return
    top_k = top_k_index.shape[1]
    if top_k > num_experts:
        raise ValueError(
            f"tgl::{op}: `top_k_index` must have at most {num_experts} slots for each token, one for each expert, "
            f"unless `sentinels` allows dropped slots, but got {top_k}"
        )
    none = (top_k_index < 0) | (top_k_index >= num_experts)
    if none.any():
        token, choice = none.nonzero()[0].tolist()
        raise ValueError(
            f"tgl::{op}: `top_k_index` must be experts from 0 to {num_experts - 1} unless `sentinels` allows dropped "
            f"slots, but top_k_index[{token}, {choice}] = {int(top_k_index[token, choice])}"
        )


def check_replayed(op: str, index: Tensor | None, num_experts: int) -> None:
    """Raise ``ValueError`` for the first top-k slot of ``index`` that is neither an expert nor -1 if inside
    ``debug_checks()``; free otherwise.
    """
    if not active or index is None:
        return
    bad = (index < -1) | (index >= num_experts)
    if bad.any():
        token, slot = bad.nonzero()[0].tolist()
        raise ValueError(
            f"tgl::{op}: `index` must be experts from 0 to {num_experts - 1}, or -1 for a dropped slot, but "
            f"index[{token}, {slot}] = {int(index[token, slot])}"
        )


def check_numbers(op: str, **tensors: Tensor | None) -> None:
    """Raise ``ValueError`` for the first NaN of one of ``tensors`` if inside ``debug_checks()``; free otherwise."""
    if not active:
        return
    for argument, t in tensors.items():
        if t is not None and (bad := t.isnan()).any():
            place = ", ".join(map(str, bad.nonzero()[0].tolist()))
            raise ValueError(f"tgl::{op}: `{argument}` must be numbers, but {argument}[{place}] is NaN")


def check_room(op: str, top_k_index: Tensor, num_experts: int, rows: int) -> None:
    """Raise ``ValueError`` for more top-k slots with an expert than ``rows`` if inside ``debug_checks()``; free
    otherwise."""
    if not active:
        return
    chosen = int(((top_k_index >= 0) & (top_k_index < num_experts)).sum())
    if chosen > rows:
        raise ValueError(
            f"tgl::{op}: `num_rows` must be at least {chosen}, the slots that are not dropped, but got {rows}"
        )


def check_splits(op: str, splits: Tensor) -> None:
    """Raise ``ValueError`` for the first split that is negative or ends beyond int32 if inside ``debug_checks()``; free
    otherwise.
    """
    if not active:
        return
    end = 0
    for group, size in enumerate(splits.tolist()):
        if size < 0:
            raise ValueError(f"tgl::{op}: `m_splits` must not be negative, but m_splits[{group}] = {size}")
        end += size
        if end > _INT32_MAX:
            raise ValueError(
                f"tgl::{op}: `m_splits` must add up to int32 ({_INT32_MAX} at most), but "
                f"m_splits[{group}] = {size} makes it {end}"
            )
