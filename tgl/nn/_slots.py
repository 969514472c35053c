"""Tensors that are slots of one packed tensor: views of one allocation, ideally in order and evenly spaced."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from ..tensor import GroupedTensor
from ._persistent_tensors import persistent_tensors

PART_OF = "_tgl_part_of"  # attribute of a storage: the storage whose memory it shares


class Slots(NamedTuple):
    """The positions of matrices that share an allocation.

    Attributes:
        packed: a view ``[S, ...]`` whose slot distance is the greatest common divisor of the matrices' distances; slots
            may overlap.
        table: int32 ``[G]``, the slot of every matrix, -1 for none; None for ``S = G`` matrices in order.
        order: the table on the host.
        addresses: addresses of the matrices, on the host; 0 for none.
    """

    packed: Tensor
    table: Tensor | None
    order: tuple[int, ...]
    addresses: tuple[int, ...]

    def hold(self, parts: Sequence[Tensor | None]) -> bool:
        """Return whether ``parts`` are at these addresses."""
        if self.packed.device.type == "meta":
            return True
        return all([(0 if p is None else p.data_ptr()) == at for p, at in zip(parts, self.addresses)])


def pack(parameters: Sequence[nn.Parameter], *, move: bool = True) -> Slots | None:
    """Return the slots of ``parameters``; ``move`` them into one contiguous tensor if they do not share an allocation.

    ``packed`` shares a version counter with all of them, so that autograd detects a write to a parameter between the
    forward and the backward, as for any saved tensor.

    Returns None and changes nothing if they are not plain tensors of one shape, dtype and device (a wrapper may have
    replaced them), if they cannot share a version counter, or if they would have to be moved without ``move``.
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
        with persistent_tensors():
            packed = torch.empty((len(parameters), *first.shape), dtype=first.dtype, device=first.device)
            for slot, parameter in zip(packed.unbind(), parameters):
                slot.copy_(parameter.data)
        addresses = tuple([0 if packed.device.type == "meta" else slot.data_ptr() for slot in packed.unbind()])
        found = Slots(packed, None, tuple(range(len(parameters))), addresses)
    if not all(_has_version(p) for p in parameters):
        if apart:
            _point(parameters, found.packed)
        return found
    if _versions_are_one(parameters):  # setting `data` keeps the counter
        if apart:
            _point(parameters, found.packed)
        alias = first.detach()
        alias.data = found.packed
        return found._replace(packed=alias)
    return found if _replace(parameters, [found.packed[i] for i in found.order]) else None


def _point(parameters: Sequence[nn.Parameter], packed: Tensor) -> None:
    for slot, parameter in zip(packed.unbind(), parameters):
        parameter.data = slot


def _has_version(parameter: nn.Parameter) -> bool:
    """Return False if the parameter was made in inference mode, even if its data has been replaced outside since."""
    try:
        return parameter._version >= 0
    except RuntimeError:
        return False


def _versions_are_one(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether the parameters share one version counter."""
    versions = [p._version for p in parameters]
    mark = max(versions) + 1
    set_versions = torch._C._autograd._unsafe_set_version_counter
    set_versions((parameters[0],), (mark,))
    try:
        return all(p._version == mark for p in parameters)
    finally:
        set_versions((parameters[0],), (versions[0],))


def _replace(parameters: Sequence[nn.Parameter], slots: Sequence[Tensor]) -> bool:
    """Turn the parameter objects into views ``slots`` of one tensor, if nothing refers to their old state."""
    if any(type(p) is not nn.Parameter or p.grad is not None or p._backward_hooks for p in parameters):
        return False
    try:
        for slot, parameter in zip(slots, parameters):
            new = nn.Parameter(slot, parameter.requires_grad)
            new.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, new)
    except RuntimeError:  # a reference to one exists; earlier ones are views of ``packed`` by now, which is harmless
        return False
    return True


def slots_of(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the view ``[G, ...]`` whose slots are ``parts``, in order and evenly spaced; None if there is none."""
    found = find_slots(parts)
    return found.packed if found is not None and found.table is None else None


def find_slots(parts: Sequence[Tensor | None]) -> Slots | None:
    """Return the slots of ``parts``, in any order and at any distances in one allocation; None if there are none.

    A part that is None has no matrix.
    """
    given = [p for p in parts if p is not None]
    if not given or given[0].device.type == "meta":
        return None
    first, count = given[0], given[0].numel()
    allocation = _allocation(first)
    base = allocation.data_ptr()
    if any(
        not p.is_contiguous() or (p.shape, p.dtype) != (first.shape, first.dtype) or _allocation(p).data_ptr() != base
        for p in given
    ):
        return None
    addresses = tuple([0 if p is None else p.data_ptr() for p in parts])
    starts = sorted((p.data_ptr() - base) // p.itemsize for p in given)
    steps = [b - a for a, b in itertools.pairwise(starts)]
    if count == 0 or any(step < count for step in steps):
        return None
    unit = math.gcd(*steps) if steps else count
    slots = (starts[-1] - starts[0]) // unit + 1
    if slots >= 2**31:
        return None
    form = (slots, *first.shape), (unit, *first.stride()), starts[0]
    if allocation is first.untyped_storage():
        packed = first.as_strided(*form)
    else:
        with persistent_tensors():
            packed = first.detach()
            packed.data = torch.empty(0, dtype=first.dtype, device=first.device).set_(allocation).as_strided(*form)
    order = tuple([-1 if at == 0 else ((at - base) // first.itemsize - starts[0]) // unit for at in addresses])
    if order == tuple(range(slots)):
        return Slots(packed, None, order, addresses)
    with persistent_tensors():
        return Slots(packed, torch.tensor(order, dtype=torch.int32, device=first.device), order, addresses)


# --- slots apart ------------------------------------------------------------------------------------------------------


def apart(parts: Iterable[Tensor]) -> list[Tensor]:
    """Return aliases of ``parts``, which may be slots, each with its own storage of just its size.

    Code that saves tensors works by storage: for several views of one it saves only the first, raises, or writes the
    whole storage for each. An alias shares memory and version counter with its tensor, and ``find_slots`` knows the
    allocation it belongs to. Tensors that require grad, or have no accessible memory, are returned unchanged.
    """
    with persistent_tensors():
        return [t._map(_apart) if isinstance(t, GroupedTensor) else _apart(t) for t in parts]


def _apart(t: Tensor) -> Tensor:
    plain = type(t) is Tensor and t.layout is torch.strided and t.device.type in ("cpu", "cuda")
    if not plain or t.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return t
    storage = t.untyped_storage()
    if storage.nbytes() <= t.numel() * t.itemsize:
        return t
    own = from_dlpack(to_dlpack(t))
    vars(own.untyped_storage())[PART_OF] = vars(storage).get(PART_OF, storage)
    alias = t.detach()
    alias.data = own
    return alias


def _allocation(t: Tensor) -> torch.UntypedStorage:
    """Return the storage of ``t``; for a result of ``apart`` the storage that it is a part of."""
    storage = t.untyped_storage()
    return vars(storage).get(PART_OF, storage)
