"""Pointers that are known to be aligned."""

from typing import Any

from cutlass import cute


def aligned(pointer: Any, width: int) -> Any:
    """``pointer``, on a multiple of ``width`` bytes.

    The promise costs nothing; ``pointer.align`` would round the address up, at three instructions an access, and hide
    from the assembler that accesses at constant distances share one.
    """
    if width <= pointer.alignment:
        return pointer
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=width)
