"""Moving data in and out of tensor memory: ``tcgen05.cp``, ``ld`` and ``st`` in every shape."""

import numpy as np
import pytest

from cute_emulator import mma
from cute_emulator.errors import MemoryAccessError, UnsupportedError

from .operands import Cta, Warp, desc100, place


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
