"""Tensor-core instructions on hand-placed operands: one test per descriptor layout, number format and accumulator.

Operands are put into a fake CTA's memory element by element, from the byte address of an element; results are compared
with a float64 product of integer-valued operands, so equality is exact.
"""

import numpy as np
import pytest

from tests.emulator import reference as ref
from tgl.testing.emulator import mma
from tgl.testing.emulator.errors import EmulatorError, MemoryAccessError, UnsupportedError

SM100_LAYOUT = {0: 0, 32: 6, 64: 4, 128: 2}
SM90_LAYOUT = {0: 0, 32: 3, 64: 2, 128: 1}


class Cta:
    """Shared and tensor memory without checks: what the tensor-core functions need of a CTA."""

    id, rank = (0, 0, 0), 0

    def __init__(self):
        self.smem = np.zeros(1 << 18, np.uint8)
        self.tmem = np.full((128, 512), 0xDEADBEEF, np.uint32)
        self.written = np.zeros((128, 512), bool)

    def alive(self, what):
        pass

    def read_chunks(self, idx, what):
        return self.smem.reshape(-1, 16)[idx]

    def tmem_read(self, rows, cols, what):
        return self.tmem[rows][:, cols]

    def tmem_write(self, rows, cols, values, what):
        r = np.arange(128)[rows] if isinstance(rows, slice) else rows
        c = np.arange(512)[cols] if isinstance(cols, slice) else cols
        self.tmem[np.ix_(r, c)] = values
        self.written[np.ix_(r, c)] = True

    def tmem_read_at(self, lanes, cols, what):
        return self.tmem[lanes, cols]

    def tmem_write_at(self, lanes, cols, values, what):
        self.tmem[lanes, cols] = values


class Warp:
    def __init__(self, cta, wid):
        self.cta, self.wid = cta, wid

    def one_lane(self, m, *vals):
        return list(vals)


# ---- formats --------------------------------------------------------------------------------------------------------
SIZES = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}


def codes_for(rng, fmt, shape):
    """Random codes of small integer (or exactly representable) values, and the values."""
    if fmt in ("s8", "u8"):
        v = rng.integers(-8 if fmt == "s8" else 0, 9, shape)
        return v & 0xFF, v.astype(np.float64)
    if fmt in ref.SMALL:
        values = [ref.small_value(c, fmt) for c in range(1 << SIZES[fmt])]
        pool = [c for c, v in enumerate(values) if abs(v) <= 6 and (8 * v).is_integer()]
        codes = rng.choice(pool, shape)
        return codes, np.vectorize(lambda c: ref.small_value(int(c), fmt))(codes)
    v = rng.integers(-4, 5, shape)
    bits = v.astype(np.float32).view(np.uint32)
    if fmt == "f16":
        return v.astype(np.float16).view(np.uint16).astype(np.int64), v.astype(np.float64)
    return (bits >> 16 if fmt == "bf16" else bits).astype(np.int64), v.astype(np.float64)


def put_bits(smem, bit, width, code):
    """Write ``width`` bits at a bit address (low bits first)."""
    for i in range(width):
        byte, pos = divmod(bit + i, 8)
        smem[byte] = int(smem[byte]) & ~(1 << pos) | (int(code) >> i & 1) << pos


def swizzled(addr, span):
    return addr ^ ((addr >> 7) & {0: 0, 32: 1, 64: 3, 128: 7}[span]) << 4


def place(smem, start, codes, fmt, span, mn_major=False, packed=False):
    """Put ``codes[row, k]`` at ``start`` in a canonical layout; returns (leading, stride) byte offsets.

    Unpacked 4- and 6-bit elements: sixteen per 16-byte chunk from its first bit, one "byte" of K each.
    """
    rows, k = codes.shape
    width = SIZES[fmt]
    per_byte = 2 if packed else 1
    ebytes = max(1, width // 8)
    lbo, sbo = 0, 0
    contiguous = (rows if mn_major else k) * ebytes // per_byte
    if not mn_major:
        lbo, sbo = (rows * 16, 128) if span == 0 else (16, 8 * span)
    elif span == 0:
        lbo, sbo = 16 * 8 * (contiguous // 16), 128
    else:
        lbo, sbo = 8 * span * -(-k // 8), 8 * span
    for r in range(rows):
        for kk in range(k):
            along, across = (r, kk) if mn_major else (kk, r)
            byte = along * ebytes // per_byte
            chunk, inner = byte // 16, byte % 16
            if not mn_major:
                if span == 0:
                    off = across % 8 * 16 + across // 8 * sbo + chunk * lbo
                else:
                    off = across % 8 * span + across // 8 * sbo + chunk * 16
            elif span == 0:
                off = chunk * sbo + across % 8 * 16 + across // 8 * lbo
            else:
                off = chunk % (span // 16) * 16 + chunk // (span // 16) * lbo + across % 8 * span + across // 8 * sbo
            addr = swizzled(start + off, span)
            if fmt in ("e2m1", "e2m3", "e3m2") and not packed:
                put_bits(smem, addr * 8 + inner * width, width, codes[r, kk])
            elif packed:
                put_bits(smem, (addr + inner) * 8 + kk % 2 * 4, 4, codes[r, kk])
            else:
                smem[addr + inner : addr + inner + ebytes] = list(int(codes[r, kk]).to_bytes(ebytes, "little"))
    return lbo, sbo


def desc100(start, lbo, sbo, span):
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | SM100_LAYOUT[span] << 61


def desc90(start, lbo, sbo, span):
    return start >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | SM90_LAYOUT[span] << 62


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
    """With 64 rows per CTA, each half of the scales of B is in the quadrants that hold its half of the columns."""
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


# ---- moving tensor memory -------------------------------------------------------------------------------------------
def test_copy_to_tensor_memory():
    """Rows of 16 or 32 bytes, replicated as the multicast form says."""
    forms = {
        ("128x256b", ""): (128, 8, lambda lane: lane),
        ("128x128b", ""): (128, 4, lambda lane: lane),
        ("64x128b", "warpx2::02_13"): (64, 4, lambda lane: lane % 64),
        ("64x128b", "warpx2::01_23"): (64, 4, lambda lane: lane // 64 * 32 + lane % 32),
        ("32x128b", "warpx4"): (32, 4, lambda lane: lane % 32),
    }
    for (shape, multicast), (rows, cols, source) in forms.items():
        cta = Cta()
        data = np.random.default_rng(4).integers(0, 256, (rows, 4 * cols))
        lbo, sbo = place(cta.smem, 0x4000, data, "u8", 0)
        mma.tc_cp([cta], shape, multicast, (), 40, desc100(0x4000, lbo, sbo, 0))
        words = np.ascontiguousarray(data.astype(np.uint8)).view(np.uint32)
        assert np.array_equal(cta.tmem[:, 40 : 40 + cols], words[[source(lane) for lane in range(128)]])
    with pytest.raises(UnsupportedError):
        mma.tc_cp([cta], "4x256b", "", (), 0, desc100(0, 16, 128, 0))
    with pytest.raises(UnsupportedError):
        mma.tc_cp([cta], "128x128b", "", ("b8x16.b4x16_p64",), 0, desc100(0, 16, 128, 0))


def cell_of(shape, reg, thread):
    """(lane, column) of a thread's register, by the tables of the instruction's description."""
    if shape == "32x32b":
        return thread, reg
    if shape == "16x64b":  # two threads per row of 64 bits, rows interleaved by 8
        return 8 * (thread % 2) + thread // 4, 2 * reg + thread // 2 % 2
    if shape == "16x128b":
        return thread // 4 + 8 * (reg % 2), 4 * (reg // 2) + thread % 4
    if shape == "16x256b":
        return thread // 4 + 8 * (reg // 2 % 2), 8 * (reg // 4) + 2 * (thread % 4) + reg % 2
    return None


@pytest.mark.parametrize(("shape", "num"), [("32x32b", 8), ("16x64b", 4), ("16x128b", 2), ("16x256b", 2)])
def test_load_and_store_shapes(shape, num):
    cta = Cta()
    cta.tmem[:] = np.arange(128)[:, None] << 16 | np.arange(512)[None, :]
    registers = {"16x128b": 2, "16x256b": 4}.get(shape, 1) * num
    for wid in range(4):
        got = mma.tc_ld(Warp(cta, wid), shape, num, 32 * wid, 16)
        assert len(got) == registers
        for reg in range(registers):
            for t in range(32):
                lane, col = cell_of(shape, reg, t)
                assert got[reg][t] == (32 * wid + lane) << 16 | (16 + col)
    other = Cta()
    mma.tc_st(Warp(other, 2), shape, num, 64, 16, mma.tc_ld(Warp(cta, 2), shape, num, 64, 16))
    changed = other.tmem != 0xDEADBEEF
    assert np.array_equal(other.tmem[changed], cta.tmem[changed])
    assert changed.sum() == 32 * registers


def test_split_columns_shape():
    cta = Cta()
    cta.tmem[:] = np.arange(128)[:, None] << 16 | np.arange(512)[None, :]
    got = mma.tc_ld(Warp(cta, 1), "16x32bx2", 2, 48, 0, imm=8)
    assert [int(x) for x in got[1]] == [(48 + t % 16) << 16 | (1 + 8 * (t // 16)) for t in range(32)]


def test_packed_halves():
    cta = Cta()
    cta.tmem[:32, :4] = [0xAAAA0001, 0xBBBB0002, 0xCCCC0003, 0xDDDD0004]
    assert [int(r[5]) for r in mma.tc_ld(Warp(cta, 0), "32x32b", 2, 0, 0, pack16=True)] == [0x00020001, 0x00040003]
    mma.tc_st(Warp(cta, 0), "32x32b", 1, 0, 10, (0x12345678,), unpack16=True)
    assert cta.tmem[7, 10:12].tolist() == [0x5678, 0x1234]


def test_lane_quadrant_of_a_warp():
    with pytest.raises(MemoryAccessError, match="warp 1"):
        mma.tc_ld(Warp(Cta(), 1), "32x32b", 1, 0, 0)
    with pytest.raises(MemoryAccessError, match="lane 8"):
        mma.tc_ld(Warp(Cta(), 0), "16x64b", 1, 8, 0)


# ---- wgmma and mma.sync ---------------------------------------------------------------------------------------------
def fragment_cell(reg, thread, per):
    """(row, column) of an accumulator register of m16n8-shaped fragments; ``per``: values per register."""
    if per == 2:
        return thread // 4 + 8 * (reg % 2), 8 * (reg // 2) + 2 * (thread % 4)
    return thread // 4 + 8 * (reg // 2 % 2), 8 * (reg // 4) + 2 * (thread % 4) + reg % 2


def fragment_values(regs, n, dt):
    """Accumulator registers to a matrix, cell by cell."""
    out = np.zeros((16, n))
    for i, r in enumerate(regs):
        for t in range(32):
            row, col = fragment_cell(i, t, 2 if dt == "f16" else 1)
            if dt == "f16":
                out[row, col : col + 2] = np.array([r[t]], np.uint32).view(np.float16)
            else:
                out[row, col] = np.array([r[t]], np.uint32).view(np.int32 if dt == "s32" else np.float32)[0]
    return out


WGMMA = [
    ("bf16", "f32", 16, 128, False, False),
    ("f16", "f32", 16, 64, True, False),
    ("bf16", "f32", 16, 32, False, True),
    ("f16", "f16", 16, 0, True, True),
    ("tf32", "f32", 8, 128, False, False),
    ("e4m3", "f32", 32, 128, False, False),
    ("e5m2", "f16", 32, 64, False, False),
    ("s8", "s32", 32, 32, False, False),
    ("u8", "s32", 32, 0, False, False),
]


@pytest.mark.parametrize(("fmt", "dt", "k", "span", "a_mn", "b_mn"), WGMMA)
def test_wgmma_from_shared_memory(fmt, dt, k, span, a_mn, b_mn):
    rng = np.random.default_rng(5)
    n = 64
    cta = Cta()
    ac, av = codes_for(rng, fmt, (64, k))
    bc, bv = codes_for(rng, fmt, (n, k))
    da = desc90(0x4000, *place(cta.smem, 0x4000, ac, fmt, span, a_mn), span)
    db = desc90(0x8000, *place(cta.smem, 0x8000, bc, fmt, span, b_mn), span)
    want = av @ bv.T
    imm = (1, 1, int(a_mn), int(b_mn)) if fmt in ("bf16", "f16") else () if dt == "s32" else (1, 1)
    mask = np.ones(32, bool)
    for wid in range(4, 8):
        args = (f"m64n{n}k{k}", dt, fmt, fmt)
        first = mma.wgmma(Warp(cta, wid), *args, None, da, False, db, imm, mask)
        second = mma.wgmma(Warp(cta, wid), *args, first, da, False, db, imm, mask)
        mine = want[16 * (wid % 4) : 16 * (wid % 4) + 16]
        rounded = np.float16 if dt == "f16" else np.float64
        once = mine.astype(rounded).astype(np.float64)
        assert np.array_equal(first.astype(np.float64), once)
        assert np.array_equal(second.astype(np.float64), (once + mine).astype(rounded).astype(np.float64))


@pytest.mark.parametrize("dt", ["f32", "f16", "s32"])
def test_accumulator_fragments(dt):
    values = np.arange(16 * 24).reshape(16, 24)
    regs = mma.fragment_out(values.astype({"f32": np.float32, "f16": np.float16, "s32": np.int32}[dt]), dt)
    assert len(regs) == (6 if dt == "f16" else 12)
    assert np.array_equal(fragment_values(regs, 24, dt), values)
    assert np.array_equal(mma.fragment_in(regs, 24, dt), values)


def operand_registers(codes, fmt):
    """A fragment registers of one warp: register 2b+h, thread t: row t/4+8h, K block b, quad t%4."""
    per = 32 // SIZES[fmt]
    rows, k = codes.shape
    halves, blocks = rows // 8, k // (4 * per)
    regs = np.zeros((halves * blocks, 32), np.uint32)
    for b in range(blocks):
        for h in range(halves):
            for t in range(32):
                for e in range(per):
                    code = int(codes[t // 4 + 8 * h, (b * 4 + t % 4) * per + e])
                    regs[halves * b + h, t] |= np.uint32(code << e * SIZES[fmt])
    return tuple(regs)


@pytest.mark.parametrize("fmt", ["bf16", "tf32", "e4m3", "s8"])
def test_wgmma_with_a_in_registers(fmt):
    rng = np.random.default_rng(6)
    k, dt, n = 256 // SIZES[fmt], "s32" if fmt == "s8" else "f32", 16
    cta = Cta()
    ac, av = codes_for(rng, fmt, (16, k))
    bc, bv = codes_for(rng, fmt, (n, k))
    db = desc90(0x8000, *place(cta.smem, 0x8000, bc, fmt, 32), 32)
    imm = (-1, 1, 0) if fmt == "bf16" else () if fmt == "s8" else (0xFFFFFFFF, 1)
    regs = operand_registers(ac, fmt)
    got = mma.wgmma(Warp(cta, 1), f"m64n{n}k{k}", dt, fmt, fmt, None, regs, True, db, imm, np.ones(32, bool))
    assert np.array_equal(got, (av if fmt == "s8" else -av) @ bv.T)


def test_wgmma_refusals():
    w, mask = Warp(Cta(), 0), np.ones(32, bool)
    good = desc90(0x4000, 16, 256, 32)
    with pytest.raises(UnsupportedError, match="base offset"):
        mma.wgmma(w, "m64n8k16", "f32", "bf16", "bf16", None, good, False, good | 1 << 49, (1, 1, 0, 0), mask)
    with pytest.raises(UnsupportedError, match="MN-major"):
        mma.wgmma(w, "m64n8k32", "f32", "e4m3", "e4m3", None, good, False, good, (1, 1, 0, 1), mask)
    with pytest.raises(UnsupportedError, match="f64"):
        mma.wgmma(w, "m64n8k16", "f64", "bf16", "bf16", None, good, False, good, (1, 1, 0, 0), mask)


@pytest.mark.parametrize(
    ("fmt", "dt", "k"),
    [
        ("bf16", "f32", 8),
        ("bf16", "f32", 16),
        ("f16", "f16", 16),
        ("tf32", "f32", 4),
        ("tf32", "f32", 8),
        ("e4m3", "f32", 32),
        ("s8", "s32", 16),
        ("s8", "s32", 32),
    ],
)
def test_mma_sync(fmt, dt, k):
    rng = np.random.default_rng(7)
    ac, av = codes_for(rng, fmt, (16, k))
    bc, bv = codes_for(rng, fmt, (8, k))
    c = rng.integers(-50, 50, (16, 8))
    regs = []
    for i in range(2 if dt == "f16" else 4):
        row = np.zeros(32, np.uint32)
        for t in range(32):
            r, col = fragment_cell(i, t, 2 if dt == "f16" else 1)
            if dt == "f16":
                row[t] = c[r, col : col + 2].astype(np.float16).view(np.uint32)[0]
            else:
                row[t] = c[r, col : col + 1].astype(np.int32 if dt == "s32" else np.float32).view(np.uint32)[0]
        regs.append(row)
    got = mma.mma_sync(
        f"m16n8k{k}", (dt, fmt, fmt, dt), operand_registers(ac, fmt), operand_registers(bc, fmt), tuple(regs)
    )
    assert np.array_equal(fragment_values(got, 8, dt), av @ bv.T + c)


def test_mma_sync_refusals():
    with pytest.raises(UnsupportedError):
        mma.mma_sync("m8n8k4", ("f64", "f64", "f64", "f64"), (0,), (0,), (0, 0))
    with pytest.raises(UnsupportedError):
        mma.mma_sync("m16n8k32", ("f32", "bf16", "bf16", "f32"), (0,) * 4, (0,) * 2, (0,) * 4)
