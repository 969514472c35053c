"""Buffers that the steps of a CPU implementation share, and that a thread keeps for the next call."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_KEPT = 1 << 23  # bytes


class _ThreadBuffers(threading.local):
    """The buffers that a thread keeps between calls."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.lent: dict[str, Tensor] = {}


_kept = _ThreadBuffers()


class Scratch:
    """Lends buffers by name; the contents of one last until its name is requested again.

    New memory costs more than the arithmetic it serves: the first touch of a page takes as long as quantising half of
    one. So a thread keeps its buffers for the next call, if they are small.
    """

    def __init__(self) -> None:
        self._buffers, self._lent = _kept.buffers, _kept.lent
        _kept.buffers, _kept.lent = {}, {}
        self._grown = False

    def keep(self) -> None:
        """Leave the buffers to the next call; nothing may use them any more."""
        if not self._grown or sum(buffer.nbytes for buffer in self._buffers.values()) <= _KEPT:
            _kept.buffers, _kept.lent = self._buffers, self._lent

    def room(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised contiguous tensor; while it is in use a name always has the same dtype."""
        lent = self._lent.get(name)
        if lent is not None and lent.shape == shape and lent.dtype == dtype:
            return lent
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        with torch.inference_mode(False):  # the next call may be outside of inference mode
            if buffer is None or buffer.numel() < size or buffer.dtype != dtype:
                self._grown = True
                buffer = self._buffers[name] = torch.empty(size, dtype=dtype, device="cpu")
            lent = self._lent[name] = (buffer[:size] if buffer.numel() > size else buffer).view(shape)
        return lent
