"""Reductions over the ranks of a multicast address: ``multimem.ld_reduce``.

Values are reduced in the order of the ranks: that of rank 1 is added to that of rank 0, then that of rank 2, and so on.
The PTX ISA leaves the order open, so sums that round may differ from hardware in the last bits.
"""

from functools import reduce

import numpy as np

from .factories import make_atom
from .floats import PACKED, fromfloat, pack2, tofloat, unpack2


def make_reduction(op, ty, wide):
    """Function of the values of all ranks, by rank, for a reduction ``op`` of elements of type ``ty``.

    wide: add in float32 and round the sum once, as ``.acc::f32`` has it; else each sum is rounded to ``ty``.
    """
    if op == "add" and wide:
        return lambda values: _wide_sum(ty, values)
    step = make_atom(op, ty, ())
    return lambda values: reduce(step, values)


@np.errstate(all="ignore")
def _wide_sum(ty, values):
    if ty in PACKED:
        low, high = (reduce(np.add, halves) for halves in zip(*(unpack2(v, ty) for v in values), strict=True))
        return pack2(low, high, ty)
    return fromfloat(reduce(np.add, (tofloat(v, ty).astype(np.float32) for v in values)), ty)
