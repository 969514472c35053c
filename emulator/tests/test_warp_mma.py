"""``wgmma`` and ``mma.sync`` on hand-placed operands: descriptor layouts, formats, accumulator fragments."""

import numpy as np
import pytest
import torch

from cute_emulator import emulate, mma
from cute_emulator.errors import UnsupportedError

from . import reference as ref
from .hardware import products
from .operands import SIZES, Cta, Warp, codes_for, desc90, place


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


def scale_register(codes, first, lanes):
    """Scales ``[rows, n]`` in bytes ``first`` and on of a register, row r in lane ``lanes[r]``; noise elsewhere."""
    raw = np.random.default_rng(3).integers(0, 120, (32, 4)).astype(np.uint8)
    raw[lanes, first : first + codes.shape[1]] = codes
    return raw.view(np.uint32).reshape(32)


@pytest.mark.parametrize(
    ("kinds", "k", "at", "bt", "st", "per"),
    [
        (("kind::mxf8f6f4", "scale_vec::1X"), 32, "e4m3", "e5m2", "ue8m0", 1),
        (("kind::mxf4nvf4", "scale_vec::4X"), 64, "e2m1", "e2m1", "ue4m3", 4),
        (("kind::mxf4nvf4", "scale_vec::2X"), 64, "e2m1", "e2m1", "ue8m0", 2),
        (("kind::mxf4", "scale_vec::2X"), 64, "e2m1", "e2m1", "ue8m0", 2),
    ],
)
def test_mma_with_block_scales(kinds, k, at, bt, st, per):
    """Every selector: rows of A by pairs of lanes, columns of B by lanes of a quad, bytes of the register."""
    rng = np.random.default_rng(8)
    ac, av = codes_for(rng, at, (16, k))
    bc, bv = codes_for(rng, bt, (8, k))
    low, step = (120, 1) if st == "ue8m0" else (0x30, 8)  # powers of two
    c = np.zeros((16, 8), np.float32)
    for number in range(8):
        (byte_a, byte_b), (thread_a, thread_b) = rng.integers(0, 4 // per, 2) * per, (number % 2, number % 4)
        sa, sb = (low + step * rng.integers(0, 3, (n, per)) for n in (16, 8))
        decode = np.vectorize(lambda x: 2.0 ** (x - 127) if st == "ue8m0" else ref.small_value(int(x), "e4m3"))
        fa, fb = (decode(s).repeat(k // per, axis=1) for s in (sa, sb))
        scales = (
            (scale_register(sa, byte_a, [4 * (r % 8) + 2 * thread_a + r // 8 for r in range(16)]), byte_a, thread_a),
            (scale_register(sb, byte_b, [4 * n + thread_b for n in range(8)]), byte_b, thread_b),
        )
        operands = operand_registers(ac, at), operand_registers(bc, bt), tuple(mma.fragment_out(c, "f32"))
        got = mma.mma_scaled(f"m16n8k{k}", kinds, ("f32", at, bt, "f32", st), *operands, scales)
        assert np.array_equal(fragment_values(got, 8, "f32"), (av * fa) @ (bv * fb).T)


def test_block_scales_that_are_not_a_number():
    """A NaN scale affects the row that it belongs to, and no other."""
    ones = tuple(np.full(32, 0x38383838, np.uint32) for _ in range(6))
    scales = np.full(32, 0x7F7F7F7F, np.uint32), np.full(32, 0x7F7F7F7F, np.uint32)
    scales[0][4 * 3 + 1] = 0x7F7F7FFF  # row 11
    zero = tuple(np.zeros((4, 32), np.uint32))
    kinds, types = ("kind::mxf8f6f4", "scale_vec::1X"), ("f32", "e4m3", "e4m3", "f32", "ue8m0")
    got = mma.mma_scaled("m16n8k32", kinds, types, ones[:4], ones[4:], zero, [(scale, 0, 0) for scale in scales])
    values = fragment_values(got, 8, "f32")
    assert np.isnan(values[11]).all()
    assert (np.delete(values, 11, axis=0) == 32).all()


def test_selectors_of_block_scales_in_registers():
    """Selectors in registers equal immediate ones if all lanes hold the same; otherwise the result is undefined."""
    ones = tuple(np.full(32, 0x38383838, np.uint32) for _ in range(6))
    scales = np.arange(32, dtype=np.uint32) + 0x7F7F7F70, np.full(32, 0x7F7F7F7F, np.uint32)
    zero = tuple(np.zeros((4, 32), np.uint32))
    kinds, types = ("kind::mxf8f6f4", "scale_vec::1X"), ("f32", "e4m3", "e4m3", "f32", "ue8m0")

    def multiplied(byte, thread):
        operands = ones[:4], ones[4:], zero, ((scales[0], byte, thread), (scales[1], 0, 0))
        return np.stack(mma.mma_scaled("m16n8k32", kinds, types, *operands))

    byte, thread = np.full(32, 0, np.uint16), np.full(32, 1, np.uint16)
    assert np.array_equal(multiplied(byte, thread), multiplied(0, 1))
    assert not np.array_equal(multiplied(byte, thread), multiplied(0, 0))
    thread[5] = 0
    with pytest.raises(UnsupportedError, match="differ among lanes"):
        multiplied(byte, thread)


@pytest.mark.parametrize(
    ("kinds", "shape", "types", "ids"),
    [
        (("kind::mxf8f6f4", "scale_vec::2X"), "m16n8k32", ("f32", "e4m3", "e4m3", "f32", "ue8m0"), ((0, 0), (0, 0))),
        (("kind::mxf8f6f4", "scale_vec::1X"), "m16n8k32", ("f32", "e4m3", "e4m3", "f32", "ue4m3"), ((0, 0), (0, 0))),
        (("kind::mxf8f6f4", "scale_vec::1X"), "m16n8k64", ("f32", "e4m3", "e4m3", "f32", "ue8m0"), ((0, 0), (0, 0))),
        (("kind::mxf8f6f4", "scale_vec::1X"), "m16n8k32", ("f32", "e2m1", "e4m3", "f32", "ue8m0"), ((0, 0), (0, 0))),
        (("kind::mxf8f6f4", "scale_vec::1X"), "m16n8k32", ("f32", "e4m3", "e4m3", "f32", "ue8m0"), ((0, 2), (0, 0))),
        (("kind::mxf4nvf4", "scale_vec::4X"), "m16n8k64", ("f32", "e2m1", "e2m1", "f32", "ue4m3"), ((1, 0), (0, 0))),
    ],
)
def test_block_scale_refusals(kinds, shape, types, ids):
    zero = np.zeros(32, np.uint32)
    with pytest.raises(UnsupportedError):
        mma.mma_scaled(shape, kinds, types, (zero,) * 4, (zero,) * 2, (zero,) * 4, [(zero, *id) for id in ids])


def test_mma_sync_refusals():
    with pytest.raises(UnsupportedError):
        mma.mma_sync("m8n8k4", ("f64", "f64", "f64", "f64"), (0,), (0,), (0, 0))
    with pytest.raises(UnsupportedError):
        mma.mma_sync("m16n8k32", ("f32", "bf16", "bf16", "f32"), (0,) * 4, (0,) * 2, (0,) * 4)


def test_the_comparison_of_two_kinds_of_mma():
    """Its kernel, which is for a device, computes the product by both; here both add up alike."""
    a, b = products.operands(2, spread=12)
    given = [torch.from_numpy(t.view(np.int32)) for t in products.fragments(a, b)]
    sums = torch.full((2, products.THREADS, 8), float("nan"))
    with emulate("sm_90a") as machine:
        machine.launch_ptx(
            products.text(), [*given, sums], grid=(2, 1, 1), block=(products.THREADS, 1, 1), smem=products.SHARED
        )
    found = products.outcome(a, b, sums.numpy())
    assert (found.sums, found.differing) == (2 * products.M * products.N, 0)
    assert found.error <= products.ROUNDING
    sums[1, 5, 6] = torch.nextafter(sums[1, 5, 6], torch.tensor(torch.inf))
    assert products.outcome(a, b, sums.numpy()).differing == 1
