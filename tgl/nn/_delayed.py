"""What a layer keeps between a backward and ``backward_dw``: references in eager mode, copies in a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import wgrad_stash_
from ._gemms import Operand


class Pending(NamedTuple):
    """One microbatch whose weight gradient has not been formed: its operands, ends, and bias gradient (fp32)."""

    x: Operand
    dy: Operand
    offs: Tensor
    dbias: Tensor | None


class Delayed:
    """The microbatches that wait for ``backward_dw``.

    Without reserved buffers it keeps the tensors themselves, of any number of microbatches. With them it copies, which
    is what a graph can do, and be replayed. Which of the places are in use is then known on the device alone: an unused
    one has groups without rows, which add nothing.
    """

    def __init__(self) -> None:
        self._references: list[tuple[Pending, list[int]]] = []
        self._buffers: list[Tensor] = []
        self._counts = (0, 0)
        self._state: Tensor | None = None

    @property
    def copies(self) -> bool:
        """Whether there are buffers to copy into."""
        return self._state is not None

    def reserve(self, microbatches: int, like: Pending, device: torch.device) -> None:
        """Make buffers; ``like`` are tensors (of any device) with the shapes and dtypes of the largest microbatch."""
        self._counts = len(like.x), len(like.dy)
        sources = [*like.x, *like.dy, like.offs, *([like.dbias] if like.dbias is not None else [])]
        self._buffers = [torch.zeros((microbatches, *t.shape), dtype=t.dtype, device=device) for t in sources]
        self._state = torch.zeros(2, dtype=torch.int64, device=device)

    def __call__(self, x: Operand, dy: Operand, offs: Tensor, dbias: Tensor | None) -> None:
        if self._state is None:
            self._references.append((Pending(x, dy, offs, dbias), [t._version for t in (*x, *dy, offs)]))
        else:
            wgrad_stash_([*x, *dy, offs, *([dbias] if dbias is not None else [])], self._state, self._buffers)

    def pending(self) -> list[Pending]:
        """What was kept, and one entry per place in the buffers, in use or not.

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
        n_x, n_dy = self._counts
        for place in zip(*(b.unbind() for b in self._buffers)):
            x, dy, (offs, *dbias) = place[:n_x], place[n_x : n_x + n_dy], place[n_x + n_dy :]
            entries.append(Pending(x, dy, offs, dbias[0] if dbias else None))
        return entries

    def in_use(self) -> Tensor | bool:
        """Whether anything is pending; a bool tensor on the device where that is known there alone."""
        if self._references or self._state is None or self._state.device.type == "meta":
            return bool(self._references)
        return self._state[0] > 0

    def clear(self) -> None:
        """Forget what was pending."""
        self._references.clear()
        for buffer in self._buffers[sum(self._counts) :]:  # ends and bias gradients; the rest is then not read
            buffer.zero_()
        if self._state is not None:
            self._state[:1] = 0

    def bytes_copied_host(self) -> int:
        """Bytes copied so far."""
        return int(self._state[1]) if self._state is not None else 0


def add_to(gradients: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add to the ``grad`` of every parameter that wants one, in place; or become it."""
    for parameter, gradient in zip(parameters, gradients):
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
