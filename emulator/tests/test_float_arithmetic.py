"""Floating-point instructions against exact rational arithmetic, in every rounding direction."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from cute_emulator.errors import UnsupportedError
from cute_emulator.numerics import fop, make_fop, make_fop_mixed, make_fsetp
from cute_emulator.numerics import testp as float_class

from . import reference as ref

UDT = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0xFFF8000000000000}
MODES = ("rn", "rz", "rm", "rp")


def sign_of(u, ty):
    return u >> ({"f16": 15, "bf16": 15, "f32": 31, "f64": 63}[ty]) & 1


def expected(name, ty, bits, mode):
    """Definition of the result's bits, from the operands' bits."""
    v = [ref.from_bits(u, ty) for u in bits]
    s = [sign_of(u, ty) for u in bits]
    if any(x is None for x in v):
        rank = (1, 2, 0) if name == "fma" else (1, 0)  # of operands that are NaN, on a Hopper device
        first = next(bits[i] for i in rank if v[i] is None)
        return first | 1 << 51 if ty == "f64" else NAN[ty]
    if name == "sub":
        v, s, name = [v[0], -v[1]], [s[0], 1 - s[1]], "add"
    if name == "mul":
        return product(v, s, ty, mode)
    if name == "fma":
        pv, ps = v[:2], s[0] ^ s[1]
        if any(isinstance(x, float) for x in pv):
            if any(x == 0 for x in pv):
                return NAN[ty]
            p = -math.inf if ps else math.inf
        else:
            p = pv[0] * pv[1]
        return total(p, ps, v[2], s[2], ty, mode)
    return total(v[0], s[0], v[1], s[1], ty, mode)


def product(v, s, ty, mode):
    neg = s[0] ^ s[1]
    if any(isinstance(x, float) for x in v):
        if any(x == 0 for x in v):
            return NAN[ty]
        return ref.to_bits(-math.inf if neg else math.inf, ty)
    return ref.to_bits(ref.round_fraction(v[0] * v[1], ty, mode), ty, bool(neg))


def total(x, sx, y, sy, ty, mode):
    if isinstance(x, float) or isinstance(y, float):
        if isinstance(x, float) and isinstance(y, float) and sx != sy:
            return NAN[ty]
        neg = sx if isinstance(x, float) else sy
        return ref.to_bits(-math.inf if neg else math.inf, ty)
    t = x + y
    if t == 0:
        both_zero_same = x == 0 and y == 0 and sx == sy
        return ref.to_bits(Fraction(0), ty, bool(sx) if both_zero_same else mode == "rm")
    return ref.to_bits(ref.round_fraction(t, ty, mode), ty, t < 0)


def run(name, ty, columns, mods):
    args = [np.array(c, UDT[ty]) for c in columns]
    r = make_fop(name, ty, mods)(*args)
    return [int(x) for x in np.atleast_1d(r)]


def compare(name, ty, rows, mode):
    got = run(name, ty, list(zip(*rows, strict=True)), (mode,))
    for bits, g in zip(rows, got, strict=True):
        want = expected(name, ty, bits, mode)
        assert g == want, f"{name}.{mode}.{ty} {[hex(b) for b in bits]}: {g:#x}, exactly {want:#x}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
@pytest.mark.parametrize("ty", ["f32", "f64"])
def test_two_operands_edges(name, ty, mode):
    compare(name, ty, list(itertools.product(ref.edges(ty), repeat=2)), mode)


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
@pytest.mark.parametrize("ty", ["f16", "bf16"])
def test_two_operands_edges_16_bit(name, ty):
    compare(name, ty, list(itertools.product(ref.edges(ty), repeat=2)), "rn")


@pytest.mark.parametrize(("ty", "mode"), [("f16", "rn"), ("bf16", "rn"), *(("f32", m) for m in MODES), ("f64", "rn")])
def test_fma_edges_and_random(ty, mode):
    rng = np.random.default_rng(7)
    edge = ref.edges(ty)
    rows = [tuple(edge[i] for i in rng.integers(0, len(edge), 3)) for _ in range(1500)]
    width = 8 * UDT[ty]().itemsize
    rows += [tuple(int(x) for x in rng.integers(0, 1 << width, 3, dtype=np.uint64)) for _ in range(500)]
    compare("fma", ty, rows, mode)


@pytest.mark.parametrize("mode", MODES)
def test_fma_cancellation(mode):
    """Products next to the addend: where a second rounding (through float64) would be wrong."""
    rng = np.random.default_rng(3)
    rows = []
    for _ in range(1500):
        a, b = (int(x) | 0x3F800000 for x in rng.integers(0, 1 << 23, 2))
        p = ref.from_bits(a, "f32") * ref.from_bits(b, "f32")
        c = ref.to_bits(
            ref.round_fraction(-p if rng.integers(2) else p * ref.pow2(int(rng.integers(-30, 30))), "f32", "rn"), "f32"
        )
        rows.append((a, b, c))
    compare("fma", "f32", rows, mode)


def test_fma_is_not_two_roundings():
    """The classical case: a float64 intermediate of this f32 fma lies exactly on a tie of the result."""
    a, b, c = 0x3F800001, 0x3F800001, 0x25000000  # (1+2^-23)^2 + 2^-53
    assert run("fma", "f32", [[a], [b], [c]], ("rn",)) == [expected("fma", "f32", (a, b, c), "rn")]


def sqrt_fraction(x):
    """sqrt of a positive Fraction with 200 correct bits and a sticky bit, so that every rounding is decided."""
    shift = 400 + 2 * x.denominator.bit_length()
    n = (x.numerator << shift) // x.denominator
    r = math.isqrt(n)
    return Fraction(2 * r + (r * r != n or (x.numerator << shift) % x.denominator != 0), 1 << (shift // 2 + 1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["div", "rcp", "sqrt"])
def test_division_and_roots(name, mode):
    rng = np.random.default_rng(11)
    finite = [u for u in ref.edges("f32") if isinstance(ref.from_bits(u, "f32"), (Fraction, int)) and u & 0x7FFFFFFF]
    pool = finite + [int(x) for x in rng.integers(1, 0x7F800000, 200)]
    n = 2 if name == "div" else 1
    rows = [tuple(pool[i] for i in rng.integers(0, len(pool), n)) for _ in range(1500)]
    if name == "sqrt":
        rows = [r for r in rows if not r[0] >> 31]
    got = run(name, "f32", list(zip(*rows, strict=True)), (mode,))
    for bits, g in zip(rows, got, strict=True):
        v = [Fraction(ref.from_bits(u, "f32")) for u in bits]
        q = v[0] / v[1] if name == "div" else 1 / v[0] if name == "rcp" else sqrt_fraction(v[0])
        assert g == ref.to_bits(ref.round_fraction(q, "f32", mode), "f32", q < 0), [hex(b) for b in bits]


@pytest.mark.parametrize("ty", ["f16x2", "bf16x2", "f32x2"])
@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_packed_is_two_scalars(name, ty):
    el = ty[:-2]
    rng = np.random.default_rng(5)
    n = 3 if name == "fma" else 2
    edge = np.array(ref.edges(el), np.uint64)
    lo, hi = rng.choice(edge, (n, 300)), rng.choice(edge, (n, 300))
    width = np.uint64(32 if el == "f32" else 16)
    packed = [(lo[i] | hi[i] << width).astype(np.uint64 if el == "f32" else np.uint32) for i in range(n)]
    got = make_fop(name, ty, ("rn",))(*packed).astype(np.uint64)
    mask = np.uint64((1 << int(width)) - 1)
    for half, part in ((lo, got & mask), (hi, got >> width)):
        assert run(name, el, [list(map(int, c)) for c in half], ("rn",)) == [int(x) for x in part]


def test_packed_directed_rounding_and_ftz():
    one, tiny = 0x3F800000, 0x00000001
    down = make_fop("add", "f32x2", ("rm", "ftz"))(one | one << 32, 0xA0000000 | tiny << 32)
    assert down == 0x3F7FFFFF | one << 32  # 1 - 2^-63 rounded down; the subnormal flushed


@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_ftz(name):
    tiny, one, zero = 0x00400000, 0x3F800000, 0
    args = {"add": (tiny, zero), "mul": (tiny, one), "fma": (tiny, one, zero)}[name]
    assert make_fop(name, "f32", ("rn",))(*args) == tiny
    assert make_fop(name, "f32", ("rn", "ftz"))(*args) == 0
    neg = tuple(0x80400000 if a == tiny else 0x80000000 if a == zero else a for a in args)
    assert make_fop(name, "f32", ("rn", "ftz"))(*neg) == 0x80000000  # the sign survives
    half_min = make_fop("mul", "f32", ("rn", "ftz"))(0x00800000, 0x3F000000)
    assert half_min == 0  # a subnormal result is flushed too
    # and one that only rounding would make normal: decided before rounding
    just_below = (0x00800000, 0x3F7FFFFF) + (() if name != "fma" else (0,))
    if name != "add":
        assert make_fop(name, "f32", ("rn", "ftz"))(*just_below) == 0
        assert make_fop(name, "f32", ("rn",))(*just_below) == 0x00800000


@pytest.mark.parametrize(
    ("rnd", "args", "expected"),
    [
        ("rn", (0xBFFFFFFF, 0x00800001, 0x00800001), 0x80800000),
        ("rm", (0xBFFFFFFF, 0x00800001, 0x00800001), 0x80800000),
        ("rp", (0xBFFFFFFF, 0x80800001, 0x80800001), 0x00800000),
    ],
)
def test_ftz_decides_on_the_rounded_significand(rnd, args, expected):
    """Exact results of 1 - 2^-46 times the smallest normal: 24 bits round them to it, as an H200 does."""
    assert make_fop("fma", "f32", (rnd, "ftz"))(*args) == expected


def test_saturate_and_relu():
    nan, inf, two, half, minus = 0x7FC00000, 0x7F800000, 0x40000000, 0x3F000000, 0xBF800000
    sat = make_fop("add", "f32", ("rn", "sat"))
    assert [sat(x, 0) for x in (nan, inf, two, half, minus, 0x80000000)] == [0, 0x3F800000, 0x3F800000, half, 0, 0]
    relu = make_fop("fma", "bf16", ("rn", "relu"))
    assert [relu(x, 0x3F80, 0x8000) for x in (0xBF80, 0x3F80, 0x7FC0)] == [0, 0x3F80, 0x7FFF]


def test_min_max():
    nan, one, two, mz = 0x7FC00001, 0x3F800000, 0x40000000, 0x80000000
    mn, mx = make_fop("min", "f32", ()), make_fop("max", "f32", ())
    assert (mn(nan, one), mx(one, nan), mn(nan, nan)) == (one, one, 0x7FFFFFFF)
    assert make_fop("max", "f32", ("NaN",))(one, nan) == 0x7FFFFFFF
    assert (mn(0, mz), mn(mz, 0), mx(0, mz), mx(mz, 0)) == (mz, mz, 0, 0)
    assert make_fop("max", "f32", ())(one, two, nan) == two  # three operands
    assert make_fop("min", "f32", ("xorsign", "abs"))(0xC0000000, one) == 0xBF800000
    assert make_fop("max", "bf16x2", ("NaN",))(0x3F807FC0, 0x40003F80) == 0x40007FFF
    assert make_fop("max", "f32", ("ftz",))(1, mz) == 0


def test_sign_operations():
    assert make_fop("neg", "f32", ())(0x3F800000) == 0xBF800000
    assert make_fop("neg", "f32", ())(0x7F800001) == 0x7FFFFFFF  # a NaN becomes the canonical one
    assert make_fop("abs", "bf16x2", ())(0xFF818001) == 0x7FFF0001
    assert make_fop("neg", "f16x2", ())(0x3C00BC00) == 0xBC003C00
    assert make_fop("abs", "f64", ())(1 << 63) == 0
    assert make_fop("neg", "f32", ("ftz",))(0x00000001) == 0x80000000


def test_double_precision_nan():
    signalling, negative, one = 0x7FF0000000000001, 0xFFF8000000000123, 0x3FF0000000000000
    assert make_fop("add", "f64", ("rn",))(one, signalling) == 0x7FF8000000000001
    assert make_fop("fma", "f64", ("rz",))(one, negative, signalling) == negative
    assert make_fop("fma", "f64", ("rz",))(negative, one, signalling) == 0x7FF8000000000001  # not the first operand
    assert make_fop("min", "f64", ())(negative, signalling) == 0x7FF8000000000001
    assert make_fop("neg", "f64", ())(signalling) == 0x7FF8000000000001
    assert make_fop("abs", "f64", ())(0xFFF0000000000001) == 0xFFF8000000000001
    assert make_fop("div", "f64", ("rn",))(negative, signalling) == negative
    assert make_fop("mul", "f64", ("rn",))(0, 0x7FF0000000000000) == 0xFFF8000000000000  # a NaN made here is negative
    assert make_fop("sub", "f64", ("rm",))(one, negative) == negative


def test_mixed_precision():
    assert make_fop_mixed("fma", "f32", "bf16", ("rn",))(0x3F80, 0x4000, 0x3F800000) == 0x40400000
    assert make_fop_mixed("add", "f32", "f16", ("rn",))(0x3C00, 0x3F800000) == 0x40000000
    with pytest.raises(UnsupportedError, match=r"mul\.rn\.f32\.bf16"):
        make_fop_mixed("mul", "f32", "bf16", ("rn",))


@pytest.mark.parametrize(
    "cmp", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
)
@pytest.mark.parametrize("ty", ["f32", "bf16", "f16", "f64"])
def test_comparisons(cmp, ty):
    rows = list(itertools.product(ref.edges(ty), repeat=2))
    got = make_fsetp(cmp, ty, ())(*[np.array(c, UDT[ty]) for c in zip(*rows, strict=True)])
    for (a, b), g in zip(rows, got, strict=True):
        x, y = ref.from_bits(a, ty), ref.from_bits(b, ty)
        if x is None or y is None:
            want = cmp == "nan" or (cmp != "num" and cmp.endswith("u"))
        elif cmp in ("num", "nan"):
            want = cmp == "num"
        else:
            want = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[cmp[:2]]
        assert bool(g) == want, (cmp, hex(a), hex(b))


def test_comparison_ftz():
    assert make_fsetp("eq", "f32", ("ftz",))(1, 0) is True
    assert make_fsetp("eq", "f32", ())(1, 0) is False


@pytest.mark.parametrize("name", ["ex2", "lg2", "rsqrt", "sin", "cos", "tanh"])
def test_approximate_functions_are_within_half_an_ulp_of_double(name):
    x = np.linspace(0.01, 3, 999).astype(np.float32)
    f = {
        "ex2": np.exp2,
        "lg2": np.log2,
        "rsqrt": lambda v: 1 / np.sqrt(v),
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
    }
    got = make_fop(name, "f32", ("approx",))(x.view(np.uint32)).view(np.float32)
    assert np.array_equal(got, f[name](x.astype(np.float64)).astype(np.float32))


def test_testp():
    values = {"normal": 0x3F800000, "subnormal": 1, "infinite": 0x7F800000, "notanumber": 0x7FC00000}
    for what, u in values.items():
        assert [float_class(w, "f32", u) for w in values] == [w == what for w in values]
    assert [float_class("finite", "f32", u) for u in values.values()] == [True, True, False, False]
    assert [float_class("number", "f32", u) for u in values.values()] == [True, True, True, False]


@pytest.mark.parametrize(
    ("name", "ty", "mods"),
    [
        ("fma", "f32", ("rn", "oob")),
        ("div", "bf16", ()),
        ("add", "bf16", ("rz",)),
        ("foo", "f32", ()),
        ("add", "f8", ()),
    ],
)
def test_unknown_is_refused(name, ty, mods):
    with pytest.raises(UnsupportedError):
        make_fop(name, ty, mods)


def test_uniform_and_vector_values_agree():
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 1 << 32, 32, dtype=np.uint64).astype(np.uint32) for _ in range(2))
    vector = fop("add", "f32", (a, b))
    assert [fop("add", "f32", (int(x), int(y))) for x, y in zip(a, b, strict=True)] == [int(v) for v in vector]
