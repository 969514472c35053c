"""Tensor-core instructions with accumulators in registers: ``wgmma`` (sm_90) and ``mma.sync``."""

import re

import numpy as np

from ..errors import UnsupportedError
from ..numerics import LUT, full
from .operands import ELEMENT_BYTES, accumulate, decode, register_matrix, smem_rows

# sm_90 matrix descriptor, bits 63..62 -> log2(swizzle span / 16 B)
_LAYOUTS = {0: 0, 1: 3, 2: 2, 3: 1}
_NEGATE = (-1, 0xFFFFFFFF)
_ACC = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


def smem_descriptor(d):
    """Fields ``(start, log2 span, lbo, sbo)`` in 16-byte chunks of a 64-bit sm_90 descriptor."""
    if d >> 49 & 0x1FFF:
        raise UnsupportedError(f"wgmma descriptor {d:#x}: base offset or reserved bits")
    return d & 0x3FFF, _LAYOUTS[d >> 62 & 3], d >> 16 & 0x3FFF, d >> 32 & 0x3FFF


def fragment_in(regs, n, dt):
    """Accumulator registers of one warp's 16 rows to values ``[16, n]``.

    Register 4j+2h+e (f16: 2j+h, with e the half) of thread t holds row t/4+8h, column 8j+2(t%4)+e.
    """
    raw = np.ascontiguousarray(np.stack([full(x, 32) for x in regs]))
    if dt == "f16":
        v = raw.view(np.float16).reshape(n // 8, 2, 8, 4, 2)
        return v.transpose(1, 2, 0, 3, 4).reshape(16, n)
    v = raw.view(_ACC[dt]).reshape(n // 8, 2, 2, 8, 4)
    return v.transpose(1, 3, 0, 4, 2).reshape(16, n)


def fragment_out(values, dt):
    """Inverse of :func:`fragment_in`: list of uint32[32]."""
    n = values.shape[1]
    v = values.astype(_ACC[dt], copy=False).reshape(2, 8, n // 8, 4, 2)
    if dt == "f16":
        return list(np.ascontiguousarray(v.transpose(2, 0, 1, 3, 4)).view(np.uint32).reshape(n // 4, 32))
    return list(np.ascontiguousarray(v.transpose(2, 0, 4, 1, 3)).view(np.uint32).reshape(n // 2, 32))


def _register_a(regs, fmt):
    """A operand registers to values ``[16, K]``: register 2b+h of thread t holds row t/4+8h, K block b, quad t%4."""
    raw = _unpacked(register_matrix([full(x, 32) for x in regs], fmt), fmt)
    v = raw.reshape(len(regs) // 2, 2, 8, 4, -1).transpose(1, 2, 0, 3, 4)
    return decode(np.ascontiguousarray(v).reshape(16, -1), fmt)


def _register_b(regs, fmt):
    """B operand registers to values ``[8, K]``: register b of thread t holds column t/4, K block b, quad t%4."""
    raw = _unpacked(register_matrix([full(x, 32) for x in regs], fmt), fmt)
    v = raw.reshape(len(regs), 8, 4, -1).transpose(1, 0, 2, 3)
    return decode(np.ascontiguousarray(v).reshape(8, -1), fmt)


def _unpacked(codes, fmt):
    """Codes of their own of elements that lie two in a byte, the low one first."""
    return np.stack((codes & 15, codes >> 4), axis=-1) if fmt == "e2m1_packed" else codes


def _immediates(imm, a_in_regs):
    """(scale_a, scale_b, transpose_a, transpose_b) of a wgmma's trailing immediates; integer kinds have none."""
    if len(imm) == 4:
        return imm
    if len(imm) == 3 and a_in_regs:
        return imm[0], imm[1], 0, imm[2]
    if len(imm) == 2:
        return imm[0], imm[1], 0, 0
    if not imm:
        return 1, 1, 0, 0
    raise UnsupportedError(f"wgmma with {len(imm)} immediates")


def _product(A, B, kind):
    """``A @ B.T``; products of 16 bits are added exactly and rounded once, so that their order does not matter."""
    wide = np.float64 if kind in ("bf16", "f16") else A.dtype
    return (A.astype(wide, copy=False) @ B.T.astype(wide, copy=False)).astype(A.dtype, copy=False)


def wgmma(w, shape, dt, at, bt, old, a, a_in_regs, b, imm, m, satfinite=False):
    """Return a warp's sixteen rows of ``wgmma.mma_async``: the new accumulator, values ``[16, N]``.

    shape: "m64nNkK"; dt, at, bt: types; old: accumulator ``[16, N]`` or None; a: a descriptor or a tuple of registers;
    b: a descriptor; imm: trailing immediates; m: active lanes; satfinite: clamp s32 sums.
    """
    found = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
    if not found or dt not in _ACC or at not in ELEMENT_BYTES or bt not in ELEMENT_BYTES:
        raise UnsupportedError(f"wgmma.{shape}.{dt}.{at}.{bt}")
    n = int(found[1])
    scale_a, scale_b, trans_a, trans_b = _immediates(imm, a_in_regs)
    if (trans_a or trans_b) and at not in ("bf16", "f16"):
        raise UnsupportedError(f"wgmma with an MN-major operand of type {at}")
    (b,) = w.one_lane(m, b)
    start, sw, lbo, sbo = smem_descriptor(b)
    B = smem_rows(w.cta, start, n, 2, bool(trans_b), sw, lbo, sbo, bt, "wgmma operand B")
    if a_in_regs:
        A = _register_a(a, at)
    else:
        (a,) = w.one_lane(m, a)
        start, sw, lbo, sbo = smem_descriptor(a)
        rows = 16 * (w.wid % 4)
        A = smem_rows(w.cta, start, 64, 2, bool(trans_a), sw, lbo, sbo, at, "wgmma operand A", rows, 16)
    if scale_a in _NEGATE:
        A = -A
    if scale_b in _NEGATE:
        B = -B
    return accumulate(_product(A, B, at), old, dt, satfinite).astype(_ACC[dt], copy=False)


def mma_sync(shape, types, a, b, c, satfinite=False):
    """``mma.sync.m16n8kK``: the four (f32, s32) or two (f16) result registers.

    types: (D, A, B, C); a, b, c: tuples of registers. A, B: f16, bf16, tf32, e4m3, e5m2, s8 or u8.
    """
    dt, at, bt, ct = types
    found = re.fullmatch(r"m16n8k(\d+)", shape)
    if not found or dt not in _ACC or ct != dt or at not in ELEMENT_BYTES or bt not in ELEMENT_BYTES:
        raise UnsupportedError(f"mma.sync.{shape}.{'.'.join(types)}")
    k = int(found[1])
    A, B = _register_a(a, at), _register_b(b, bt)
    if A.shape[1] != k or B.shape[1] != k:
        raise UnsupportedError(f"mma.sync.{shape}.{'.'.join(types)} with {len(a)} and {len(b)} operand registers")
    return fragment_out(accumulate(_product(A, B, at), fragment_in(c, 8, dt), dt, satfinite), dt)


# kind, scale vector and scale type of an MMA with block scales -> its shape, its element types, scales of a row
_SCALED = {
    ("kind::mxf8f6f4", "scale_vec::1X", "ue8m0"): ("m16n8k32", ("e4m3", "e5m2"), 1),
    ("kind::mxf4", "scale_vec::2X", "ue8m0"): ("m16n8k64", ("e2m1",), 2),
    ("kind::mxf4nvf4", "scale_vec::4X", "ue4m3"): ("m16n8k64", ("e2m1",), 4),
    ("kind::mxf4nvf4", "scale_vec::4X", "ue8m0"): ("m16n8k64", ("e2m1",), 4),
    ("kind::mxf4nvf4", "scale_vec::2X", "ue8m0"): ("m16n8k64", ("e2m1",), 2),
}


def _selector(value) -> int:
    """Return the value that all lanes hold."""
    found = np.unique(value)
    if found.size != 1:
        raise UnsupportedError("mma.sync with selectors of scales that differ among lanes")
    return int(found[0])


def mma_scaled(shape, kinds, types, a, b, c, scales):
    """``mma.sync`` with ``.block_scale``: the four result registers.

    Row r of A has its scales in thread ``4 (r % 8) + 2 thread_id + r // 8``, column c of B in ``4 c + thread_id``, as
    many bytes of the register from ``byte_id`` on as there are scales of a row.

    kinds: kind and scale vector; types: (D, A, B, C, scale); scales: of A and of B (register, byte_id, thread_id).
    """
    dt, at, bt, ct, st = types
    known = _SCALED.get((*kinds, st))
    if known is None or shape != known[0] or {at, bt} - set(known[1]) or (dt, ct) != ("f32", "f32"):
        raise UnsupportedError(f"mma.sync.{shape}.{'.'.join((*kinds, *types))}")
    per = known[2]
    (scale_a, byte_a, thread_a), (scale_b, byte_b, thread_b) = ((x, *map(_selector, ids)) for x, *ids in scales)
    if thread_a not in (0, 1) or thread_b not in range(4) or any(x not in range(0, 4, per) for x in (byte_a, byte_b)):
        raise UnsupportedError(
            f"mma.sync with {per} scales of a row: selectors {byte_a}, {thread_a}, {byte_b}, {thread_b}"
        )
    A, B = (
        read(regs, "e2m1_packed" if t == "e2m1" else t)
        for read, regs, t in ((_register_a, a, at), (_register_b, b, bt))
    )
    if A.shape[1] != B.shape[1] or A.shape[1] != int(shape.rpartition("k")[2]):
        raise UnsupportedError(f"mma.sync.{shape} with {len(a)} and {len(b)} operand registers")
    row, column = np.arange(16), np.arange(8)
    lanes = 4 * (row % 8) + 2 * thread_a + row // 8, 4 * column + thread_b
    factors = (
        np.ascontiguousarray(full(x, 32)[lane]).view(np.uint8).reshape(-1, 4)[:, first : first + per]
        for x, lane, first in zip((scale_a, scale_b), lanes, (byte_a, byte_b))
    )
    with np.errstate(over="ignore", invalid="ignore"):
        A, B = (
            values * np.repeat(LUT[st][codes], values.shape[1] // per, axis=1) for values, codes in zip((A, B), factors)
        )
        return fragment_out(accumulate(A @ B.T, fragment_in(c, 8, dt), dt), dt)
