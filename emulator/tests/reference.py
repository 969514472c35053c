"""Independent definitions that the emulator's arithmetic is tested against: exact rational numbers, no tables."""

import math
from fractions import Fraction

# precision (with the hidden bit), smallest normal exponent, largest exponent
FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
SMALL = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1)}


def pow2(e):
    """2**e as a Fraction."""
    return Fraction(2) ** e


def round_fraction(x, ty, mode):
    """The rational ``x`` rounded to a binary float format: a Fraction, or +-inf on overflow."""
    p, emin, emax = FORMATS[ty]
    if x == 0:
        return x
    a = abs(x)
    e = a.numerator.bit_length() - a.denominator.bit_length()
    if pow2(e) > a:
        e -= 1
    ulp = pow2(max(e, emin) - p + 1)
    n = a / ulp
    lo = n.numerator // n.denominator
    rest = n - lo
    if mode == "rn":
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and lo % 2 == 1)
    else:
        up = rest != 0 and ((mode == "rp" and x > 0) or (mode == "rm" and x < 0))
    r = (lo + up) * ulp
    top = (2 - pow2(1 - p)) * pow2(emax)
    if r > top:
        away = mode == "rn" or (mode == "rp" and x > 0) or (mode == "rm" and x < 0)
        r = math.inf if away else top
    return -r if x < 0 else r


def to_bits(value, ty, negative_zero=False):
    """Bit pattern of an exactly representable Fraction (or infinity)."""
    p, emin, emax = FORMATS[ty]
    width = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}[ty]
    sign = 1 if (value < 0 or negative_zero) else 0
    bias = emax
    if isinstance(value, float):
        return sign << (width - 1) | (2 * emax + 1) << (p - 1)
    a = abs(value)
    if a == 0:
        return sign << (width - 1)
    e = a.numerator.bit_length() - a.denominator.bit_length()
    if pow2(e) > a:
        e -= 1
    e = max(e, emin)
    m = a / pow2(e - p + 1)
    assert m.denominator == 1
    biased = e + bias if m >= 1 << (p - 1) else 0
    return sign << (width - 1) | biased << (p - 1) | (int(m) & ((1 << (p - 1)) - 1))


def from_bits(u, ty):
    """Value of a bit pattern: Fraction, +-inf, or None for NaN."""
    p, emin, emax = FORMATS[ty]
    width = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}[ty]
    sign = -1 if u >> (width - 1) else 1
    e, m = (u >> (p - 1)) & ((1 << (width - p)) - 1), u & ((1 << (p - 1)) - 1)
    if e == 2 * emax + 1:
        return None if m else sign * math.inf
    if e == 0:
        return sign * m * pow2(emin - p + 1)
    return sign * (m + (1 << (p - 1))) * pow2(e - emax - p + 1)


def small_value(code, ty):
    """Value of an FP8/FP6/FP4 code: float; NaN and infinity as in the OCP definitions."""
    ebits, mbits, bias = SMALL[ty]
    sign = -1.0 if code >> (ebits + mbits) & 1 else 1.0
    e, m = code >> mbits & ((1 << ebits) - 1), code & ((1 << mbits) - 1)
    if ty == "e4m3" and e == 15 and m == 7:
        return math.nan
    if ty == "e5m2" and e == 31:
        return sign * math.inf if m == 0 else math.nan
    if e == 0:
        return sign * math.ldexp(m, 1 - bias - mbits)
    return sign * math.ldexp((1 << mbits) + m, e - bias - mbits)


def edges(ty):
    """Bit patterns around every boundary of a float format, both signs, infinities and NaN included."""
    p, _, emax = FORMATS[ty]
    width = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}[ty]
    one = emax << (p - 1)
    inf = (2 * emax + 1) << (p - 1)
    near = [0, 1, 2, 3, (1 << (p - 1)) - 1, 1 << (p - 1), (1 << (p - 1)) + 1]
    near += [
        one - 1,
        one,
        one + 1,
        one + 2,
        one + (1 << (p - 1)) - 1,
        one + (3 << (p - 2)),
        inf - 1,
        inf - 2,
        inf,
        inf + 1,
    ]
    return near + [u | 1 << (width - 1) for u in near]
