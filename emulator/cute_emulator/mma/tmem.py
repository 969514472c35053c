"""Moving data in and out of tensor memory: ``tcgen05.cp``, ``tcgen05.ld``, ``tcgen05.st``.

Tensor memory is 128 lanes by 512 columns of 32 bits; an address is ``lane << 16 | column``.
"""

from functools import lru_cache

import numpy as np

from ..errors import MemoryAccessError, UnsupportedError
from ..numerics import full
from .operands import chunk_index
from .tcgen05 import smem_descriptor

# tcgen05.cp (shape, multicast) -> the 32-row block of the source that each lane quadrant receives
_CP_QUADRANTS = {
    ("128x256b", ""): (0, 1, 2, 3),
    ("128x128b", ""): (0, 1, 2, 3),
    ("64x128b", "warpx2::02_13"): (0, 1, 0, 1),
    ("64x128b", "warpx2::01_23"): (0, 0, 1, 1),
    ("32x128b", "warpx4"): (0, 0, 0, 0),
}
_T = np.arange(32)


def tc_cp(ctas, shape, multicast, fmt, taddr, desc):
    """Copy a K-major matrix of ``rows x bits`` from shared to tensor memory in every CTA of the group.

    fmt: decompression modifiers (none is modelled). taddr: destination address; desc: shared-memory descriptor.
    """
    if fmt or (shape, multicast) not in _CP_QUADRANTS:
        raise UnsupportedError(f"tcgen05.cp.{shape}.{multicast} {' '.join(fmt)}".rstrip(". "))
    if taddr >> 16:
        raise UnsupportedError(f"tcgen05.cp to tensor memory lane {taddr >> 16}")
    start, sw, lbo, sbo = smem_descriptor(desc)
    rows, chunks = int(shape.split("x")[0]), int(shape.split("x")[1][:-1]) // 128
    rel = start & 63
    idx = chunk_index(rel, rows, chunks, False, sw, lbo, sbo, 0) + (start - rel)
    col = taddr & 0xFFFF
    order = np.concatenate([_T + 32 * block for block in _CP_QUADRANTS[shape, multicast]])
    for cta in ctas:
        words = np.ascontiguousarray(cta.read_chunks(idx, "tcgen05.cp")).reshape(rows, -1).view(np.uint32)
        cta.tmem_write(slice(0, 128), slice(col, col + 4 * chunks), words[order], "tcgen05.cp")


@lru_cache(maxsize=256)
def ld_index(shape, num, imm=0):
    """Cells of ``tcgen05.ld``/``st`` relative to the address: lanes and columns as arrays ``[registers, 32]``."""
    if shape == "32x32b":
        cells = [(_T, np.full(32, j)) for j in range(num)]
    elif shape == "16x256b":
        cells = [(_T // 4 + h, 8 * j + (_T % 4) * 2 + e) for j in range(num) for h in (0, 8) for e in (0, 1)]
    elif shape == "16x128b":
        cells = [(_T // 4 + h, 4 * j + _T % 4) for j in range(num) for h in (0, 8)]
    elif shape == "16x64b":
        cells = [(8 * (_T & 1) + (_T >> 2), 2 * j + (_T >> 1 & 1)) for j in range(num)]
    elif shape == "16x32bx2":
        cells = [(_T % 16, j + (_T // 16) * imm) for j in range(num)]
    else:
        raise UnsupportedError(f"tcgen05.ld/st shape {shape}")
    lanes, cols = np.stack([c[0] for c in cells]), np.stack([c[1] for c in cells])
    lanes.flags.writeable = cols.flags.writeable = False
    return lanes, cols


def _check_quadrant(w, shape, lane, what):
    """A warp may touch only lanes 32(w%4) .. +31; a 16-lane shape starts at either half."""
    low = 32 * (w.wid % 4)
    allowed = (low,) if shape == "32x32b" else (low, low + 16)
    if lane not in allowed:
        raise MemoryAccessError(f"{what}: lane {lane}, but warp {w.wid} may address {' or '.join(map(str, allowed))}")


def tc_ld(w, shape, num, lane, col, pack16=False, imm=0):
    """Registers (list of uint32[32]) that a warp loads. ``pack16``: two 16-bit columns per register."""
    what = "tcgen05.ld"
    _check_quadrant(w, shape, lane, what)
    if shape == "32x32b" and not pack16:
        return list(np.ascontiguousarray(w.cta.tmem_read(slice(lane, lane + 32), slice(col, col + num), what).T))
    lanes, cols = ld_index(shape, num, imm)
    lanes = lanes + lane
    if pack16:
        lo = w.cta.tmem_read_at(lanes, col + 2 * cols, what)
        hi = w.cta.tmem_read_at(lanes, col + 2 * cols + 1, what)
        return list((lo & np.uint32(0xFFFF)) | (hi << np.uint32(16)))
    return list(w.cta.tmem_read_at(lanes, col + cols, what))


def tc_st(w, shape, num, lane, col, vals, unpack16=False, imm=0):
    """Store a warp's registers. ``unpack16``: the halves of a register go to two columns."""
    what = "tcgen05.st"
    _check_quadrant(w, shape, lane, what)
    lanes, cols = ld_index(shape, num, imm)
    lanes = lanes + lane
    values = np.stack([full(v, 32) for v in vals])
    if unpack16:
        w.cta.tmem_write_at(lanes, col + 2 * cols, values & np.uint32(0xFFFF), what)
        w.cta.tmem_write_at(lanes, col + 2 * cols + 1, values >> np.uint32(16), what)
    else:
        w.cta.tmem_write_at(lanes, col + cols, values, what)
