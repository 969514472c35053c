"""Integer, bit and atomic instructions against their definitions on Python integers."""

import random

import numpy as np
import pytest

from cute_emulator import numerics as N
from cute_emulator.errors import UnsupportedError

M8 = 0xFF
M = {16: (1 << 16) - 1, 32: (1 << 32) - 1, 64: (1 << 64) - 1}
EDGES = {b: [0, 1, 2, 7, 31, 32, 33, (1 << b - 1) - 1, 1 << b - 1, (1 << b) - 2, (1 << b) - 1] for b in (16, 32, 64)}


def signed(x, bits):
    return x - (1 << bits) if x >> (bits - 1) else x


def columns(bits, n, seed=0):
    rng = random.Random(seed)
    pick = EDGES[bits]
    return [[rng.choice(pick) if rng.random() < 0.5 else rng.randrange(1 << bits) for _ in range(32)] for _ in range(n)]


def as_array(col, bits):
    return np.array(col, {16: np.uint16, 32: np.uint32, 64: np.uint64}[bits])


def check(fn, want, bits, n, *, result_bits=None):
    """``fn`` on vectors, on uniform values, and with a mixture, against ``want`` lane by lane."""
    for seed in range(8):
        cols = columns(bits, n, seed)
        expect = [want(*row) for row in zip(*cols, strict=True)]
        vector = fn(*[as_array(c, bits) for c in cols])
        assert [int(x) for x in vector] == expect
        assert [fn(*row) for row in zip(*cols, strict=True)] == expect
        if n > 1:
            mixed = fn(as_array(cols[0], bits), *[c[0] for c in cols[1:]])
            lanes = [mixed] * 32 if isinstance(mixed, int) else [int(x) for x in mixed]
            assert lanes == [want(x, *[c[0] for c in cols[1:]]) for x in cols[0]]
        assert vector.dtype.itemsize * 8 >= min(result_bits or bits, 64)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts(bits):
    check(lambda a, n: N.shl(a, n, bits), lambda a, n: a << n & M[bits] if n < bits else 0, bits, 2)
    check(lambda a, n: N.shru(a, n, bits), lambda a, n: a >> min(n, bits), bits, 2)
    check(lambda a, n: N.shrs(a, n, bits), lambda a, n: signed(a, bits) >> min(n, bits) & M[bits], bits, 2)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("wrap", [True, False])
def test_funnel_shift(left, wrap):
    def want(a, b, c):
        n = c % 32 if wrap else min(c, 32)
        v = b << 32 | a
        return (v << n >> 32 if left else v >> n) & M[32]

    check(lambda a, b, c: N.shf(a, b, c, left, wrap), want, 32, 3)


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_multiply_and_extremes(bits, is_signed):
    v = (lambda x: signed(x, bits)) if is_signed else (lambda x: x)
    check(lambda a, b: N.mulhi(a, b, bits, is_signed), lambda a, b: v(a) * v(b) >> bits & M[bits], bits, 2)
    if bits < 64:
        check(lambda a, b: N.mulwide(a, b, bits, is_signed), lambda a, b: v(a) * v(b) & M[2 * bits], bits, 2)
    for name, pick in (("max", max), ("min", min)):
        check(
            lambda a, b, name=name: N.iminmax(a, b, bits, is_signed, name == "max"),
            lambda a, b, pick=pick: pick(v(a), v(b)) & M[bits],
            bits,
            2,
        )


@pytest.mark.parametrize("is_signed", [True, False])
def test_division(is_signed):
    def want(a, b, rem):
        if b == 0:
            return M[32]
        x, y = (signed(a, 32), signed(b, 32)) if is_signed else (a, b)
        q = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        return (x - q * y if rem else q) & M[32]

    for rem in (False, True):
        check(lambda a, b, rem=rem: N.idiv(a, b, 32, is_signed, rem), lambda a, b, rem=rem: want(a, b, rem), 32, 2)


def test_saturating_add():
    def clamp(v):
        return min(max(v, -(1 << 31)), (1 << 31) - 1) & M[32]

    check(lambda a, b: N.addsat(a, b, False), lambda a, b: clamp(signed(a, 32) + signed(b, 32)), 32, 2)
    check(lambda a, b: N.addsat(a, b, True), lambda a, b: clamp(signed(a, 32) - signed(b, 32)), 32, 2)


def permuted(a, b, selector):
    data = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
    out = []
    for i in range(4):
        s = selector >> 4 * i & 15
        byte = data[s & 7]
        out.append((0xFF if byte & 0x80 else 0) if s & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def test_byte_permute():
    check(N.prmt, lambda a, b, c: permuted(a, b, c & 0xFFFF), 32, 3)


@pytest.mark.parametrize("mode", ["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"])
def test_byte_permute_modes(mode):
    data = list(range(0x10, 0x18))  # byte i of the pair
    a, b = int.from_bytes(bytes(data[:4]), "little"), int.from_bytes(bytes(data[4:]), "little")
    for s in range(4):
        got = [x - 0x10 for x in N.prmt(a, b, s, mode).to_bytes(4, "little")]
        want = {
            "f4e": [s, s + 1, s + 2, s + 3],
            "b4e": [(s - i) % 8 for i in range(4)],
            "rc8": [s] * 4,
            "ecl": [max(i, s) for i in range(4)],
            "ecr": [min(i, s) for i in range(4)],
            "rc16": [2 * (s % 2) + i % 2 for i in range(4)],
        }[mode]
        assert got == want, s


def parts(x, bits, is_signed):
    fields = [x >> i & M8 if bits == 8 else x >> i & M[16] for i in range(0, 32, bits)]
    return [f - (1 << bits) if is_signed and f >> (bits - 1) else f for f in fields]


@pytest.mark.parametrize("signed_a", [True, False])
@pytest.mark.parametrize("signed_b", [True, False])
def test_dot_products_of_packed_integers(signed_a, signed_b):
    def four(a, b, c):
        return sum(x * y for x, y in zip(parts(a, 8, signed_a), parts(b, 8, signed_b), strict=True)) + c & M[32]

    check(lambda a, b, c: N.dp4a(a, b, c, signed_a, signed_b), four, 32, 3)
    for high in (False, True):

        def two(a, b, c, high=high):
            pair = parts(b, 8, signed_b)[2 * high : 2 * high + 2]
            return sum(x * y for x, y in zip(parts(a, 16, signed_a), pair, strict=True)) + c & M[32]

        check(lambda a, b, c, high=high: N.dp2a(a, b, c, signed_a, signed_b, high), two, 32, 3)


def test_three_input_logic():
    for lut in (0x00, 0x80, 0x96, 0xE8, 0xFE, 0x1D, 0xFF):

        def want(a, b, c, lut=lut):
            bits = [(lut >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32)]
            return sum(bits)

        check(lambda a, b, c, lut=lut: N.lop3(a, b, c, lut), want, 32, 3)


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits):
    rng = random.Random(1)
    for _ in range(400):
        a, b = rng.randrange(1 << bits), rng.randrange(1 << bits)
        p, n = (
            rng.choice([0, 1, 5, 31, 32, 63, 64, 200, 255, 256 + 3]),
            rng.choice([0, 1, 8, 31, 32, 63, 64, 255, 256 + 4]),
        )
        pos, length = p & 255, n & 255
        have = max(0, min(length, bits - pos))
        plain = a >> pos & (1 << have) - 1
        assert N.bfe(a, p, n, bits, False) == plain
        fill = length and a >> min(pos + length - 1, bits - 1) & 1
        assert N.bfe(a, p, n, bits, True) == (plain | (M[bits] >> have << have) if fill else plain)
        mask = ((1 << length) - 1) << pos & M[bits]
        assert N.bfi(a, b, p, n, bits) == (b & ~mask | a << pos & mask)
    vector = N.bfe(np.arange(32, dtype=np.uint32), 1, 2, 32, False)
    assert vector.tolist() == [x >> 1 & 3 for x in range(32)]


@pytest.mark.parametrize("bits", [32, 64])
def test_counting(bits):
    check(lambda a: N.clz(a, bits), lambda a: bits - a.bit_length(), bits, 1, result_bits=32)
    check(N.popc, lambda a: bin(a).count("1"), bits, 1, result_bits=32)
    check(lambda a: N.brev(a, bits), lambda a: int(bin(a)[2:].zfill(bits)[::-1], 2), bits, 1)

    def top(a, is_signed, shift):
        if is_signed and a >> bits - 1:
            a = a ^ M[bits]
        n = a.bit_length() - 1
        return M[32] if n < 0 else bits - 1 - n if shift else n

    for s in (False, True):
        for amount in (False, True):
            check(
                lambda a, s=s, amount=amount: N.bfind(a, bits, s, amount),
                lambda a, s=s, amount=amount: top(a, s, amount),
                bits,
                1,
                result_bits=32,
            )


def test_select_and_merge():
    mask = np.arange(32) % 3 == 0
    a, b = np.arange(32, dtype=np.uint32), np.arange(100, 132, dtype=np.uint32)
    assert N.selp(mask, a, b, 32).tolist() == [x if x % 3 == 0 else x + 100 for x in range(32)]
    assert N.selp(True, 5, b, 32) == 5
    assert N.merge(mask, 7, 9, 32).tolist() == [7 if x % 3 == 0 else 9 for x in range(32)]
    assert N.merge(mask, 4, 4, 32) == 4
    assert N.mergep(mask, True, False).tolist() == mask.tolist()


@pytest.mark.parametrize("ty", ["u32", "s32", "u64", "s64"])
def test_integer_atomics(ty):
    bits, is_signed = int(ty[1:]), ty[0] == "s"
    v = (lambda x: signed(x, bits)) if is_signed else (lambda x: x)
    for a, b in zip(*columns(bits, 2), strict=True):
        want = {
            "add": a + b & M[bits],
            "min": min(v(a), v(b)) & M[bits],
            "max": max(v(a), v(b)) & M[bits],
            "and": a & b,
            "or": a | b,
            "xor": a ^ b,
            "exch": b,
            "inc": 0 if a >= b else a + 1,
            "dec": b if a == 0 or a > b else a - 1,
        }
        for op, w in want.items():
            if op in ("inc", "dec") and is_signed:
                continue
            assert N.make_atom(op, ty, ())(a, b) == w
        assert N.make_atom("cas", "b" + ty[1:], ())(a, a, b) == b
        assert N.make_atom("cas", "b" + ty[1:], ())(a, a ^ 1, b) == a


def test_float_atomics():
    assert N.make_atom("add", "f32", ())(0x3F800000, 0x3F800000) == 0x40000000
    assert N.make_atom("add", "bf16x2", ("noftz",))(0x3F803F80, 0x3F804000) == 0x40004040
    with pytest.raises(UnsupportedError):
        N.make_atom("and", "f32", ())


@pytest.mark.parametrize("op", ["add", "min", "max", "and", "or", "xor", "inc", "dec"])
def test_integer_reductions_are_atomics(op):
    a, b = columns(32, 2, 5)
    types = ["u32"] if op in ("inc", "dec") else ["u32", "s32"]
    for ty in types:
        got = N.reduce_array(op, ty, as_array(a, 32), as_array(b, 32))
        assert got.tolist() == [N.make_atom(op, ty, ())(x, y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize(("ty", "dtype"), [("f16", np.uint16), ("bf16", np.uint16), ("f32", np.uint32)])
def test_float_reductions_are_scalar_operations(ty, dtype):
    rng = np.random.default_rng(0)
    a, b = (
        rng.integers(0, 1 << 16, 4096).astype(np.uint16).astype(dtype) << dtype(16 * (ty == "f32")) for _ in range(2)
    )
    for op in ("add",) if ty == "f32" else ("add", "min", "max"):
        want = N.make_fop(op, ty, ("rn",) if op == "add" else ())(a, b)
        assert np.array_equal(N.reduce_array(op, ty, a, b), want)
    with pytest.raises(UnsupportedError):
        N.reduce_array("xor", ty, a, b)


def test_warp_reductions():
    value = np.array([(x * 2654435761) & M[32] for x in range(32)], np.uint32)
    mask = np.arange(32) % 5 < 3
    live = [int(x) for x in value[mask]]
    assert N.redux("add", value, mask, "u32") == sum(live) & M[32]
    assert N.redux("max", value, mask, "u32") == max(live)
    assert N.redux("min", value, mask, "s32") == min(signed(x, 32) for x in live) & M[32]
    acc = live[0]
    for x in live[1:]:
        acc ^= x
    assert N.redux("xor", value, mask, "b32") == acc
    floats = np.arange(-16, 16, dtype=np.float32).view(np.uint32)
    everyone = np.ones(32, bool)
    assert N.redux("max", floats, everyone, "f32") == int(np.float32(15).view(np.uint32))
    assert N.redux("max", floats, everyone, "f32", ("abs",)) == int(np.float32(16).view(np.uint32))
    assert N.redux("add", 3, mask, "s32") == 3 * int(mask.sum())
