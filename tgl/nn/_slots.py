"""Tensors that are slots of one packed tensor: in one allocation, best in order and evenly spaced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ._lasting import lasting


class Slots(NamedTuple):
    """Where matrices lie that share an allocation.

    Attributes:
        packed: a view ``[S, ...]`` with a slot at every common divisor of their distances; slots may overlap.
        table: int32 ``[G]``: which slot is whose, -1 for nobody's; None for ``S = G`` matrices in order.
        order: the table on the host.
        addresses: of the matrices, on the host; 0 for none.
    """

    packed: Tensor
    table: Tensor | None
    order: tuple[int, ...]
    addresses: tuple[int, ...]

    def hold(self, parts: Sequence[Tensor | None]) -> bool:
        """Whether ``parts`` are at these addresses."""
        if self.packed.device.type == "meta":
            return True
        return all([(0 if p is None else p.data_ptr()) == at for p, at in zip(parts, self.addresses)])


def pack(parameters: Sequence[nn.Parameter], *, move: bool = True) -> Slots | None:
    """Where ``parameters`` lie; ``move`` them into one contiguous tensor if they do not share an allocation.

    ``packed`` counts its versions together with every one of them, so that a write to a parameter between the forward
    and the backward is as much of an error as one to a tensor saved by itself.

    None if they are no plain tensors of one form (a wrapper may have replaced them), if their versions cannot be
    counted together, or if they would have to be moved and must not: then they stay as they are.
    """
    first = parameters[0]
    if any(
        type(p.data) is not Tensor or (p.shape, p.dtype, p.device) != (first.shape, first.dtype, first.device)
        for p in parameters
    ):
        return None
    found = find_slots([p.data for p in parameters])
    apart = found is None
    if found is None:
        if not move:
            return None
        with lasting():
            packed = torch.empty((len(parameters), *first.shape), dtype=first.dtype, device=first.device)
            for slot, parameter in zip(packed.unbind(), parameters):
                slot.copy_(parameter.data)
        addresses = tuple([0 if packed.device.type == "meta" else slot.data_ptr() for slot in packed.unbind()])
        found = Slots(packed, None, tuple(range(len(parameters))), addresses)
    if any(p.is_inference() for p in parameters):  # without versions
        if apart:
            _point(parameters, found.packed)
        return found
    if _versions_are_one(parameters):  # and stay it, whatever their data is
        if apart:
            _point(parameters, found.packed)
        alias = first.detach()
        alias.data = found.packed
        return found._replace(packed=alias)
    return found if _replace(parameters, [found.packed[i] for i in found.order]) else None


def _point(parameters: Sequence[nn.Parameter], packed: Tensor) -> None:
    for slot, parameter in zip(packed.unbind(), parameters):
        parameter.data = slot


def _versions_are_one(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether a write to any of them counts for all."""
    versions = [p._version for p in parameters]
    mark = max(versions) + 1
    set_versions = torch._C._autograd._unsafe_set_version_counter
    set_versions((parameters[0],), (mark,))
    try:
        return all(p._version == mark for p in parameters)
    finally:
        set_versions((parameters[0],), (versions[0],))


def _replace(parameters: Sequence[nn.Parameter], slots: Sequence[Tensor]) -> bool:
    """Make the very objects ``slots`` of one tensor, if nobody can have seen what is behind them."""
    if any(type(p) is not nn.Parameter or p.grad is not None or p._backward_hooks for p in parameters):
        return False
    try:
        for slot, parameter in zip(slots, parameters):
            new = nn.Parameter(slot, parameter.requires_grad)
            new.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, new)
    except RuntimeError:  # somebody holds one of them; those before are views of ``packed`` by now, which is no harm
        return False
    return True


def slots_of(parts: Sequence[Tensor]) -> Tensor | None:
    """The view ``[G, ...]`` of which ``parts`` are the slots, in order and evenly spaced; None if there is none."""
    found = find_slots(parts)
    return found.packed if found is not None and found.table is None else None


def find_slots(parts: Sequence[Tensor | None]) -> Slots | None:
    """Where ``parts`` lie, in any order and at any distances in one allocation; None if they do not.

    None among them stands for a matrix that there is not.
    """
    given = [p for p in parts if p is not None]
    if not given or given[0].device.type == "meta":
        return None
    first, count = given[0], given[0].numel()
    storage = first.untyped_storage().data_ptr()
    if any(
        not p.is_contiguous()
        or (p.shape, p.dtype) != (first.shape, first.dtype)
        or p.untyped_storage().data_ptr() != storage
        for p in given
    ):
        return None
    addresses = tuple([0 if p is None else p.data_ptr() for p in parts])
    starts = sorted(p.storage_offset() for p in given)
    steps = [b - a for a, b in itertools.pairwise(starts)]
    if count == 0 or any(step < count for step in steps):
        return None
    unit = math.gcd(*steps) if steps else count
    slots = (starts[-1] - starts[0]) // unit + 1
    if slots >= 2**31:
        return None
    packed = first.as_strided((slots, *first.shape), (unit, *first.stride()), starts[0])
    order = tuple([-1 if p is None else (p.storage_offset() - starts[0]) // unit for p in parts])
    if order == tuple(range(slots)):
        return Slots(packed, None, order, addresses)
    with lasting():
        return Slots(packed, torch.tensor(order, dtype=torch.int32, device=first.device), order, addresses)
