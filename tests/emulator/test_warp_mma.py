"""``wgmma`` and ``mma.sync`` on hand-placed operands: descriptor layouts, formats, accumulator fragments."""

import numpy as np
import pytest

from tests.emulator.operands import SIZES, Cta, Warp, codes_for, desc90, place
from tgl.testing.emulator import mma
from tgl.testing.emulator.errors import UnsupportedError


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
