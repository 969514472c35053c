"""Operands that a layer keeps from a backward to ``backward_dw``: references in eager mode, copies in a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import wgrad_stash_
from ._gemms import Operand
from ._hooks import stands_in
from ._persistent_tensors import persistent_tensors


class Pending(NamedTuple):
    """One microbatch whose weight gradient has not been formed.

    Attributes:
        x, dy: operands of the weight gradient.
        offs: group ends.
        dbias: bias gradient (fp32), if there is one.
        overwrite: whether the pending gradient replaces ``main_grad``; a tensor ``[1]`` in buffers.
    """

    x: Operand
    dy: Operand
    offs: Tensor
    dbias: Tensor | None
    overwrite: Tensor | bool = False


class Delayed:
    """The microbatches pending for ``backward_dw``.

    Without reserved buffers it keeps the tensors themselves, for any number of microbatches. With buffers it copies, so
    that a graph can record and replay it. The number of entries in use is then known only on the device: an unused
    entry has empty groups, which add nothing.

    A microbatch of fewer rows fills the leading part of a buffer in every dimension. The order of blocked scales, 128
    columns of the operand after another, depends on the number of rows, so that buffers hold each 128 columns apart.
    """

    def __init__(self) -> None:
        self._references: list[tuple[Pending, list[int]]] = []
        self._buffers: list[Tensor] = []
        self._counts = (0, 0, 0)
        self._blocked = False
        self._state: Tensor | None = None

    def __getstate__(self) -> dict:
        """Return the state of a copy with the same capacity and nothing pending, as a copied parameter has no grad."""
        return {
            "counts": self._counts,
            "blocked": self._blocked,
            "room": [(t.shape, t.dtype, t.device) for t in (*self._buffers, *self._states())],
        }

    @persistent_tensors()
    def __setstate__(self, state: dict) -> None:
        self.__init__()  # type: ignore[misc]
        if "blocked" not in state and any(len(shape) == 2 and dtype.itemsize == 1 for shape, dtype, _ in state["room"]):
            return  # blocked scales in one row, where a microbatch of fewer rows is read wrongly
        room = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in state["room"]]
        if room:
            *self._buffers, self._state = room
        self._counts = state["counts"]
        self._blocked = state.get("blocked", False)

    def _states(self) -> tuple[Tensor, ...]:
        return () if self._state is None else (self._state,)

    @property
    def copies(self) -> bool:
        """Whether buffers to copy into are reserved."""
        return self._state is not None

    @persistent_tensors()
    def reserve(self, microbatches: int, like: Pending, device: torch.device, *, blocked: bool) -> None:
        """Allocate buffers; ``like`` has tensors (on any device) of the shapes and dtypes of the largest microbatch.

        If ``like.overwrite``, there is also a buffer for the flag ``overwrite`` of each microbatch. With ``blocked``
        the second component of an operand is a blocked scale, in ``like`` as ``[columns / 128, bytes]``.
        """
        flags = [torch.empty(1, dtype=torch.int32, device="meta")] if like.overwrite else []
        biases = [like.dbias] if like.dbias is not None else []
        self._counts = len(like.x), len(like.dy), len(biases)
        self._blocked = blocked
        sources = [*like.x, *like.dy, like.offs, *biases, *flags]
        self._buffers = [torch.zeros((microbatches, *t.shape), dtype=t.dtype, device=device) for t in sources]
        self._state = torch.zeros(2, dtype=torch.int64, device=device)

    def __call__(
        self,
        x: Operand,
        dy: Operand,
        offs: Tensor,
        dbias: Tensor | None,
        overwrite: bool,
        edge: Tensor | None = None,
    ) -> None:
        if self._state is None:
            pending = Pending(x, dy, offs, dbias, overwrite)
            self._references.append((pending, [t._version for t in (*x, *dy, offs)]))
            return
        n_x, n_dy, n_biases = self._counts
        sources = [*x, *dy, offs]
        if self._blocked:
            for i in (1, n_x + 1):
                sources[i] = sources[i].view(self._buffers[i].shape[1], -1)
        further = self._buffers[n_x + n_dy + 1 :]
        if n_biases:
            sources.append(dbias if dbias is not None else further[0].new_zeros(further[0].shape[1:]))
        if len(further) > n_biases:
            sources.append(further[-1].new_full((1,), int(overwrite)))
        if edge is None:
            wgrad_stash_(sources, self._state, self._buffers)
        else:
            torch.ops.tgl.wgrad_stash_.requested(sources, self._state, self._buffers, edge=edge)

    def pending(self) -> list[Pending]:
        """Return the kept references, and one entry per slot of the buffers, in use or not.

        Raises:
            RuntimeError: a tensor kept by reference has been written to since its backward.
        """
        for entry, versions in self._references:
            if [t._version for t in (*entry.x, *entry.dy, entry.offs)] != versions:
                raise RuntimeError(
                    "backward_dw: the input, the output gradient or the splits of a pending microbatch were modified "
                    "in place after its backward; call backward_dw earlier, or reserve_delayed_wgrad for copies"
                )
        entries = [entry for entry, _ in self._references]
        n_x, n_dy, n_biases = self._counts
        for place in zip(*(b.unbind() for b in self._buffers)):
            x, dy, (offs, *further) = place[:n_x], place[n_x : n_x + n_dy], place[n_x + n_dy :]
            if self._blocked:
                x, dy = ((data, scale.flatten(), *rest) for data, scale, *rest in (x, dy))
            dbias = further[0] if n_biases else None
            entries.append(Pending(x, dy, offs, dbias, further[-1] if len(further) > n_biases else False))
        return entries

    def in_use(self) -> Tensor | bool:
        """Return whether anything is pending; a bool tensor where only the device knows."""
        if self._references or self._state is None or self._state.device.type == "meta":
            return bool(self._references)
        return self._state[0] > 0

    def clear(self) -> None:
        """Drop all pending microbatches."""
        self._references.clear()
        for buffer in self._buffers[sum(self._counts[:2]) :]:  # from `offs` on; x and dy are then not read
            buffer.zero_()
        if self._state is not None:
            self._state[:1] = 0

    @contextmanager
    def dropped_if_cut_short(self) -> Iterator[list]:
        """Drop all pending microbatches if an exception is raised after the yielded list has become non-empty.

        Some microbatches have been added by then, and none may be added twice.
        """
        added: list = []
        try:
            yield added
        except BaseException as error:
            if added:
                self.clear()
                if isinstance(error, Exception):
                    raise RuntimeError(
                        "backward_dw failed after main_grad had got the gradients of some pending "
                        "microbatches; none is pending any more: zero main_grad and repeat the step"
                    ) from error
            raise

    def bytes_copied_host(self) -> int:
        """Return the bytes copied so far; reads the device."""
        return int(self._state[1]) if self._state is not None else 0


def overwrites(entries: Sequence[Pending]) -> Tensor | bool:
    """Return whether the sum of ``entries`` replaces ``main_grad``; a bool tensor where only the device knows."""
    flags = [entry.overwrite for entry in entries if isinstance(entry.overwrite, Tensor)]
    return torch.stack(flags).any() if flags else any(entry.overwrite for entry in entries)


def add_to(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[Tensor]) -> list[torch.nn.Parameter]:
    """Add gradients to ``grad`` in place, or set it, where a parameter requires grad; returns those parameters."""
    changed = [(p, gradient) for p, gradient in zip(parameters, gradients) if p.requires_grad]
    for parameter, gradient in changed:
        if parameter.grad is None or stands_in(parameter.grad):
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
    return [parameter for parameter, _ in changed]
