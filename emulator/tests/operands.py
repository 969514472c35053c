"""A fake CTA and operands placed in its memory element by element, for the tests of tensor-core instructions."""

import numpy as np

from . import reference as ref

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
