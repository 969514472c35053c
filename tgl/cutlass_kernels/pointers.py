"""Mark pointers as aligned."""

from typing import Any

from cutlass import cute


def aligned(pointer: Any, width: int) -> Any:
    """Return ``pointer`` with the promise that it is a multiple of ``width`` bytes.

    The promise costs nothing; ``pointer.align`` would round the address up, at three instructions per access, and would
    keep the assembler from sharing one address among accesses at constant distances.
    """
    if width <= pointer.alignment:
        return pointer
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=width)
