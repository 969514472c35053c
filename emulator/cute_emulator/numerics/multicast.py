"""Reductions over the ranks of a multicast address: ``multimem.ld_reduce``.

Values are reduced in the order of the ranks: that of rank 1 is added to that of rank 0, then that of rank 2, and so on.
The PTX ISA leaves the order open, so sums that round may differ from hardware in the last bits.
"""

from functools import reduce

import numpy as np

from .atomics import FLOAT_TYPES
from .floats import PACKED, fop, fromfloat, pack2, tofloat, unpack2
from .lanes import MASK, iminmax


def make_reduction(op, ty, wide):
    """Function of the values of all ranks, by rank, for a reduction ``op`` of elements of type ``ty``.

    wide: add in float32 and round the sum once, as ``.acc::f32`` has it; else each sum is rounded to ``ty``.
    """
    if ty in FLOAT_TYPES:
        if op == "add" and wide:
            return lambda values: _wide_sum(ty, values)
        return lambda values: reduce(lambda a, b: fop(op, ty, (a, b)), values)
    bits, signed = int(ty[1:]), ty[0] == "s"
    steps = {
        "add": lambda a, b: (a + b) & MASK[bits] if type(a) is int and type(b) is int else a + b,
        "min": lambda a, b: iminmax(a, b, bits, signed, False),
        "max": lambda a, b: iminmax(a, b, bits, signed, True),
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
    return lambda values: reduce(steps[op], values)


@np.errstate(all="ignore")
def _wide_sum(ty, values):
    if ty in PACKED:
        low, high = (reduce(np.add, halves) for halves in zip(*(unpack2(v, ty) for v in values), strict=True))
        return pack2(low, high, ty)
    return fromfloat(reduce(np.add, (tofloat(v, ty).astype(np.float32) for v in values)), ty)
