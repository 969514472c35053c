"""Checks that need a real pointer, made at run time just before a kernel writes into a caller's buffer."""

from __future__ import annotations

from torch import Tensor

from .checks import OUT_ALIGNMENT, require


def writable(op: str, argument: str, out: Tensor, **operands: Tensor | None) -> None:
    """``out`` starts on 16 bytes and shares no memory with any operand.

    Raises:
        ValueError: naming ``argument``, before anything is written.
    """
    address = out.data_ptr()
    require(
        address % OUT_ALIGNMENT == 0,
        op,
        argument,
        f"aligned to {OUT_ALIGNMENT} bytes",
        f"an address {address % OUT_ALIGNMENT} bytes past one",
    )
    for name, operand in operands.items():
        if operand is not None:
            require(not overlap(out, operand), op, argument, f"disjoint from `{name}`", "overlapping memory")


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two strided tensors may share a byte; exact for column slices of one row-major matrix."""
    if x.numel() == 0 or y.numel() == 0:
        return False
    (x_first, x_last), (y_first, y_last) = _extent(x), _extent(y)
    if x_last <= y_first or y_last <= x_first:
        return False
    if x.dim() == y.dim() == 2 and x.stride(-1) == y.stride(-1) == 1:
        pitch = x.stride(0) * x.element_size()
        if pitch == y.stride(0) * y.element_size() and pitch > 0:
            distance = (y_first - x_first) % pitch  # from the first column of x to the first column of y
            return not (distance >= x.shape[1] * x.element_size() and distance + y.shape[1] * y.element_size() <= pitch)
    return True


def _extent(t: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    start = t.data_ptr()
    return start, start + (last + 1) * t.element_size()
