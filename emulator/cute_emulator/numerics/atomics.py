"""Read-modify-write arithmetic: ``atom``/``red`` on one element and TMA reductions on arrays."""

import numpy as np

from ..errors import UnsupportedError
from .floats import NAN_BITS, fop, round_to
from .formats import bf16_to_f32
from .lanes import MASK, iminmax

FLOAT_TYPES = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")


def atom_op(op, ty, old, vals, ftz=False):
    """New memory value (Python int of raw bits) of one atomic.

    op: add, min, max, inc, dec, cas (vals = compare, swap), exch, and, or, xor. ty: an integer, bit or float type.
    """
    v = vals[0]
    if op == "exch":
        return v
    if op == "cas":
        return vals[1] if old == v else old
    if ty in FLOAT_TYPES:
        if op not in ("add", "min", "max"):
            raise UnsupportedError(f"atomic {op}.{ty}")
        return fop(op, ty, (old, v), ftz=ftz)
    bits = int(ty[-2:])
    if op == "add":
        return (old + v) & MASK[bits]
    if op in ("min", "max"):
        return iminmax(old, v, bits, ty[0] == "s", op == "max")
    if op == "inc":
        return 0 if old >= v else old + 1
    if op == "dec":
        return v if old == 0 or old > v else old - 1
    if op in ("and", "or", "xor"):
        return {"and": old & v, "or": old | v, "xor": old ^ v}[op]
    raise UnsupportedError(f"atomic {op}.{ty}")


@np.errstate(all="ignore")
def reduce_array(op, ty, dst, src):
    """Element-wise result of a TMA reduction on arrays of raw bits: ``op(dst, src)``.

    ty: u32, s32, u64, s64 (add, min, max, inc, dec, and, or, xor), f16, bf16 (add, min, max), f32, f64 (add).
    """
    if op in ("and", "or", "xor") and ty[0] in "us":
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](dst, src)
    if ty[0] in "us":
        bits = int(ty[1:])
        d, s = dst, src
        if ty[0] == "s":
            d, s = d.view(f"i{bits // 8}"), s.view(f"i{bits // 8}")
        if op == "add":
            return dst + src
        if op in ("min", "max"):
            return (np.maximum if op == "max" else np.minimum)(d, s).view(dst.dtype)
        if ty == "u32" and op == "inc":
            return np.where(dst >= src, 0, dst + np.uint32(1)).astype(dst.dtype)
        if ty == "u32" and op == "dec":
            return np.where((dst == 0) | (dst > src), src, dst - np.uint32(1)).astype(dst.dtype)
        raise UnsupportedError(f"TMA reduction {op}.{ty}")
    decode = {
        "f32": lambda a: a.view(np.float32),
        "f16": lambda a: a.view(np.float16),
        "bf16": bf16_to_f32,
        "f64": lambda a: a.view(np.float64),
    }
    if ty not in decode or (op != "add" and ty not in ("f16", "bf16")) or op not in ("add", "min", "max"):
        raise UnsupportedError(f"TMA reduction {op}.{ty}")
    x, y = decode[ty](np.ascontiguousarray(dst)), decode[ty](np.ascontiguousarray(src))
    if op == "add":
        # a sum of two 16-bit floats is exact in float64 or rounds innocuously (53 >= 2p + 2)
        r = x + y if ty in ("f32", "f64") else x.astype(np.float64) + y.astype(np.float64)
        return round_to(r, ty)
    less = (y < x) | ((y == x) & np.signbit(y))
    pick = np.where(less if op == "min" else ~less & (y == y), y, x)
    pick = np.where(np.isnan(x), y, np.where(np.isnan(y), x, pick))
    return np.where(np.isnan(pick), dst.dtype.type(NAN_BITS[ty]), round_to(pick.astype(np.float64), ty))
