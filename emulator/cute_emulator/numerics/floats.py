"""Floating-point lane arithmetic with the rounding, flushing and saturation modifiers of PTX.

Every operation is rounded once. Operands of 32 bits and fewer are computed in float64: products are exact there, sums
are rounded to odd (:func:`formats.odd_sum`) and quotients and roots have enough spare bits, so the final rounding to
the result type is that of the exact value, in all four directions. ``.approx`` functions give the correctly rounded
float64 function value rounded to the type, which is more accurate than the hardware's. NaN results are canonical.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from .formats import bf16_to_f32, f32_to_bf16, odd_sum
from .lanes import M16, M32, UDT, out, outp, vec

FDT = {"f32": (32, np.float32), "f64": (64, np.float64), "f16": (16, np.float16)}
PACKED = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}
NAN_BITS = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FF8000000000000}
WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_TINY = {"f16": 2.0**-14, "bf16": 2.0**-126, "f32": 2.0**-126, "f64": 2.0**-1022}


def tofloat(a, ty):
    """Register value -> float array (float32 for bf16; else the type's own numpy type)."""
    if ty == "bf16":
        return bf16_to_f32(vec(a, 16))
    bits, dt = FDT[ty]
    return vec(a, bits).view(dt)


def fromfloat(r, ty):
    """Float array -> register value, rounded to nearest even."""
    return out(round_to(r, ty))


def unpack2(a, ty):
    """A packed pair as two float32 arrays ``(low, high)``."""
    if ty == "f32x2":
        v = vec(a, 64)
        lo, hi = (v & np.uint64(M32)).astype(np.uint32), (v >> np.uint64(32)).astype(np.uint32)
        return lo.view(np.float32), hi.view(np.float32)
    v = vec(a, 32)
    lo, hi = (v & np.uint32(M16)).astype(np.uint16), (v >> np.uint32(16)).astype(np.uint16)
    if ty == "bf16x2":
        return bf16_to_f32(lo), bf16_to_f32(hi)
    return lo.view(np.float16).astype(np.float32), hi.view(np.float16).astype(np.float32)


def pack_bits(lo, hi, ty):
    """Two arrays of raw element patterns -> packed register value."""
    lo, hi = np.broadcast_arrays(lo, hi)
    wide, shift = (np.uint64, 32) if ty == "f32x2" else (np.uint32, 16)
    return out(lo.astype(wide) | (hi.astype(wide) << wide(shift)))


def pack2(lo, hi, ty):
    """Two float arrays -> packed register value, each rounded to nearest even."""
    return pack_bits(round_to(lo, PACKED[ty]), round_to(hi, PACKED[ty]), ty)


@np.errstate(all="ignore")
def round_to(x, ty, rnd="rn"):
    """Round a float array to ``ty`` in the given direction (rn, rz, rm, rp); returns raw patterns, NaN canonical.

    float64 input of a narrower type may be rounded to odd: the result is then that of the exact value.
    """
    if ty == "bf16":
        return f32_to_bf16(x, rnd)
    bits, dt = FDT[ty]
    y = x.astype(dt)
    if rnd != "rn" and x.dtype != dt:
        yw = y.astype(np.float64)
        if rnd == "rz":
            y = np.where(np.abs(yw) > np.abs(x), np.nextafter(y, dt(0)), y)
        elif rnd == "rm":
            y = np.where(yw > x, np.nextafter(y, dt(-np.inf)), y)
        elif rnd == "rp":
            y = np.where(yw < x, np.nextafter(y, dt(np.inf)), y)
        else:
            raise UnsupportedError(f"rounding .{rnd} to {ty}")
    u = np.ascontiguousarray(y).view(UDT[bits])
    nan = np.isnan(y)
    return np.where(nan, UDT[bits](NAN_BITS[ty]), u) if nan.any() else u


def flush(x, ty):
    """Subnormals of ``ty`` to zero of the same sign."""
    tiny = (np.abs(x) < x.dtype.type(_TINY[ty])) & (x != 0)
    return np.where(tiny, np.copysign(x.dtype.type(0), x), x) if tiny.any() else x


# ---- exact results in float64 ---------------------------------------------------------------------------------------
def _zero_sign(t, a, b, rnd):
    """An exact zero sum of operands with different signs is -0 when rounding down, +0 otherwise."""
    if rnd != "rm":
        return t
    return np.where((t == 0) & (np.signbit(a) != np.signbit(b)), -0.0, t)


def _add(x, y, rnd):
    return _zero_sign(odd_sum(x, y), x, y, rnd)


def _fma(x, y, z, rnd):
    p = x * y
    return _zero_sign(odd_sum(p, z), p, z, rnd)


_WIDE: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": lambda x, y, rnd: _add(x, -y, rnd),
    "mul": lambda x, y, rnd: x * y,
    "div": lambda x, y, rnd: x / y,
    "fma": _fma,
    "sqrt": lambda x, rnd: np.sqrt(x),
    "rcp": lambda x, rnd: 1.0 / x,
    "rsqrt": lambda x, rnd: 1.0 / np.sqrt(x),
    "ex2": lambda x, rnd: np.exp2(x),
    "lg2": lambda x, rnd: np.log2(x),
    "sin": lambda x, rnd: np.sin(x),
    "cos": lambda x, rnd: np.cos(x),
    "tanh": lambda x, rnd: np.tanh(x),
}
_NATIVE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rcp": lambda x: 1.0 / x,
}
_APPROX = ("rsqrt", "ex2", "lg2", "sin", "cos", "tanh")


def _f64_lane(name, xs, rnd):
    """Compute a float64 operation by exact rational arithmetic."""
    if not all(math.isfinite(x) for x in xs):
        a = [np.float64(x) for x in xs]
        if name != "fma":
            return float(_WIDE[name](*a, "rn"))
        # a product of finite factors is finite, however large: it must not meet an infinite addend as infinity
        finite_product = math.isfinite(xs[0]) and math.isfinite(xs[1])
        return xs[2] if finite_product else float(a[0] * a[1] + a[2])
    f = [Fraction(x) for x in xs]
    if name in ("rcp", "div"):
        num, den = (1.0, xs[0]) if name == "rcp" else xs
        if den == 0 or num == 0:
            return float(np.float64(num) / np.float64(den))
        exact = Fraction(num) / Fraction(den)
    else:
        b = -f[1] if name == "sub" else f[-1]
        exact = f[0] + b if name in ("add", "sub") else f[0] * f[1] + (f[2] if name == "fma" else 0)
        if exact == 0:
            if name == "mul":
                return xs[0] * xs[1]
            p, q = (xs[0] * xs[1], xs[2]) if name == "fma" else (xs[0], -xs[1] if name == "sub" else xs[1])
            same = math.copysign(1, p) == math.copysign(1, q)
            return math.copysign(0.0, p) if same and p == 0 and q == 0 else (-0.0 if rnd == "rm" else 0.0)
    try:
        r = float(exact)
    except OverflowError:
        r = math.inf if exact > 0 else -math.inf
    if r == 0 and exact < 0:
        r = -0.0
    got = Fraction(r) if math.isfinite(r) else None
    above = r > 0 if got is None else got > exact
    below = r < 0 if got is None else got < exact
    if (rnd == "rz" and (above if exact > 0 else below)) or (rnd == "rm" and above) or (rnd == "rp" and below):
        r = math.nextafter(r, {"rz": 0.0, "rm": -math.inf, "rp": math.inf}[rnd])
    return r


def _f64(name, xs, rnd):
    if name in _APPROX or (name == "sqrt" and rnd == "rn"):
        return _WIDE[name](*xs, rnd)
    if rnd == "rn" and name != "fma":
        return _NATIVE[name](*xs)
    if name not in ("add", "sub", "mul", "div", "fma", "rcp"):
        raise UnsupportedError(f"{name}.{rnd}.f64")
    cols = np.broadcast_arrays(*xs)
    return np.array([_f64_lane(name, [float(c[i]) for c in cols], rnd) for i in range(cols[0].size)])


def _arith(name, ty, xs, rnd, ftz, sat, relu):
    """Arithmetic on float arrays of one scalar type; returns raw patterns."""
    if ftz:
        xs = [flush(x, ty) for x in xs]
    if ty == "f64":
        r = _f64(name, xs, rnd)
    elif ty == "f32" and rnd == "rn" and name in ("add", "sub", "mul") and not ftz:
        r = (np.add if name == "add" else np.subtract if name == "sub" else np.multiply)(*xs)
    else:
        r = _WIDE[name](*[x.astype(np.float64) for x in xs], rnd)
    if ftz:
        r = flush_result(r, ty, rnd)
    bits = round_to(r, ty, rnd)
    if ty == "f64":
        bits = _propagate_nan(name, bits, r, xs)
    if sat or relu:
        v = tofloat(bits, ty)
        one = v.dtype.type(1)
        if sat:  # NaN and -0 become +0
            bits = round_to(np.where(v > 0, np.minimum(v, one), v.dtype.type(0)), ty)
        else:  # NaN stays NaN
            bits = round_to(np.where((v > 0) | np.isnan(v), v, v.dtype.type(0)), ty)
    return bits


def flush_result(r, ty, rnd):
    """Flush exact results as the device does: by their value rounded to the precision of ``ty`` at any exponent.

    A value that needs few enough bits stays below the normal range and becomes zero, although rounding on the coarser
    subnormal grid would lift it into the range.
    """
    smallest, lift = _TINY[ty], 2.0**8 if ty == "f16" else 2.0**64
    tiny = (np.abs(r) < smallest) & (r != 0)
    if not tiny.any():
        return r
    rounded = np.abs(tofloat(round_to(r * lift, ty, rnd), ty)).astype(np.float64)
    return np.where(tiny & (rounded < smallest * lift), np.copysign(0.0, r), r)


def _flush_bits(bits, ty):
    mant = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}[ty]
    dt = bits.dtype.type
    top = dt(1 << (WIDTH[ty] - 1))
    sub = (bits & dt(((1 << (WIDTH[ty] - 1)) - 1) >> mant << mant)) == 0
    return np.where(sub, bits & top, bits)


def _propagate_nan(name, bits, r, xs):
    """float64 NaN results: of operands that are NaN one made quiet, or the negative default NaN if there is none.

    A Hopper device looks at the second operand of a product, then at the addend, then at the first. A sum is a product
    with 1, whose addend is its second operand. A quotient begins with its first.
    """
    nan = np.isnan(r)
    if not nan.any():
        return bits
    value = np.full(bits.shape, 0xFFF8000000000000, np.uint64)
    last_first = {"fma": (0, 2, 1), "div": (1, 0)}.get(name, range(len(xs)))
    for x in (xs[i] for i in last_first):
        value = np.where(np.isnan(x), _quiet(x), value)
    return np.where(nan, value, bits)


def _quiet(x):
    """The patterns of float64 NaN that signal no longer."""
    return np.ascontiguousarray(x).view(np.uint64) | np.uint64(1 << 51)


def _minmax(name, ty, xs, ftz, nan, relu, xorsign):
    """min/max: -0 < +0; a NaN operand loses, or wins with ``nan``. Returns raw patterns."""
    if ftz:
        xs = [flush(x, ty) for x in xs]
    xs = list(np.broadcast_arrays(*xs))
    lost = xs[-1]  # with which two float64 NaN end
    if xorsign:
        sign = np.logical_xor.reduce([np.signbit(x) for x in xs])
        xs = [np.abs(x) for x in xs]
    r = xs[0]
    for y in xs[1:]:
        if name == "min":
            pick = (y < r) | ((y == r) & np.signbit(y))
        else:
            pick = (y > r) | ((y == r) & ~np.signbit(y))
        best = np.where(pick, y, r)
        rn, yn = np.isnan(r), np.isnan(y)
        r = np.where(rn | yn, np.nan, best) if nan else np.where(rn, y, np.where(yn, r, best))
    r = r.astype(xs[0].dtype)
    if xorsign:
        r = np.where(np.isnan(r), r, np.copysign(r, np.where(sign, -1, 1).astype(r.dtype)))
    if relu:
        r = np.where((r > 0) | np.isnan(r), r, r.dtype.type(0))
    bits = round_to(r, ty)
    return np.where(np.isnan(r), _quiet(lost), bits) if ty == "f64" else bits


def _sign(name, ty, a, ftz):
    """neg and abs change the sign bit alone, but make a NaN canonical; in f64 quiet, with the sign it had."""
    top = {"f16": 0x8000, "bf16": 0x8000, "f32": 0x80000000, "f64": 1 << 63}[ty]
    u = vec(a, WIDTH[ty])
    dt = u.dtype.type
    if ftz:
        u = _flush_bits(u, ty)
    r = u ^ dt(top) if name == "neg" else u & dt(top - 1)
    nan = np.isnan(tofloat(u, ty))
    if not nan.any():
        return r
    if ty != "f64":
        return np.where(nan, dt(NAN_BITS[ty]), r)
    return np.where(nan, _quiet(u), r)


@np.errstate(all="ignore")
def fop(name, ty, args, sat=False, nan=False, relu=False, rnd=None, ftz=False, xorsign=False):
    """A floating-point instruction on register values.

    name: add, sub, mul, fma (or mad), div, rcp, sqrt, rsqrt, ex2, lg2, sin, cos, tanh, min, max (two or three
    operands), neg, abs. ty: f16, bf16, f32, f64 or a packed f16x2/bf16x2/f32x2. rnd: rn (default), rz, rm, rp.
    Raises UnsupportedError for an undefined combination.
    """
    rnd = rnd or "rn"
    name = "fma" if name == "mad" else name
    if ty in PACKED:
        el = PACKED[ty]
        pairs = [unpack2(a, ty) for a in args]
        both = []
        for half in (0, 1):
            xs = [p[half] for p in pairs]
            if name in ("neg", "abs"):
                both.append(_sign(name, el, out(round_keep(xs[0], el)), ftz))
            elif name in ("min", "max"):
                both.append(_minmax(name, el, xs, ftz, nan, relu, xorsign))
            else:
                both.append(_arith(name, el, xs, rnd, ftz, sat, relu))
        return pack_bits(both[0], both[1], ty)
    if ty not in WIDTH:
        raise UnsupportedError(f"{name}.{ty}")
    if name in ("neg", "abs"):
        return out(_sign(name, ty, args[0], ftz))
    xs = [tofloat(a, ty) for a in args]
    if name in ("min", "max"):
        return out(_minmax(name, ty, xs, ftz, nan, relu, xorsign))
    if name not in _WIDE:
        raise UnsupportedError(f"{name}.{ty}")
    return out(_arith(name, ty, xs, rnd, ftz, sat, relu))


def round_keep(x, ty):
    """Raw patterns of float32 values that are already of type ``ty``, keeping NaN payloads' sign."""
    if ty == "bf16":
        return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.ascontiguousarray(x.astype(FDT[ty][1])).view(UDT[FDT[ty][0]])


def copysign(a, b, ty):
    """``b`` with the sign of ``a``."""
    bits = WIDTH[ty]
    u, v = vec(a, bits), vec(b, bits)
    top = u.dtype.type(1 << (bits - 1))
    return out((v & ~top) | (u & top))


@np.errstate(all="ignore")
def testp(what, ty, a):
    """finite, infinite, number, notanumber, normal or subnormal."""
    x = tofloat(a, ty)
    tiny = np.abs(x) < x.dtype.type(_TINY[ty])
    return outp(
        {
            "finite": lambda: np.isfinite(x),
            "infinite": lambda: np.isinf(x),
            "number": lambda: ~np.isnan(x),
            "notanumber": lambda: np.isnan(x),
            "normal": lambda: np.isfinite(x) & ~tiny,
            "subnormal": lambda: tiny & (x != 0),
        }[what]()
    )


_CMP = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@np.errstate(all="ignore")
def fsetp(cmp, ty, a, b, ftz=False):
    """Comparison of two floats as a predicate; ``equ`` and its kind are true when an operand is NaN."""
    x, y = tofloat(a, ty), tofloat(b, ty)
    if ftz:
        x, y = flush(x, ty), flush(y, ty)
    unordered = np.isnan(x) | np.isnan(y)
    if cmp == "num":
        return outp(~unordered)
    if cmp == "nan":
        return outp(unordered)
    if cmp in _CMP:
        return outp(_CMP[cmp](x, y) & ~unordered)
    return outp(_CMP[cmp[:-1]](x, y) | unordered)
