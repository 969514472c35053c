"""The fifth-generation tensor core: ``tcgen05.mma``, dense and block-scaled, on one CTA or a pair."""

import numpy as np

from ..errors import EmulatorError, UnsupportedError
from ..numerics import LUT
from .operands import ELEMENT_BYTES, accumulate, decode, smem_rows

# shared-memory descriptor, bits 63..61 -> log2(swizzle span / 16 B)
_LAYOUTS = {0: 0, 2: 3, 4: 2, 6: 1}
_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_SCALES_PER_MMA = {
    "mxf8f6f4": {"": 1, "scale_vec::1X": 1, "block32": 1},
    "mxf4": {"": 2, "scale_vec::2X": 2, "block32": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
}
_ACCUMULATORS = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}


def smem_descriptor(d):
    """Fields ``(start, log2 span, lbo, sbo)`` in 16-byte chunks of a 64-bit sm_100 descriptor."""
    layout = d >> 61 & 7
    if layout not in _LAYOUTS:
        raise UnsupportedError(f"shared-memory descriptor {d:#x}: layout type {layout}")
    if d >> 46 & 7 != 1:
        raise UnsupportedError(f"shared-memory descriptor {d:#x}: version bits {d >> 46 & 7} (sm_100 has 1)")
    if d >> 49 & 0xFFF:
        raise UnsupportedError(f"shared-memory descriptor {d:#x}: base offset or offset mode")
    return d & 0x3FFF, _LAYOUTS[layout], d >> 16 & 0x3FFF, d >> 32 & 0x3FFF


class Tcgen05:
    """A kind of MMA: the fields of the instruction and its 32-bit instruction descriptor.

    kind: f16, tf32, f8f6f4, i8, mxf8f6f4, mxf4, mxf4nvf4. group: 1 or 2 CTAs. scaled_vec: None, or the scale modifier
    of a block-scaled instruction ("" when left out). Raises UnsupportedError for a field that is not modelled.
    """

    def __init__(self, kind, idesc, group, scaled_vec=None):
        self.kind, self.group, self.scaled = kind, group, scaled_vec is not None
        self.M, self.N = (idesc >> 24 & 0x1F) * 16, (idesc >> 17 & 0x3F) * 8
        a_code, b_code = idesc >> 7 & 7, idesc >> 10 & 7
        self.a_negate, self.b_negate = idesc >> 13 & 1, idesc >> 14 & 1
        self.a_mn_major, self.b_mn_major = bool(idesc >> 15 & 1), bool(idesc >> 16 & 1)
        what = f"tcgen05.mma kind::{kind} instruction descriptor {idesc:#x}"
        self.saturate = kind == "i8" and bool(idesc >> 3 & 1)
        if idesc & (0x7 if kind == "i8" else 0xF) or (not self.scaled and idesc >> 29):
            raise UnsupportedError(f"{what}: sparsity, saturation or shift")
        if self.scaled != (kind in _SCALES_PER_MMA):
            raise UnsupportedError(f"kind::{kind} {'with' if self.scaled else 'without'} block scaling")
        try:
            if kind == "f16":
                self.a_format, self.b_format = {0: "f16", 1: "bf16"}[a_code], {0: "f16", 1: "bf16"}[b_code]
            elif kind == "tf32":
                self.a_format = self.b_format = {2: "tf32"}[a_code]
            elif kind in ("f8f6f4", "mxf8f6f4"):
                self.a_format, self.b_format = _F8F6F4[a_code], _F8F6F4[b_code]
            elif kind == "i8":
                self.a_format, self.b_format = {0: "u8", 1: "s8"}[a_code], {0: "u8", 1: "s8"}[b_code]
            else:
                self.a_format = self.b_format = {1: "e2m1_packed"}[a_code & 3]
            self.accumulator = "f32" if self.scaled else _ACCUMULATORS[kind][idesc >> 4 & 3]
        except KeyError:
            raise UnsupportedError(f"{what}: operand or accumulator type") from None
        if kind in ("mxf4", "mxf4nvf4") and (self.a_mn_major or self.b_mn_major):
            raise UnsupportedError(f"{what}: packed FP4 operands are K-major")
        self.K = {1: 32, 2: 16, 4: 8}[ELEMENT_BYTES[self.a_format]] * (2 if self.a_format == "e2m1_packed" else 1)
        if self.scaled:
            self._scale_fields(kind, idesc, scaled_vec, what)
        rows = (128, 256) if group == 2 else (128,) if self.scaled else (64, 128)
        if self.scaled:
            step = 8 * group
        else:
            step = 32 if group == 2 else 16 if self.M == 128 else 8
        if self.M not in rows or not 8 <= self.N <= 256 or self.N % step:
            raise UnsupportedError(f"{what}: shape M={self.M} N={self.N} with cta_group::{group}")

    def _scale_fields(self, kind, idesc, scaled_vec, what):
        self.sfb_id, self.sfa_id = idesc >> 4 & 3, idesc >> 29 & 3
        self.scale_format = "ue8m0" if idesc >> 23 & 1 else "ue4m3"
        if scaled_vec not in _SCALES_PER_MMA[kind]:
            raise UnsupportedError(f"{what}: scale vector size {scaled_vec!r}")
        self.scales = _SCALES_PER_MMA[kind][scaled_vec]
        if self.scale_format == "ue4m3" and kind != "mxf4nvf4":
            raise UnsupportedError(f"{what}: ue4m3 scales")
        if max(self.sfa_id, self.sfb_id) + self.scales > 4:
            raise UnsupportedError(f"{what}: scale factor ids {self.sfa_id}, {self.sfb_id} with {self.scales} factors")
        if kind != "mxf8f6f4" and idesc >> 31 & 1:
            raise UnsupportedError(f"{what}: K = 96")

    # ---- operands ----
    def _smem(self, cta, desc, mn_major, rows, fmt, what):
        start, sw, lbo, sbo = smem_descriptor(desc)
        return smem_rows(cta, start, rows, 2, mn_major, sw, lbo, sbo, fmt, what)

    def _tmem_a(self, cta, addr, rows):
        """A in tensor memory: lane = row, 32 bytes of K in eight columns."""
        if self.scaled or self.a_format in ("e2m1", "e2m3", "e3m2"):
            raise UnsupportedError(f"operand A of type {self.a_format} in tensor memory")
        if addr >> 16:
            raise UnsupportedError(f"operand A in tensor memory at lane {addr >> 16}")
        col = addr & 0xFFFF
        raw = cta.tmem_read(slice(0, rows), slice(col, col + 8), "tcgen05.mma operand A")
        return decode(np.ascontiguousarray(raw).view(f"u{ELEMENT_BYTES[self.a_format]}"), self.a_format)

    def _scale(self, cta, addr, rows, sid, halves, what):
        """Scale factors of ``rows`` rows as float32 ``[rows, scales]``.

        A row's factors are up to four bytes of one 32-bit cell: row r is in lane r%32, column r/32. Each 32-lane
        quadrant of tensor memory reads its own copy, so all four must hold the same; with ``halves`` (the scales of B
        when a pair has 64 rows per CTA) the first half of the rows is in quadrants 0 and 1 and the second in 2 and 3,
        as the accumulator's columns are.
        """
        # the two top bits of a scale-factor address repeat the factor id of the instruction descriptor
        if addr >> 16 & 0x3FFF:
            raise UnsupportedError(f"{what} at tensor memory lane {addr >> 16 & 0x3FFF}")
        per = rows // 2 if halves else rows
        col, nc = addr & 0xFFFF, -(-per // 32)
        t = np.ascontiguousarray(cta.tmem_read(slice(0, 128), slice(col, col + nc), what)).reshape(4, 32, nc)
        by_row = t.transpose(0, 2, 1).reshape(4, -1)[:, :per]  # quadrant, row
        differs = by_row != by_row[[0, 0, 2, 2] if halves else [0, 0, 0, 0]]
        if differs.any():
            q, row = np.argwhere(differs)[0]
            raise EmulatorError(
                f"CTA {cta.id}: {what}: scale factors are not replicated across the lane quadrants of tensor "
                f"memory (quadrant {q}, column {col + row // 32})"
            )
        cells = by_row[[0, 2]].reshape(-1) if halves else by_row[0]
        by = np.ascontiguousarray(cells).view(np.uint8).reshape(rows, 4)
        return LUT[self.scale_format][by[:, sid : sid + self.scales]]

    # ---- execution ----
    def run(self, ctas, d, a, a_in_tmem, b, enable, disable_lanes, scale_d, scales=None):
        """Execute on the CTA (or the pair, even rank first): ``D = A B^T (+ D * 2**-scale_d if enable)``.

        d: accumulator address; a, b: descriptors (a: an address if ``a_in_tmem``); disable_lanes: None or four mask
        words per CTA of accumulator lanes left unchanged; scales: addresses of the A and B scale factors.
        """
        half_rows = self.group == 2 and self.M == 128
        rows, what = self.M // self.group, "tcgen05.mma operand "
        B = np.concatenate(
            [self._smem(c, b, self.b_mn_major, self.N // self.group, self.b_format, what + "B") for c in ctas]
        )
        if self.b_negate:
            B = -B
        for i, cta in enumerate(ctas):
            cta.alive("tcgen05.mma")
            if a_in_tmem:
                A = self._tmem_a(cta, a, rows)
            else:
                A = self._smem(cta, a, self.a_mn_major, rows, self.a_format, what + "A")
            if self.a_negate:
                A = -A
            Bi = B
            if self.scaled:
                sa = self._scale(cta, scales[0], rows, self.sfa_id, False, "scale factors of A")
                sb = self._scale(cta, scales[1], self.N, self.sfb_id, half_rows, "scale factors of B")
                # at most 4 + 4 significant bits: exact in float32 unless the product leaves its range
                A = A * np.repeat(sa, self.K // self.scales, axis=1)
                Bi = B * np.repeat(sb, self.K // self.scales, axis=1)
            lanes, cols = self._target(d)
            product = A @ Bi.T
            if half_rows:  # lanes 0..63: first half of N, lanes 64..127: second half
                product = np.concatenate([product[:, : self.N // 2], product[:, self.N // 2 :]])
            self._store(cta, lanes, cols, product, enable, self._disabled(disable_lanes, i, len(product)), scale_d)

    def _target(self, d):
        """Lanes and columns of the accumulator at address ``d``."""
        col, lane = d & 0xFFFF, d >> 16
        if self.group == 1 and self.M == 64:
            if lane not in (0, 16):
                raise UnsupportedError(f"accumulator address {d:#x}: lane {lane}")
            r = np.arange(64)
            return (r // 16) * 32 + r % 16 + lane, np.arange(col, col + self.N)
        if lane:
            raise UnsupportedError(f"accumulator address {d:#x}: lane {lane}")
        width = self.N // 2 if self.group == 2 and self.M == 128 else self.N
        return slice(0, 128), slice(col, col + width)

    def _disabled(self, words, i, rows):
        if words is None or not any(words):
            return None
        if rows != 128:
            raise UnsupportedError("disabled lanes with M = 64")
        mine = np.array(words[4 * i : 4 * i + 4], np.uint32)
        return np.unpackbits(mine.view(np.uint8), bitorder="little").astype(bool)

    def _store(self, cta, lanes, cols, product, enable, disabled, scale_d):
        what = "tcgen05.mma accumulator"
        old = None
        if enable or disabled is not None:
            raw = np.ascontiguousarray(cta.tmem_read(lanes, cols, what))
        if enable:
            if self.accumulator == "f16":
                old = (raw & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
            else:
                old = raw.view(np.int32 if self.accumulator == "s32" else np.float32)
            if scale_d:
                old = old * np.float32(2.0**-scale_d)
        new = np.ascontiguousarray(accumulate(product, old, self.accumulator, self.saturate))
        bits = new.view(np.uint16).astype(np.uint32) if self.accumulator == "f16" else new.view(np.uint32)
        if disabled is not None:
            bits = np.where(disabled[:, None], raw, bits)
        cta.tmem_write(lanes, cols, bits, what)
