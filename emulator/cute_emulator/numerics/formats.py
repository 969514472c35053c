"""Number formats narrower than 32 bits: decoding tables and exact rounding into them.

``e4m3`` (OCP FP8, no infinity, NaN = 0x7f/0xff), ``e5m2`` (IEEE-like), ``e2m1``/``e2m3``/``e3m2`` (OCP MX: neither
infinity nor NaN), ``ue8m0`` (an unsigned power of two, 2**(code-127), 255 = NaN), ``ue4m3`` (e4m3 without a sign,
scale factors of NVFP4), ``bf16``, ``f16`` and ``tf32`` (a float32 with ten mantissa bits).
"""

import math

import numpy as np

from ..errors import UnsupportedError


def _decode_table(ebits, mbits, bias, special):
    """All values of a sign/exponent/mantissa format as float32, indexed by code."""
    t = np.zeros(1 << (1 + ebits + mbits), np.float32)
    top = (1 << ebits) - 1
    for code in range(len(t)):
        sign = -1.0 if code >> (ebits + mbits) else 1.0
        e, m = (code >> mbits) & top, code & ((1 << mbits) - 1)
        v = m * 2.0 ** (1 - bias - mbits) if e == 0 else (1 + m / (1 << mbits)) * 2.0 ** (e - bias)
        if special == "fn" and e == top and m == (1 << mbits) - 1:
            v = math.nan
        if special == "ieee" and e == top:
            v = math.nan if m else math.inf
        t[code] = sign * v
    return t


# format -> float32 value of each code
LUT = {
    "e4m3": _decode_table(4, 3, 7, "fn"),
    "e5m2": _decode_table(5, 2, 15, "ieee"),
    "e2m1": _decode_table(2, 1, 1, None),
    "e2m3": _decode_table(2, 3, 1, None),
    "e3m2": _decode_table(3, 2, 3, None),
    "ue8m0": np.array([2.0 ** (i - 127) for i in range(255)] + [math.nan], np.float64).astype(np.float32),
}
LUT["ue4m3"] = LUT["e4m3"].copy()  # the sign bit of a scale factor is ignored
LUT["ue4m3"][128:] = LUT["e4m3"][:128]
for _t in LUT.values():
    _t.flags.writeable = False

CODE_BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}


def _magnitudes(ty, bits):
    positive = LUT[ty][: 1 << (bits - 1)]
    return positive[np.isfinite(positive)].astype(np.float64)


# ascending finite magnitudes of a format (index = code)
_MAGNITUDES = {t: _magnitudes(t, b) for t, b in CODE_BITS.items()}


@np.errstate(all="ignore")
def encode_small(f, ty, rnd="rn", rbits=None, nbits=16):
    """Round float values to an FP8/FP6/FP4 format, saturating to the largest finite magnitude.

    ``f``: array of float32 or float64 values. ``rnd``: ``rn`` (nearest, ties to even) or ``rs`` (stochastic: up when
    the fraction between the two neighbours plus ``rbits / 2**nbits`` reaches 1). NaN gives the format's canonical NaN,
    or the positive maximum where the format has none. Returns uint8 codes.
    """
    mags = _MAGNITUDES[ty]
    sign = 1 << (CODE_BITS[ty] - 1)
    a = np.minimum(np.abs(f.astype(np.float64)), mags[-1])
    nan = np.isnan(f)
    a = np.where(nan, 0.0, a)
    lo = np.searchsorted(mags, a, side="right") - 1
    hi = np.minimum(lo + 1, len(mags) - 1)
    gap = np.where(hi > lo, mags[hi] - mags[lo], 1.0)
    frac = (a - mags[lo]) / gap  # exact: the gap is a power of two
    if rnd == "rs":
        up = frac + rbits.astype(np.float64) / (1 << nbits) >= 1.0
    elif rnd == "rn":
        up = (frac > 0.5) | ((frac == 0.5) & (lo % 2 == 1))
    else:
        raise UnsupportedError(f"rounding .{rnd} to {ty}")
    code = np.where(up, hi, lo) | np.where(np.signbit(f), sign, 0)
    return np.where(nan, 0x7F if sign == 128 else sign - 1, code).astype(np.uint8)


@np.errstate(all="ignore")
def encode_ue8m0(f, rnd, satfinite=True):
    """Round magnitudes to a power of two, toward zero (``rz``) or up (``rp``); the sign is ignored, NaN gives 255.

    Below 2**-127 the result is code 0. Overflow (including infinity) gives 254 with ``satfinite`` and 255 without.
    """
    u = np.abs(np.ascontiguousarray(f, np.float32)).view(np.uint32)
    e = (u >> np.uint32(23)).astype(np.int64)
    m = u & np.uint32(0x7FFFFF)
    if rnd == "rp":
        # code 0 is 2**-127, itself a float32 subnormal (mantissa 0x400000)
        e = e + np.where(e == 0, m > 0x400000, m != 0)
    elif rnd != "rz":
        raise UnsupportedError(f"rounding .{rnd} to ue8m0")
    code = np.where(e > 254, 254 if satfinite else 255, e)
    return np.where(np.isnan(f), 255, code).astype(np.uint8)


# ---- bf16 and tf32 --------------------------------------------------------------------------------------------------
def bf16_to_f32(u16):
    """uint16 bf16 patterns as float32 values."""
    return (u16.astype(np.uint32) << np.uint32(16)).view(np.float32)


@np.errstate(all="ignore")
def _odd_f32_bits(x):
    """float64 rounded to odd in float32 (exact results unchanged), as raw bits: a second rounding to fewer bits is
    then exact in every mode, because the last bit stays as a sticky bit."""
    y = x.astype(np.float32)
    inexact = (y.astype(np.float64) != x) & ~np.isnan(x)
    if not inexact.any():
        return y.view(np.uint32)
    away = inexact & (np.abs(y.astype(np.float64)) > np.abs(x))
    u = y.view(np.uint32) - away.astype(np.uint32)  # magnitudes are ordered like their bits
    return u | inexact.astype(np.uint32)


def round_bits(u, drop, rnd, rbits=None):
    """Round float32 patterns to a multiple of ``2**drop`` of their last bit, returned shifted right by ``drop``.

    ``rnd``: rn, rz, rm, rp, rna (nearest, ties away) or rs, with ``rbits`` random bits of width ``drop``.
    """
    neg = (u >> np.uint32(31)).astype(bool)
    rest = u & np.uint32((1 << drop) - 1)
    r = u >> np.uint32(drop)
    half = np.uint32(1 << (drop - 1))
    if rnd == "rn":
        up = (rest > half) | ((rest == half) & ((r & np.uint32(1)) == 1))
    elif rnd == "rz":
        return r
    elif rnd == "rna":
        up = rest >= half
    elif rnd == "rm":
        up = (rest != 0) & neg
    elif rnd == "rp":
        up = (rest != 0) & ~neg
    elif rnd == "rs":
        up = rest.astype(np.uint64) + rbits.astype(np.uint64) >= np.uint64(1 << drop)
    else:
        raise UnsupportedError(f"rounding .{rnd}")
    return r + up.astype(np.uint32)


def f32_to_bf16(f, rnd="rn", rbits=None):
    """Float values (float32 or float64, rounded once) to uint16 bf16 patterns; NaN becomes 0x7fff."""
    u = f.view(np.uint32) if f.dtype == np.float32 else _odd_f32_bits(f)
    return np.where(np.isnan(f), 0x7FFF, round_bits(u, 16, rnd, rbits)).astype(np.uint16)


def f32_to_tf32(f, rnd, satfinite=False):
    """float32 values to tf32: float32 patterns whose low 13 bits are zero."""
    u = np.ascontiguousarray(f, np.float32).view(np.uint32)
    special = ~np.isfinite(f)
    r = np.where(special, u, round_bits(np.where(special, 0, u).astype(np.uint32), 13, rnd) << np.uint32(13))
    if satfinite:
        r = np.where((r & np.uint32(0x7FFFFFFF)) >= 0x7F800000, (r & np.uint32(0x80000000)) | np.uint32(0x7F7FE000), r)
    # measured: to nearest away shortens a NaN, the other directions the canonical one
    nan = u & np.uint32(0xFFFFE000) if rnd == "rna" else np.uint32(0x7FFFE000)
    return np.where(np.isnan(f), nan, r).astype(np.uint32)


@np.errstate(all="ignore")
def stochastic_f16(f, rbits):
    """float32 values to f16 patterns, rounded up in magnitude when the discarded fraction plus ``rbits / 2**13``
    reaches one unit of the result; ``rbits``: 13-bit integers."""
    a = np.abs(f.astype(np.float64))
    exponent = np.frexp(np.where(np.isfinite(a), a, 1.0))[1] - 1
    scale = 2.0 ** (np.clip(exponent, -14, 15) - 10)  # one unit of the result; 2**-24 below the normal range
    steps = np.floor(np.where(np.isfinite(a), a, 0) / scale + rbits.astype(np.float64) / (1 << 13))
    r = (steps * scale).astype(np.float16)
    r = np.where(np.isinf(f), np.float16(np.inf), r)
    u = r.astype(np.float16).view(np.uint16) | np.where(np.signbit(f), 0x8000, 0).astype(np.uint16)
    return np.where(np.isnan(f), 0x7FFF, u).astype(np.uint16)


# ---- float64 with a sticky last bit ---------------------------------------------------------------------------------
@np.errstate(all="ignore")
def odd_sum(s, z):
    """``s + z`` of float64 arrays rounded to odd, so that one more rounding to at most 51 bits is exact.

    Formula: Knuth's TwoSum gives the error of the nearest sum; an inexact even result moves one unit toward it.
    """
    t = s + z
    b = t - s
    err = (s - (t - b)) + (z - b)
    fix = (err != 0) & np.isfinite(t) & np.isfinite(err)
    if not fix.any():
        return t
    u = t.view(np.uint64)
    even = (u & np.uint64(1)) == 0
    toward = np.where((err > 0) == (t > 0), np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF))
    moved = (u + toward).view(np.float64)
    return np.where(fix & even, moved, t)
