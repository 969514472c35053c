"""``tcgen05.mma`` on hand-placed operands: one test per descriptor layout, number format and accumulator.

Results are compared with a float64 product of integer-valued operands, so equality is exact.
"""

import numpy as np
import pytest

from cute_emulator import mma
from cute_emulator.errors import EmulatorError, UnsupportedError

from . import reference as ref
from .operands import SIZES, Cta, codes_for, desc100, place

A_CODE = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "i8": {"u8": 0, "s8": 1},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "mxf4": {"e2m1": 1},
}
A_CODE["mxf8f6f4"], A_CODE["mxf4nvf4"] = A_CODE["f8f6f4"], A_CODE["mxf4"]
ACC_CODE = {"f16": 0, "f32": 1, "s32": 2}


def idesc(kind, m, n, a, b, acc="f32", a_mn=False, b_mn=False, neg_a=False, neg_b=False, saturate=False):
    return (
        saturate << 3
        | (0 if kind.startswith("mx") else ACC_CODE[acc]) << 4
        | A_CODE[kind][a] << 7
        | A_CODE[kind][b] << 10
        | neg_a << 13
        | neg_b << 14
        | a_mn << 15
        | b_mn << 16
        | n // 8 << 17
        | m // 16 << 24
    )


def accumulators(cta, lanes, col, n, acc):
    raw = cta.tmem[lanes][:, col : col + n]
    if acc == "f16":
        return (raw & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    return np.ascontiguousarray(raw).view(np.int32 if acc == "s32" else np.float32).astype(np.float64)


def dense(kind, a_fmt, b_fmt, m, n, k, a_span, b_span, acc="f32", a_mn=False, b_mn=False, seed=0, **bits):
    """Place operands, run twice (overwrite, then accumulate) and return (cta, product, both results)."""
    rng = np.random.default_rng(seed)
    cta = Cta()
    ac, av = codes_for(rng, a_fmt, (m, k))
    bc, bv = codes_for(rng, b_fmt, (n, k))
    da = desc100(0x4000, *place(cta.smem, 0x4000, ac, a_fmt, a_span, a_mn), a_span)
    db = desc100(0x20000, *place(cta.smem, 0x20000, bc, b_fmt, b_span, b_mn), b_span)
    op = mma.Tcgen05(kind, idesc(kind, m, n, a_fmt, b_fmt, acc, a_mn, b_mn, **bits), 1)
    assert (m, n, k) == (op.M, op.N, op.K)
    lanes = np.arange(128) if m == 128 else np.array([r // 16 * 32 + r % 16 for r in range(64)])
    results = []
    for enable in (False, True):
        op.run([cta], 32, da, False, db, enable, None, 0)
        results.append(accumulators(cta, lanes, 32, n, acc))
    assert cta.written[:, 32 : 32 + n].any(axis=1).sum() == m
    assert not cta.written[:, :32].any()
    return av @ bv.T, results


@pytest.mark.parametrize("b_mn", [False, True])
@pytest.mark.parametrize("a_mn", [False, True])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_every_descriptor_layout(span, a_mn, b_mn):
    want, (first, second) = dense("f16", "bf16", "f16", 128, 64, 16, span, span, a_mn=a_mn, b_mn=b_mn)
    assert np.array_equal(first, want)
    assert np.array_equal(second, 2 * want)


@pytest.mark.parametrize("span", [32, 128])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "s8", "u8"])
def test_byte_formats_in_both_majors(fmt, span):
    kind, acc = ("i8", "s32") if fmt in ("s8", "u8") else ("f8f6f4", "f32")
    for mn in (False, True):
        want, (first, second) = dense(kind, fmt, fmt, 64, 128, 32, span, span, acc, a_mn=mn, b_mn=mn)
        assert np.array_equal(first, want)
        assert np.array_equal(second, 2 * want)


@pytest.mark.parametrize("b_fmt", ["e4m3", "e2m3", "e3m2", "e2m1"])
@pytest.mark.parametrize("a_fmt", ["e5m2", "e2m3", "e3m2", "e2m1"])
def test_mixed_eight_six_four_bits(a_fmt, b_fmt):
    want, (first, _) = dense("f8f6f4", a_fmt, b_fmt, 64, 16, 32, 128, 32)
    assert np.array_equal(first, want)


def test_tf32_drops_low_bits():
    want, (first, _) = dense("tf32", "tf32", "tf32", 128, 16, 8, 64, 128)
    assert np.array_equal(first, want)
    cta = Cta()
    ones = np.full((128, 8), 0x3F801FFF)  # 1 + (2^13 - 1) * 2^-23: read as 1
    da = desc100(0x4000, *place(cta.smem, 0x4000, ones, "tf32", 32), 32)
    db = desc100(0x8000, *place(cta.smem, 0x8000, ones[:16], "tf32", 32), 32)
    mma.Tcgen05("tf32", idesc("tf32", 128, 16, "tf32", "tf32"), 1).run([cta], 0, da, False, db, False, None, 0)
    assert np.array_equal(accumulators(cta, np.arange(128), 0, 16, "f32"), np.full((128, 16), 8.0))


@pytest.mark.parametrize("kind", ["f16", "f8f6f4"])
def test_f16_accumulators(kind):
    fmt, k = ("f16", 16) if kind == "f16" else ("e4m3", 32)
    want, (first, second) = dense(kind, fmt, fmt, 128, 32, k, 128, 128, "f16")
    once = want.astype(np.float16).astype(np.float64)
    assert np.array_equal(first, once)
    assert np.array_equal(second, (once + want).astype(np.float16).astype(np.float64))


def test_negation_and_input_scale():
    want, (first, _) = dense("f16", "f16", "f16", 128, 16, 16, 32, 32, neg_a=True)
    assert np.array_equal(first, -want)
    want, (first, _) = dense("f16", "f16", "f16", 128, 16, 16, 32, 32, neg_a=True, neg_b=True)
    assert np.array_equal(first, want)
    cta = Cta()
    cta.tmem[:, :16] = np.float32(8).view(np.uint32)
    zero = desc100(0x4000, 16, 256, 32)
    mma.Tcgen05("f16", idesc("f16", 128, 16, "f16", "f16"), 1).run([cta], 0, zero, False, zero, True, None, 3)
    assert np.array_equal(accumulators(cta, np.arange(128), 0, 16, "f32"), np.ones((128, 16)))


def test_integer_saturation():
    for saturate, want in ((True, 2**31 - 1), (False, -(2**31) + 31)):
        cta = Cta()
        cta.tmem[:, :16] = 2**31 - 1
        ones = np.ones((128, 32), int)
        da = desc100(0x4000, *place(cta.smem, 0x4000, ones, "s8", 32), 32)
        word = idesc("i8", 128, 16, "s8", "s8", "s32", saturate=saturate)
        mma.Tcgen05("i8", word, 1).run([cta], 0, da, False, da, True, None, 0)
        assert np.array_equal(accumulators(cta, np.arange(128), 0, 16, "s32"), np.full((128, 16), want))


def test_second_accumulator_of_64_rows():
    cta = Cta()
    one = np.full((64, 16), 0x3F80)
    da = desc100(0x4000, *place(cta.smem, 0x4000, one, "bf16", 32), 32)
    op = mma.Tcgen05("f16", idesc("f16", 64, 8, "bf16", "bf16"), 1)
    op.run([cta], 16 << 16, da, False, da, False, None, 0)
    assert np.array_equal(
        np.flatnonzero(cta.written.any(axis=1)), [x for q in range(4) for x in range(32 * q + 16, 32 * q + 32)]
    )


def test_disabled_lanes_keep_their_accumulators():
    cta = Cta()
    one = np.full((128, 16), 0x3F80)
    da = desc100(0x4000, *place(cta.smem, 0x4000, one, "bf16", 32), 32)
    op = mma.Tcgen05("f16", idesc("f16", 128, 16, "bf16", "bf16"), 1)
    op.run([cta], 0, da, False, da, False, [0x1, 0, 0, 0x80000000], 0)
    assert (cta.tmem[[0, 127], :16] == 0xDEADBEEF).all()
    assert np.array_equal(accumulators(cta, np.arange(1, 127), 0, 16, "f32"), np.full((126, 16), 16.0))


def test_operand_a_in_tensor_memory():
    rng = np.random.default_rng(0)
    for kind, fmt, k in (("f16", "bf16", 16), ("f8f6f4", "e4m3", 32), ("tf32", "tf32", 8)):
        cta = Cta()
        ac, av = codes_for(rng, fmt, (128, k))
        bc, bv = codes_for(rng, fmt, (32, k))
        db = desc100(0x4000, *place(cta.smem, 0x4000, bc, fmt, 32), 32)
        dt = {16: np.uint16, 8: np.uint8, 32: np.uint32}[SIZES[fmt]]
        cta.tmem[:, 100:108] = np.ascontiguousarray(ac.astype(dt)).view(np.uint32)
        mma.Tcgen05(kind, idesc(kind, 128, 32, fmt, fmt), 1).run([cta], 0, 100, True, db, False, None, 0)
        assert np.array_equal(accumulators(cta, np.arange(128), 0, 32, "f32"), av @ bv.T)


@pytest.mark.parametrize("m", [128, 256])
def test_pair_of_ctas(m):
    """Each CTA holds its rows of A and its half of the rows of B; 64 rows per CTA use all lanes for two halves of N."""
    rng = np.random.default_rng(1)
    n, rows = 64, m // 2
    ac, av = codes_for(rng, "bf16", (m, 16))
    bc, bv = codes_for(rng, "bf16", (n, 16))
    pair = [Cta(), Cta()]
    for i, c in enumerate(pair):
        la = place(c.smem, 0x4000, ac[rows * i : rows * (i + 1)], "bf16", 32)
        lb = place(c.smem, 0x8000, bc[n // 2 * i : n // 2 * (i + 1)], "bf16", 32)
    op = mma.Tcgen05("f16", idesc("f16", m, n, "bf16", "bf16"), 2)
    op.run(pair, 0, desc100(0x4000, *la, 32), False, desc100(0x8000, *lb, 32), False, None, 0)
    want = av @ bv.T
    for i, c in enumerate(pair):
        mine = want[rows * i : rows * (i + 1)]
        if m == 128:
            mine = np.concatenate([mine[:, :32], mine[:, 32:]])
        assert np.array_equal(accumulators(c, np.arange(128), 0, mine.shape[1], "f32"), mine)


# ---- block scales ---------------------------------------------------------------------------------------------------
def put_scales(cta, col, codes, quadrant):
    """Scale bytes ``codes[row, 4]`` into one 32-lane quadrant of tensor memory: row r in lane r%32, column r/32."""
    for r, row in enumerate(codes):
        cta.tmem[32 * quadrant + r % 32, col + r // 32] = int.from_bytes(bytes(int(x) for x in row), "little")


SCALED = [
    ("mxf8f6f4", "e4m3", "e5m2", "ue8m0", "", 1, 32),
    ("mxf8f6f4", "e2m1", "e3m2", "ue8m0", "block32", 1, 32),
    ("mxf4", "e2m1", "e2m1", "ue8m0", "scale_vec::2X", 2, 64),
    ("mxf4nvf4", "e2m1", "e2m1", "ue4m3", "scale_vec::4X", 4, 64),
    ("mxf4nvf4", "e2m1", "e2m1", "ue8m0", "block32", 2, 64),
]


@pytest.mark.parametrize(("kind", "a_fmt", "b_fmt", "sf", "vec", "factors", "k"), SCALED)
def test_block_scaled(kind, a_fmt, b_fmt, sf, vec, factors, k):
    rng = np.random.default_rng(2)
    packed, n = k == 64, 72  # N needs not fill its last quadrant of 32
    cta = Cta()
    ac, av = codes_for(rng, a_fmt, (128, k))
    bc, bv = codes_for(rng, b_fmt, (n, k))
    da = desc100(0x4000, *place(cta.smem, 0x4000, ac, a_fmt, 32, packed=packed), 32)
    db = desc100(0x8000, *place(cta.smem, 0x8000, bc, b_fmt, 32, packed=packed), 32)
    pool = np.arange(124, 131) if sf == "ue8m0" else np.array([0x28, 0x30, 0x38, 0x40, 0x3C])
    sa, sb = rng.choice(pool, (128, 4)), rng.choice(pool, (n, 4))
    for q in range(4):
        put_scales(cta, 300, sa, q)
        put_scales(cta, 310, sb, q)
    value = np.vectorize(lambda c: 2.0 ** (int(c) - 127) if sf == "ue8m0" else ref.small_value(int(c), "e4m3"))
    for ids in ((0, 0), (4 - factors, 0)):
        word = idesc(kind, 128, n, a_fmt, b_fmt) | (sf == "ue8m0") << 23 | ids[0] << 29 | ids[1] << 4
        op = mma.Tcgen05(kind, word, 1, vec)
        op.run([cta], 0, da, False, db, False, None, 0, (300, 310))
        fa = value(sa[:, ids[0] : ids[0] + factors]).repeat(k // factors, 1)
        fb = value(sb[:, ids[1] : ids[1] + factors]).repeat(k // factors, 1)
        assert np.array_equal(accumulators(cta, np.arange(128), 0, n, "f32"), (av * fa) @ (bv * fb).T)


@pytest.mark.parametrize("m", [128, 256])
def test_block_scaled_pair(m):
    """Each half of the scales of B is in the quadrants that hold its half of the columns, with 64 rows per CTA."""
    rng = np.random.default_rng(3)
    n, rows, k = 128, m // 2, 32
    ac, av = codes_for(rng, "e4m3", (m, k))
    bc, bv = codes_for(rng, "e4m3", (n, k))
    sa, sb = rng.integers(125, 130, (m, 4)), rng.integers(125, 130, (n, 4))
    pair = [Cta(), Cta()]
    for i, c in enumerate(pair):
        la = place(c.smem, 0x4000, ac[rows * i : rows * (i + 1)], "e4m3", 32)
        lb = place(c.smem, 0x8000, bc[n // 2 * i : n // 2 * (i + 1)], "e4m3", 32)
        mine = sa[rows * i : rows * (i + 1)]
        for q in range(4):
            put_scales(c, 300, mine, q)
            put_scales(c, 310, sb if m == 256 else sb[64 * (q // 2) : 64 * (q // 2) + 64], q)
    op = mma.Tcgen05("mxf8f6f4", idesc("mxf8f6f4", m, n, "e4m3", "e4m3") | 1 << 23, 2, "")
    op.run(pair, 0, desc100(0x4000, *la, 32), False, desc100(0x8000, *lb, 32), False, None, 0, (300, 310))
    want = (av * 2.0 ** (sa[:, :1] - 127)) @ (bv * 2.0 ** (sb[:, :1] - 127)).T
    for i, c in enumerate(pair):
        mine = want[rows * i : rows * (i + 1)]
        if m == 128:
            mine = np.concatenate([mine[:, : n // 2], mine[:, n // 2 :]])
        assert np.array_equal(accumulators(c, np.arange(128), 0, mine.shape[1], "f32"), mine)


def test_unreplicated_scales_are_reported():
    cta = Cta()
    cta.tmem[:, 300:320] = 0x7F7F7F7F
    cta.tmem[70, 301] = 0
    zero = desc100(0x4000, 16, 256, 32)
    op = mma.Tcgen05("mxf8f6f4", idesc("mxf8f6f4", 128, 64, "e4m3", "e4m3") | 1 << 23, 1, "")
    with pytest.raises(EmulatorError, match=r"scale factors of A.*quadrant 2, column 301"):
        op.run([cta], 0, zero, False, zero, False, None, 0, (300, 310))


@pytest.mark.parametrize(
    ("kind", "word", "group", "vec"),
    [
        ("f16", 1 << 2, 1, None),  # sparse
        ("f16", idesc("f16", 128, 16, "f16", "f16") | 1 << 3, 1, None),  # saturation of floats
        ("f16", idesc("f16", 128, 24, "f16", "f16"), 1, None),  # N not a multiple of 16
        ("f16", idesc("f16", 64, 32, "f16", "f16"), 2, None),  # M = 64 on a pair
        ("f16", idesc("f16", 256, 32, "f16", "f16"), 1, None),
        ("tf32", idesc("f16", 128, 32, "f16", "f16"), 1, None),
        ("i8", idesc("i8", 128, 32, "s8", "s8", "f32"), 1, None),
        ("mxf4", idesc("mxf4", 128, 32, "e2m1", "e2m1") | 1 << 23, 1, "scale_vec::4X"),
        ("mxf4", idesc("mxf4", 128, 32, "e2m1", "e2m1"), 1, ""),  # ue4m3 scales need mxf4nvf4
        ("mxf4nvf4", idesc("mxf4", 128, 32, "e2m1", "e2m1") | 1 << 31, 1, "block16"),  # K = 96
        ("mxf8f6f4", idesc("mxf8f6f4", 64, 32, "e4m3", "e4m3") | 1 << 23, 1, ""),
        ("mxf8f6f4", idesc("mxf8f6f4", 128, 32, "e4m3", "e4m3") | 1 << 23, 1, None),
    ],
)
def test_illegal_instruction_descriptors(kind, word, group, vec):
    with pytest.raises(UnsupportedError):
        mma.Tcgen05(kind, word, group, vec)


@pytest.mark.parametrize("flip", [1 << 46, 1 << 49, 1 << 52, 1 << 61])
def test_illegal_matrix_descriptors(flip):
    op = mma.Tcgen05("f16", idesc("f16", 128, 16, "f16", "f16"), 1)
    good = desc100(0x4000, 16, 256, 32)
    with pytest.raises(UnsupportedError):
        op.run([Cta()], 0, good ^ flip, False, good, False, None, 0)
