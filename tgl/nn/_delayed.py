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


class References:
    """Keeps the tensors themselves, of any number of microbatches.

    Attributes:
        started: whether a forward has been run since the last ``clear``.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Pending, list[int]]] = []
        self.started = False

    def __call__(self, x: Operand, dy: Operand, offs: Tensor, dbias: Tensor | None) -> None:
        self._held.append((Pending(x, dy, offs, dbias), [t._version for t in (*x, *dy, offs)]))

    def pending(self) -> list[Pending]:
        """Everything that is pending.

        Raises:
            RuntimeError: a tensor has been written to since its backward.
        """
        for entry, versions in self._held:
            if [t._version for t in (*entry.x, *entry.dy, entry.offs)] != versions:
                raise RuntimeError(
                    "backward_dw: the input, the output gradient or the splits of a pending microbatch were modified "
                    "in place after its backward; call backward_dw earlier, or reserve_delayed_wgrad for copies"
                )
        return [entry for entry, _ in self._held]

    def clear(self) -> None:
        """Forget what was pending."""
        self._held.clear()
        self.started = False


class Copies:
    """Copies into buffers for a fixed number of microbatches, which a graph can be replayed with.

    Which places are in use is known on the device alone: an unused one has groups without rows, which add nothing.

    Attributes:
        started: whether a forward has been run since the last ``clear``.
    """

    def __init__(self, microbatches: int, like: Pending, device: torch.device) -> None:
        """``like``: tensors (of any device) with the shapes and dtypes of the largest microbatch."""
        self._counts = len(like.x), len(like.dy)
        sources = [*like.x, *like.dy, like.offs]

        def room(t: Tensor) -> Tensor:
            return torch.zeros((microbatches, *t.shape), dtype=t.dtype, device=device)

        self._buffers = [room(t) for t in sources] + ([room(like.dbias)] if like.dbias is not None else [])
        self._state = torch.zeros(2, dtype=torch.int64, device=device)
        self.started = False

    def __call__(self, x: Operand, dy: Operand, offs: Tensor, dbias: Tensor | None) -> None:
        wgrad_stash_([*x, *dy, offs, *([dbias] if dbias is not None else [])], self._state, self._buffers)

    def pending(self) -> list[Pending]:
        """One entry per place, used or not."""
        n_x, n_dy = self._counts
        entries = []
        for place in zip(*(b.unbind() for b in self._buffers)):
            x, dy, rest = place[:n_x], place[n_x : n_x + n_dy], place[n_x + n_dy :]
            entries.append(Pending(x, dy, rest[0], rest[1] if len(rest) > 1 else None))
        return entries

    def clear(self) -> None:
        """Make every place unused again."""
        for buffer in self._buffers[sum(self._counts) :]:  # ends and bias gradients; the rest is then not read
            buffer.zero_()
        self._state[:1] = 0
        self.started = False

    @property
    def bytes_reserved(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() * b.element_size() for b in self._buffers)

    def bytes_copied_host(self) -> int:
        """Bytes copied so far."""
        return int(self._state[1])


def add_to(gradients: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add to the ``grad`` of every parameter that wants one, in place; or become it."""
    for parameter, gradient in zip(parameters, gradients):
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
