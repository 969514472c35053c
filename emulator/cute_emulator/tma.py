"""Tensor maps: decoding the 128-byte TMA descriptor, boxes, swizzles, and device-side edits.

Only the first 64 bytes carry data. Fields (bit positions in that 512-bit little-endian number): base address 0, rank-1
68, element type 71, interleave 75, swizzle 77, out-of-bounds NaN fill 79, stride i (i = 1..4, in 16 bytes) 96/128/160/
192 with its upper four bits at 224+4(i-1), size i minus one 256+32i, element stride i minus one 416+3i, box i minus one
440+8i.
"""

import numpy as np

from .errors import MemoryAccessError, UnsupportedError
from .global_races import NO_SCOPE, Box
from .happens_before import GPU
from .numerics import reduce_array

# element-type code -> (name, bytes of an element in memory); sub-byte types count pairs or chunks, see decode()
_TYPES = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    8: ("f32ftz", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
    11: ("u4x16_align8", 1),
    12: ("u4x16_align16", 1),
    13: ("u6x16_align16", 1),
}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ADDRESS = (1 << 57) - 1  # what a descriptor holds of its base


class TensorMap:
    """A decoded tensor map. Sizes, coordinates and boxes count elements; ``nbytes`` is the shared memory one box takes,
    ``tx_bytes`` what an mbarrier counts for it."""

    base: int
    rank: int
    swizzle: int
    fill_nan: int
    dtype: str
    es: int
    bits: int
    unpack: bool
    size: list[int]
    box: list[int]
    strides: list[int]
    bsz: list[int]
    limits: list[int]
    inner: int
    nbytes: int
    tx_bytes: int

    @staticmethod
    def decode(raw):
        """Decode the first 64 bytes of a descriptor. Raises UnsupportedError for a field that is not modelled."""
        u = int.from_bytes(raw[:64], "little")

        def bits(pos, width):
            return u >> pos & ((1 << width) - 1)

        t = TensorMap()
        t.base, t.rank = bits(0, 64), bits(68, 3) + 1
        code, t.swizzle, t.fill_nan = bits(71, 4), bits(77, 2), bits(79, 1)
        if code not in _TYPES or t.rank > 5:
            raise UnsupportedError(f"tensor map of element type {code}, rank {t.rank}")
        t.dtype, t.es = _TYPES[code]
        t.size = [bits(256 + 32 * i, 32) + 1 for i in range(5)]
        t.box = [bits(440 + 8 * i, 8) + 1 for i in range(5)]
        lows = [bits(p, 32) for p in (96, 128, 160, 192)]
        t.strides = [t.es] + [(lows[i] | bits(224 + 4 * i, 4) << 32) * 16 for i in range(4)]
        if bits(75, 2) or any(bits(416 + 3 * i, 3) for i in range(t.rank)):
            raise UnsupportedError(f"tensor map with interleaved layout or element strides: {t}")
        # packed FP4 and FP6: global memory is addressed in bytes; the align16 types spread 16 elements (8 or 12 bytes)
        # over 16 bytes of shared memory
        t.bits = {11: 4, 12: 4, 13: 6}.get(code, 8)
        t.unpack = code in (12, 13)
        if (t.box[0] * t.bits | t.size[0] * t.bits) % 8 or (t.unpack and t.box[0] % 16):
            raise UnsupportedError(f"extents of packed elements: {t}")
        t.bsz = [t.box[0] * t.bits // 8, *t.box[1 : t.rank]]
        t.limits = [t.size[0] * t.bits // 8, *t.size[1 : t.rank]]
        t.inner = t.box[0] if t.unpack else t.bsz[0] * t.es
        t.nbytes = t.inner * int(np.prod(t.bsz[1:]))
        t.tx_bytes = t.nbytes * t.bits // 8 if t.unpack else t.nbytes  # the gaps do not count
        return t

    def __repr__(self):
        r = self.rank
        geometry = f"size={self.size[:r]} strides={self.strides[1:r]} box={self.box[:r]}"
        return f"TensorMap({self.dtype} {geometry} swizzle={self.swizzle})"

    def check_dst(self, off, fail):
        """Alignment rules of a transfer at shared-memory offset ``off``; ``fail(message)`` reports."""
        if off % 128:
            fail(f"TMA shared address offset {off:#x} is not 128-byte aligned")
        if self.base % 16:
            fail(f"TMA global base {self.base:#x} is not 16-byte aligned")
        if self.inner % 16:
            fail(f"TMA inner box of {self.inner} bytes is not a multiple of 16")
        if self.swizzle and self.inner > 16 << self.swizzle:
            fail(f"TMA inner box of {self.inner} bytes exceeds the swizzle span {16 << self.swizzle}: {self}")

    # ---- global memory ----
    def _clip(self, coords):
        """Box origin, and the part ``[lo, hi)`` of the box that lies inside the tensor (None if empty)."""
        c = list(coords[: self.rank])
        if c[0] * self.bits % 8:
            raise MemoryAccessError(f"coordinate {c[0]} of packed elements is not on a byte: {self}")
        c[0] = c[0] * self.bits // 8
        if c[0] * self.es % 16:  # the device stops with an illegal instruction
            raise MemoryAccessError(
                f"TMA innermost coordinate {coords[0]} is {c[0] * self.es} bytes, not a multiple of 16: {self}"
            )
        lo = [max(0, -x) for x in c]
        hi = [min(b, s - x) for x, b, s in zip(c, self.bsz, self.limits, strict=True)]
        return (c, lo, hi) if all(a < b for a, b in zip(lo, hi, strict=True)) else None

    def _view(self, launch, c, lo, hi):
        """The clipped box as a strided array over global memory (outermost dimension first), its region, and the box
        in the region's shadow.

        Addresses are computed modulo 2**57: a "ragged" tensor map combines huge sizes and wrapping strides, or has its
        base far before the memory, below zero.
        """
        dims = range(self.rank)
        start = (self.base + sum((c[i] + lo[i]) * self.strides[i] for i in dims)) & _ADDRESS
        span = sum((hi[i] - lo[i] - 1) * self.strides[i] for i in dims) + self.es
        region = launch.find(start, span, None)
        shape = [hi[i] - lo[i] for i in reversed(dims)]
        # the stride of a one-element dimension does not matter and may exceed the buffer
        steps = [self.strides[i] if hi[i] - lo[i] > 1 else self.es for i in reversed(dims)]
        view = np.ndarray(shape, _RAW[self.es], buffer=region.u8, offset=start - region.base, strides=steps)
        return view, region, Box(start - region.base, shape, steps, self.es)

    def read(self, launch, coords, fail):
        """The box at ``coords`` (innermost first) as an array, outermost dimension first; zeros (or NaN, if the map
        says so) outside the tensor."""
        box = np.zeros(self.bsz[::-1], _RAW[self.es])
        if self.fill_nan:
            if self.dtype not in ("f16", "bf16", "f32", "f32ftz", "f64"):
                fail(f"TMA NaN fill of type {self.dtype}")
            # the special NaN of the out-of-bounds fill
            box[...] = {2: 0x7FFF, 4: 0x7FFFFFFF, 8: 0x7FFFFFFFFFFFFFFF}[self.es]
        part = self._clip(coords)
        if part:
            c, lo, hi = part
            view, region, cells = self._view(launch, c, lo, hi)
            if region.shadow is not None:
                region.shadow.read(launch.agent, cells)
            box[tuple(slice(lo[i], hi[i]) for i in reversed(range(self.rank)))] = view
        if self.unpack:
            packed = box.reshape(-1, 2 * self.bits)
            spread = np.full((len(packed), 16), 0xFF, np.uint8)  # the gap's contents are undefined
            spread[:, : 2 * self.bits] = packed
            return spread.reshape(*box.shape[:-1], -1)
        return box

    def write(self, launch, coords, box, red, fail):
        """Store the box at ``coords``, dropping what lies outside the tensor; ``red``: None or a reduction (add, min,
        max, inc, dec, and, or, xor) with what is in memory."""
        if self.unpack:
            fail(f"TMA store through a map that unpacks: {self}")
        part = self._clip(coords)
        if min(coords[: self.rank]) < 0:  # loads may begin there; the device stops a store with an illegal instruction
            raise MemoryAccessError(f"TMA store to negative coordinates {list(coords[: self.rank])}: {self}")
        if not part:
            return
        c, lo, hi = part
        view, region, cells = self._view(launch, c, lo, hi)
        if region.shadow is not None:
            region.shadow.write(launch.agent, cells, NO_SCOPE if red is None else GPU)
        src = box[tuple(slice(lo[i], hi[i]) for i in reversed(range(self.rank)))]
        if red is None:
            view[...] = src
        else:
            view[...] = reduce_array(red, self.dtype, np.ascontiguousarray(view), np.ascontiguousarray(src))

    # ---- shared memory ----
    def chunks(self, off, rep=1):
        """16-byte chunk numbers of ``rep`` boxes stored at shared offset ``off``: dense, XOR-swizzled by address."""
        idx = off // 16 + np.arange(self.nbytes * rep // 16)
        return idx ^ ((idx >> 3) & ((1 << self.swizzle) - 1))

    def scatter(self, cta, off, box):
        """Write a box (or four stacked rows of gather4) to shared memory."""
        data = np.ascontiguousarray(box).reshape(-1).view(np.uint8).reshape(-1, 16)
        cta.write_chunks(self.chunks(off, len(data) * 16 // self.nbytes), data)

    def gather(self, cta, off, rep=1):
        """Read ``rep`` boxes from shared memory, stacked along the outermost dimension."""
        data = cta.read_chunks(self.chunks(off, rep), "TMA store")
        shape = self.bsz[::-1]
        shape[0] *= rep
        return np.ascontiguousarray(data).reshape(-1).view(_RAW[self.es]).reshape(shape)


def replace_field(u, field, ordinal, value):
    """``tensormap.replace``: the 512-bit descriptor ``u`` with one field changed.

    field: global_address, rank (minus one), box_dim, global_dim (elements), global_stride (bytes; ordinal n is the
    stride of dimension n+1), element_stride, swizzle_mode.
    """

    def put(u, pos, width, v):
        m = (1 << width) - 1
        return u & ~(m << pos) | (v & m) << pos

    if field == "global_stride":
        if value % 16 or value >> 40:
            raise MemoryAccessError(
                f"tensormap.replace.global_stride of {value} bytes: not a multiple of 16 below 2**40"
            )
        return put(put(u, 96 + 32 * ordinal, 32, value >> 4), 224 + 4 * ordinal, 4, value >> 36)
    places = {
        "global_address": (0, 64, value),
        "global_dim": (256 + 32 * ordinal, 32, value - 1),
        "box_dim": (440 + 8 * ordinal, 8, value - 1),
        "element_stride": (416 + 3 * ordinal, 3, value - 1),
        "swizzle_mode": (77, 2, value),
        "rank": (68, 3, value),
    }
    if field not in places:
        raise UnsupportedError(f"tensormap.replace of {field}")
    return put(u, *places[field])
