"""Memory overlap, alignment and layout checks, made at run time before a kernel writes into a caller's buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .checks import OUT_ALIGNMENT, guard_or_false, require


def writable(
    op: str, argument: str, out: Tensor, pairs: Iterable[tuple[str, Tensor | None]] = (), /, **operands: Tensor | None
) -> None:
    """Check that ``out`` is 16-byte aligned and shares no memory with operands, given as ``pairs`` or by name.

    Raises:
        ValueError: naming ``argument``, before anything is written.
    """
    if isinstance(out, FakeTensor):
        return  # it has no memory
    first, last = _extent(out)
    if past := first % OUT_ALIGNMENT:
        require(False, op, argument, f"aligned to {OUT_ALIGNMENT} bytes", f"an address {past} bytes past one")
    for name, operand in pairs or operands.items():
        if operand is not None:
            start, end = _extent(operand)
            if start < last and first < end and not _other_columns(out, operand):
                require(False, op, argument, f"disjoint from `{name}`", "overlapping memory")


def overlap(x: Tensor, y: Tensor) -> bool:
    """Return whether two strided tensors may share a byte; exact for column slices of one row-major matrix."""
    (x_first, x_last), (y_first, y_last) = _extent(x), _extent(y)
    return x_first < y_last and y_first < x_last and not _other_columns(x, y)


def _extent(t: Tensor) -> tuple[int, int]:
    """Return the address of the first byte and the address past the last; both 0 if there is none."""
    start = t.data_ptr()
    if t.is_contiguous():
        return start, start + t.nbytes
    elements = 1
    for size, stride in zip(t.shape, t.stride()):
        elements += (size - 1) * stride
    return start, start + elements * t.element_size()


def _other_columns(x: Tensor, y: Tensor) -> bool:
    """Return whether ``x`` and ``y`` are disjoint column slices of one row-major matrix."""
    if not (x.dim() == y.dim() == 2 and x.stride(-1) == y.stride(-1) == 1):
        return False
    pitch = x.stride(0) * x.element_size()
    if pitch <= 0 or pitch != y.stride(0) * y.element_size():
        return False
    distance = (y.data_ptr() - x.data_ptr()) % pitch  # from the first column of x to the first column of y
    return distance >= x.shape[1] * x.element_size() and distance + y.shape[1] * y.element_size() <= pitch


def address(t: Tensor) -> int:
    """Return the address of ``t``; for a fake tensor, in ``explain``, its offset in the storage."""
    return int(t.storage_offset()) * t.element_size() if isinstance(t, FakeTensor) else t.data_ptr()


def in_lines(t: Tensor) -> Tensor:
    """Return ``t``, or a row-major copy if its elements overlap or have a unit stride in neither rows nor columns.

    For gradients, whose strides autograd chooses.
    """
    return t if _lies_in_lines(t) else t.contiguous()


def _lies_in_lines(t: Tensor) -> bool:
    """Return whether the last two dimensions are a row-major or column-major matrix, possibly with padded lines."""
    if t.dim() < 2 or t.is_contiguous():
        return True
    (*_, row, column), (*_, rows, columns) = t.stride(), t.shape
    if guard_or_false(column == 1) and guard_or_false(row >= columns):
        return True
    return guard_or_false(row == 1) and guard_or_false(column >= rows)


def copies_unless(holds: Callable[[Tensor], bool], *names: str) -> Callable[..., dict[str, int]]:
    """Return ``Implementation.copies`` for one that copies its first arguments unless ``holds``."""

    def copies(*args: Tensor | None, **options: Any) -> dict[str, int]:
        return {name: t.nbytes for name, t in zip(names, args) if t is not None and not holds(t)}

    return copies


def copies_to_lines(*names: str) -> Callable[..., dict[str, int]]:
    """Return ``Implementation.copies`` for one that calls ATen's products; ``names`` are its first arguments."""
    copied = copies_unless(_lies_in_lines, *names)

    def copies(*args: Tensor | None, **options: Any) -> dict[str, int]:
        return {name: size for name, size in copied(*args).items() if not _read_by_index(name, options)}

    return copies


def has_rows(t: Tensor) -> bool:
    """Return whether the elements of a row, if there are any, follow each other in memory."""
    return bool(t.stride(-1) == 1 or not t.numel())


def _read_by_index(name: str, options: dict[str, Any]) -> bool:
    """Return whether a call gathers the rows of the operand."""
    return ("rows" in options and name in ("a", "dy")) or f"{name}_rows" in options
