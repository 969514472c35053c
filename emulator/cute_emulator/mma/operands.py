"""Matrix operands in shared memory: descriptor layouts, swizzles and element formats.

Shared memory is addressed in 16-byte chunks. The canonical layouts below are those of the matrix descriptors of
``wgmma`` (sm_90) and ``tcgen05`` (sm_100); K-major means that the chunks of one row run along K, MN-major that they run
along M or N.
"""

from functools import lru_cache

import numpy as np

from ..errors import UnsupportedError
from ..numerics import LUT, bf16_to_f32

ELEMENT_BYTES = {
    **dict.fromkeys(("bf16", "f16"), 2),
    "tf32": 4,
    **dict.fromkeys(("e4m3", "e5m2", "s8", "u8", "e2m3", "e3m2", "e2m1", "e2m1_packed"), 1),
}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@lru_cache(maxsize=4096)
def chunk_index(rel, rows, nch, mn_major, sw, lbo, sbo, kelems):
    """Chunk numbers of an operand tile, relative to the 1 KiB aligned address that ``rel`` (chunks) is counted from.

    ``sw``: log2 of the swizzle span in chunks (0 none, 1/2/3 for 32/64/128 B). ``lbo``, ``sbo``: the descriptor's
    leading and stride byte offsets in chunks. K-major: result ``[rows, nch]`` with ``nch`` chunks along K. MN-major:
    result ``[kelems, nch]`` with ``nch`` chunks along M/N. The swizzle XORs address bits 4.. with bits 7...
    """
    span = 1 << sw
    if not mn_major:
        r, c = np.arange(rows)[:, None], np.arange(nch)[None, :]
        off = (r % 8) + (r // 8) * sbo + c * lbo if sw == 0 else (r % 8) * span + (r // 8) * sbo + c
    else:
        k, j = np.arange(kelems)[:, None], np.arange(nch)[None, :]
        if sw == 0:
            off = j * sbo + (k % 8) + (k // 8) * lbo
        else:
            off = (j % span) + (j // span) * lbo + (k % 8) * span + (k // 8) * sbo
    a = off + rel
    if sw:
        a = a ^ ((a >> 3) & (span - 1))
    a.flags.writeable = False
    return a


def smem_rows(cta, start, rows, kchunks, mn_major, sw, lbo, sbo, fmt, what, first=0, count=None):
    """Elements of rows ``first .. first+count`` of an operand tile of ``rows`` rows, as float32 ``[count, K]``.

    ``start``, ``lbo``, ``sbo`` in chunks; ``kchunks``: the extent of K in chunks of a K-major tile (for an MN-major
    one, K has the same number of elements). The reads go through ``cta.read_chunks``.
    """
    ebytes = ELEMENT_BYTES[fmt]
    rel = start & 63
    count = rows if count is None else count
    if mn_major:
        per = 16 // ebytes
        idx = chunk_index(rel, rows, rows // per, True, sw, lbo, sbo, kchunks * per)
        idx = idx[:, first // per : (first + count) // per]
    else:
        idx = chunk_index(rel, rows, kchunks, False, sw, lbo, sbo, 0)[first : first + count]
    codes = unpack_chunks(cta.read_chunks(idx + (start - rel), what), fmt)
    values = decode(codes.reshape(codes.shape[0], -1), fmt)
    return values.T if mn_major else values


def unpack_chunks(data, fmt):
    """Raw chunks ``uint8[..., 16]`` to element codes ``[..., elements]``.

    FP4 and FP6 operands of the mixed 8/6/4-bit kinds hold 16 elements per chunk, packed in its first 8 or 12 bytes
    (the layout of the 16U4/16U6 ALIGN16B tensor-map types); ``e2m1_packed`` holds 32, low nibble first.
    """
    if fmt in ("e2m1_packed", "e2m1"):
        half = data if fmt == "e2m1_packed" else data[..., :8]
        return np.stack((half & 15, half >> 4), axis=-1).reshape(*half.shape[:-1], -1)
    if fmt in ("e2m3", "e3m2"):
        b = data[..., :12].astype(np.uint32).reshape(*data.shape[:-1], 4, 3)
        word = b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16
        return (
            np.stack([word >> (6 * i) & 63 for i in range(4)], axis=-1).reshape(*data.shape[:-1], 16).astype(np.uint8)
        )
    return np.ascontiguousarray(data).view(_RAW[ELEMENT_BYTES[fmt]])


def decode(codes, fmt):
    """Element codes to float32 values (exact for every format; tf32 drops its low 13 bits)."""
    if fmt == "bf16":
        return bf16_to_f32(codes)
    if fmt == "f16":
        return np.ascontiguousarray(codes).view(np.float16).astype(np.float32)
    if fmt == "tf32":
        return (np.ascontiguousarray(codes) & np.uint32(0xFFFFE000)).view(np.float32)
    if fmt == "s8":
        return np.ascontiguousarray(codes).view(np.int8).astype(np.float32)
    if fmt == "u8":
        return codes.astype(np.float32)
    if fmt == "e2m1_packed":
        fmt = "e2m1"
    if fmt not in LUT:
        raise UnsupportedError(f"matrix operands of type {fmt}")
    return LUT[fmt][codes]


def register_matrix(regs, fmt):
    """Operand registers (list of uint32[32]) to ``[registers, 32 lanes * elements]`` codes of a 1-, 2- or 4-byte
    format, element index fastest."""
    return np.ascontiguousarray(np.stack(regs)).view(_RAW[ELEMENT_BYTES[fmt]])


def accumulate(product, old, kind, satfinite=False):
    """``product + old`` in an accumulator format: f32, f16 (rounded once) or s32 (wrapping, or clamped with
    ``satfinite``); ``old`` may be None.

    ``product``: float32 values; ``old``: values of the format. Returns values of the format.
    """
    if kind == "s32":
        total = product.astype(np.int64)
        if old is not None:
            total = total + old
        if satfinite:
            total = np.clip(total, -(1 << 31), (1 << 31) - 1)
        return total.astype(np.int32)
    with np.errstate(over="ignore", invalid="ignore"):
        s = product if old is None else product + old.astype(np.float32)
        return s.astype(np.float16) if kind == "f16" else s.astype(np.float32)
