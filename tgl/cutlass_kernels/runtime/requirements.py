"""Layout requirements of a kernel's operands, one ``Need`` for each, and the reasons why one is not met."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...meta.memory import address
from . import device

ALIGNMENT = 16  # bytes, of a 128-bit access and of what a tensor map describes
MAX_ROWS = 1 << 30  # the size of a ragged mode


def unit_dimension(strides: tuple[int, ...]) -> int:
    """Return which of the last two dimensions is contiguous; the last one if both are."""
    last = len(strides) - 1
    return last if strides[last] == 1 else last - 1


@dataclass(frozen=True)
class Need:
    """The layout requirement of an operand; one without elements always meets it.

    Attributes:
        major: ``"rows"`` if the last dimension must be contiguous, ``"either"`` if one of the last two must, ``"any"``
            if no stride matters but that of matrices, which are stored one after the other.
        pitch: bytes that divide the other strides, none of which is 0; of ``"any"``, 1.
        address: bytes that divide the address.
        because: why rows are required, as a part of the message.
    """

    major: str
    pitch: int = ALIGNMENT
    address: int = ALIGNMENT
    because: str = ""

    def reason(self, name: str, t: Tensor, *, empty: bool = False) -> str | None:
        """Return why a kernel does not take the layout of ``t``, or None.

        ``empty``: whether the strides must also fit if ``t`` has no elements.
        """
        elements, strides = t.numel(), t.stride()
        if not elements and not empty:
            return None
        if self.major == "any":
            if len(strides) == 3 and t.shape[0] > 1 and strides[0] != strides[1] * t.shape[1]:
                return f"needs the matrices of `{name}` adjacent in memory, got strides {strides}"
        elif len(strides) > 1:
            unit = len(strides) - 1 if self.major == "rows" else unit_dimension(strides)
            if strides[unit] != 1:
                if self.major == "rows":
                    return f"needs `{name}` row-major{self.because}, got strides {strides}"
                return f"needs `{name}` with a unit stride in one of its last two dimensions, got strides {strides}"
            step = max(self.pitch // t.element_size(), 1)
            for i, stride in enumerate(strides):
                if i != unit and (stride % step or (stride == 0 and t.shape[i] > 1)):
                    return (
                        f"needs strides of `{name}` that are multiples of {self.pitch} bytes and not 0, got {strides}"
                    )
        return f"needs `{name}` aligned to {self.address} bytes" if elements and address(t) % self.address else None

    def room(self, t: Tensor, rows: int | None = None) -> Tensor:
        """Return an uninitialised tensor like ``t`` whose layout a kernel takes, row-major unless that does not matter.

        Args:
            t: the tensor to imitate.
            rows: rows of a matrix; default: as many as ``t`` has.
        """
        if self.major == "any":
            return torch.empty_like(t) if t.dim() < 3 else t.new_empty(t.shape)
        step = max(self.pitch // t.element_size(), 1)
        pitch = (t.shape[-1] + step - 1) // step * step
        outer = t.shape[:-1] if rows is None else (rows,)
        return t.new_empty(*outer, pitch)[..., : t.shape[-1]]


MATRIX = Need("either")  # what a tensor map describes
ROW_MAJOR = Need("rows")
# A tensor map needs a coordinate along the contiguous dimension that is aligned to 16 bytes, or the device stops with
# an illegal instruction, while a group may begin at any row.
ROWS = Need("rows", because=" (groups begin anywhere along its rows)")
START = Need("any")  # contiguous by contract; loaded 16 bytes at a time
ANY = Need("any", pitch=1, address=1)


def dense_reason(a: Tensor, out: Tensor, *indices: Tensor | None) -> str | None:
    """Return why no kernel takes the dtypes and the rows, optionally by ``indices``, of a dense call."""
    reason = device.packages_reason()
    if reason is not None:
        return reason
    if a.dtype is not torch.bfloat16 and a.dtype is not torch.float16:
        return f"takes bfloat16 and float16, got {a.dtype}"
    if out.dtype is not a.dtype and out.dtype is not torch.float32:
        return f"writes {a.dtype} or torch.float32, not {out.dtype}"
    rows = max([t.shape[0] for t in (a, *indices) if t is not None])
    return f"takes up to {MAX_ROWS} rows, got {rows}" if rows > MAX_ROWS else None
