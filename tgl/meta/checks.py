"""Argument checks shared by the fake and the real implementations.

A failed check raises one exception that names the op, the argument, what it must be and what it was: ``TypeError`` for
dtypes, ``ValueError`` for everything else. Under ``torch.compile`` the same message arrives inside Dynamo's exception.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import SymInt, Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
OUT_ALIGNMENT = 16  # bytes; what a 128-bit store and a TMA descriptor need

Message = Callable[[], str]


def guard_or_true(condition: bool | torch.SymBool) -> bool:
    """Return whether ``condition`` holds or is unknown for its symbols."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental import symbolic_shapes  # imports sympy; where there are symbols it is loaded already

    return symbolic_shapes.guard_or_true(condition)


def guard_or_false(condition: bool | torch.SymBool) -> bool:
    """Return whether ``condition`` holds; False if unknown for its symbols."""
    return not guard_or_true(torch.sym_not(condition))


def require(
    condition: bool | torch.SymBool, op: str, argument: str, must: str | Message, got: object, error: type = ValueError
) -> None:
    """Raise ``error`` unless ``condition`` holds; a condition on unbacked sizes becomes a run-time assertion.

    ``must`` may be a callable and ``got`` is formatted only on failure, so a passing check costs a comparison.
    """
    if condition is True:
        return
    torch._check_with(
        error,
        condition,
        lambda: f"tgl::{op}: `{argument}` must be {must() if callable(must) else must}, but got {_show(got)}",
    )


def unknown(name: object, names: Collection[str]) -> str:
    """Return a name that is none of ``names`` for the end of a message, with the closest of them if one is close."""
    import difflib  # only for a message

    close = difflib.get_close_matches(name.lower(), names, 1) if isinstance(name, str) else ()
    return f"{name!r}" + "".join(f" (did you mean {match!r}?)" for match in close)


def known(op: str, argument: str, name: object, names: Collection[str]) -> None:
    """Check that ``name`` is one of ``names``."""
    if name not in names:
        require(False, op, argument, f"one of {', '.join(names)}", unknown(name, names))


def _show(got: object) -> str:
    if isinstance(got, torch.Size):
        return f"shape {tuple(got)}"
    return str(got)


# The checks below compare first and call ``require`` only if the comparison is not True: a failure, or a condition on
# symbolic sizes. Every op call runs a dozen of them, and a call costs more than the comparison.


def ndim(op: str, argument: str, t: Tensor, n: int, letters: str) -> None:
    """Check that ``t`` has ``n`` dimensions; ``letters`` names them for the message."""
    if t.ndim != n:
        require(False, op, argument, f"{n}-D {letters}", t.shape)


def shape(op: str, argument: str, t: Tensor, expected: tuple, letters: str) -> None:
    """Check that ``t`` has exactly the shape ``expected``; ``letters`` names its dimensions."""
    if len(expected) != t.dim():
        require(False, op, argument, lambda: f"of shape {letters} = {tuple(expected)}", t.shape)
    for have, want in zip(t.shape, expected):
        if (same := have == want) is not True:
            require(same, op, argument, lambda: f"of shape {letters} = {tuple(expected)}", t.shape)


def size(op: str, argument: str, t: Tensor, dim: int, expected: int | SymInt, must: Message) -> None:
    """Check that dimension ``dim`` of ``t`` is ``expected``; ``must`` is the requirement in words."""
    if (same := t.shape[dim] == expected) is not True:
        require(same, op, argument, must, t.shape)


def size_even(op: str, argument: str, t: Tensor, dim: int, must: str) -> None:
    """Check that dimension ``dim`` of ``t`` is even; ``must`` is the requirement in words."""
    if (even := t.shape[dim] % 2 == 0) is not True:
        require(even, op, argument, must, t.shape)


def contiguous(op: str, argument: str, t: Tensor) -> None:
    """Check that ``t`` is contiguous; for symbolic sizes, which would add guards, only the real call checks it."""
    if not any(isinstance(s, SymInt) for s in (*t.shape, *t.stride())) and not t.is_contiguous():
        require(False, op, argument, "contiguous", f"strides {t.stride()}")


def strides(op: str, argument: str, t: Tensor, expected: tuple, why: str) -> None:
    """Check the strides of dimensions with more than one element; for symbolic sizes only in the real call."""
    if any(isinstance(s, SymInt) for s in (*t.shape, *t.stride())) or not t.numel():
        return
    if any(size > 1 and have != want for size, have, want in zip(t.shape, t.stride(), expected)):
        require(False, op, argument, f"of strides {tuple(expected)}, {why}", f"strides {t.stride()}")


def apart(op: str, argument: str, t: Tensor) -> None:
    """Check that elements of ``t`` do not overlap, as in an expanded tensor; for symbols only in the real call."""
    if any(isinstance(s, SymInt) for s in (*t.shape, *t.stride())) or not t.numel():
        return
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape) if size > 1):
        if stride < extent:
            require(False, op, argument, "free of elements that overlap", f"strides {t.stride()}")
        extent += stride * (size - 1)


def floating(op: str, argument: str, t: Tensor) -> None:
    """Check that ``t`` has one of the floating dtypes of the dense ops."""
    if t.dtype not in FLOATS:
        require(False, op, argument, "float64, float32, bfloat16 or float16", t.dtype, TypeError)


def same_dtype(op: str, argument: str, t: Tensor, reference: str, dtype: torch.dtype) -> None:
    """Check that ``t`` has the dtype of the argument ``reference``."""
    if t.dtype != dtype:
        require(False, op, argument, f"{dtype} like `{reference}`", t.dtype, TypeError)


def either_dtype(op: str, argument: str, t: Tensor, *allowed: torch.dtype) -> None:
    """Check that ``t`` has one of the dtypes in ``allowed``."""
    if t.dtype not in allowed:
        require(False, op, argument, " or ".join(map(str, dict.fromkeys(allowed))), t.dtype, TypeError)


def same_device(op: str, argument: str, t: Tensor, reference: str, device: torch.device) -> None:
    """Check that ``t`` is on the device of the argument ``reference``."""
    if t.device != device:
        require(False, op, argument, f"on {device} like `{reference}`", t.device)


def like(op: str, argument: str, t: Tensor, reference: str, dtype: torch.dtype, device: torch.device) -> None:
    """Check that ``t`` has the dtype and the device of the argument ``reference``."""
    if t.dtype != dtype:
        same_dtype(op, argument, t, reference, dtype)
    if t.device != device:
        same_device(op, argument, t, reference, device)


def operand(
    op: str,
    argument: str,
    t: Tensor,
    expected: tuple,
    letters: str,
    allowed: tuple[torch.dtype, ...],
    beside: tuple[str, torch.device],
) -> None:
    """Check shape, dtype and device of ``t``; ``beside``: an argument, and the device that it is on."""
    shape(op, argument, t, expected, letters)
    if t.dtype not in allowed:
        either_dtype(op, argument, t, *allowed)
    if t.device != beside[1]:
        same_device(op, argument, t, *beside)


def offsets(op: str, offs: Tensor, groups: int | SymInt | None, reference: str, device: torch.device) -> None:
    """Check that ``offs`` is a contiguous int32 vector of (``groups``) group ends, on the device of ``reference``."""
    if offs.dtype != torch.int32:
        require(False, op, "offs", "int32 (cumulative group ends)", offs.dtype, TypeError)
    if offs.ndim != 1:
        require(False, op, "offs", "1-D [G]", offs.shape)
    if groups is not None and (same := offs.shape[0] == groups) is not True:
        require(same, op, "offs", f"of length {groups} (one end per group)", offs.shape)
    if offs.device != device:
        require(False, op, "offs", f"on {device} like `{reference}`", offs.device)
    (stride,) = offs.stride()
    if (stride == 1) is not True and not (guard_or_true(stride == 1) or guard_or_true(offs.shape[0] <= 1)):
        require(False, op, "offs", "contiguous", f"strides {offs.stride()}")


def row_index(op: str, argument: str, index: Tensor, reference: str, device: torch.device) -> None:
    """Check that ``index`` is a contiguous int32 vector of row indices of the argument ``reference``."""
    if index.dtype != torch.int32:
        require(False, op, argument, f"int32 (numbers of rows of `{reference}`)", index.dtype, TypeError)
    ndim(op, argument, index, 1, "[T]")
    same_device(op, argument, index, reference, device)
    (stride,) = index.stride()
    if (stride == 1) is not True and not (guard_or_true(stride == 1) or guard_or_true(index.shape[0] <= 1)):
        require(False, op, argument, "contiguous", f"strides {index.stride()}")


def slots(
    op: str, argument: str, packed: Tensor, table: Tensor, groups: int | SymInt, reference: str, device: torch.device
) -> None:
    """Check that ``table`` is a contiguous int32 vector of one slot per group, and that ``packed`` has slots."""
    if table.dtype != torch.int32:
        require(False, op, "slots", f"int32 (the slot of every group in `{argument}`)", table.dtype, TypeError)
    shape(op, "slots", table, (groups,), "[G]")
    same_device(op, "slots", table, reference, device)
    (stride,) = table.stride()
    if (stride == 1) is not True and not (guard_or_true(stride == 1) or guard_or_true(table.shape[0] <= 1)):
        require(False, op, "slots", "contiguous", f"strides {table.stride()}")
    for fits in (packed.shape[0] >= 1, packed.shape[0] < 1 << 31):
        if fits is not True:
            require(fits, op, argument, "of 1 to 2^31 - 1 slots when `slots` is given", packed.shape)


def out_dtype(op: str, argument: str, operand: torch.dtype, requested: torch.dtype | None) -> torch.dtype:
    """Return the output dtype for operands of dtype ``operand``; float64 does not mix with the others."""
    if requested is None or requested == operand:
        return operand
    require(
        operand != torch.float64 and requested in FLOATS[1:],
        op,
        argument,
        "float64" if operand == torch.float64 else "float32, bfloat16 or float16",
        requested,
        TypeError,
    )
    return requested


def out_buffer(
    op: str, argument: str, t: Tensor, expected: tuple, letters: str, device: torch.device, *, overlapping: bool = False
) -> None:
    """Check that a kernel can write ``t``: shape, device, row-major (rows and slots may be padded).

    Args:
        overlapping: whether slots, along the first dimension, may overlap.
    """
    shape(op, argument, t, expected, letters)
    same_device(op, argument, t, "a", device)
    inner = t.stride(-1)
    if not ((not isinstance(inner, SymInt) and inner == 1) or guard_or_true(t.shape[-1] <= 1)):
        require(False, op, argument, "row-major (last stride 1)", f"strides {t.stride()}")
    for dim in range(1 if overlapping else 0, t.dim() - 1):
        extent = 1 if dim + 1 == t.dim() - 1 else t.stride(dim + 1)
        room = t.stride(dim) >= t.shape[dim + 1] * extent
        if not (room is True or guard_or_true(room) or guard_or_true(t.shape[dim] <= 1)):
            require(False, op, argument, "free of overlapping rows", f"strides {t.stride()}")
