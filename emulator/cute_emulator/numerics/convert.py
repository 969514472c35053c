"""The ``cvt`` instruction: between integers, floats and packed narrow formats."""

import math
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from .floats import NAN_BITS, PACKED, WIDTH, flush, flush_result, pack2, pack_bits, round_to, tofloat, unpack2
from .formats import (
    CODE_BITS,
    LUT,
    encode_small,
    encode_ue8m0,
    f32_to_bf16,
    f32_to_tf32,
    stochastic_f16,
)
from .lanes import M16, MASK, SDT, UDT, out, vec

# integer type -> (bits, signed)
ITY = {t + str(b): (b, t == "s") for t in "usb" for b in (8, 16, 32, 64)}
_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna", "rs", "rni", "rzi", "rmi", "rpi")
_TO_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@np.errstate(all="ignore")
def cvt(mods, dty, sty, args, dbits):
    """Convert register values.

    mods: modifiers between ``cvt`` and the types (rounding, sat, satfinite, relu, ftz). dty, sty: PTX type names.
    args: the source operands in PTX order (for a two-source form the first goes to the upper half; a four-source form
    lists a, b, e, f from the top down; a stochastic form ends with the random bits). dbits: width of the destination
    register. Raises UnsupportedError for a combination that does not exist.
    """
    rnd = next((m for m in mods if m in _ROUNDINGS), None)
    relu, satfinite, ftz = "relu" in mods, "satfinite" in mods, "ftz" in mods
    if dty in ITY and sty in ITY:
        return _int_to_int(args[0], ITY[dty], ITY[sty], "sat" in mods, dbits)
    if dty in ("bf16x2", "f16x2") and sty == "f32":
        return _pair_from_f32(dty, args, rnd or "rn", relu, satfinite)
    if dty[:-2] in CODE_BITS and dty.endswith(("x2", "x4")):
        return _to_small(dty, sty, args, rnd, relu, dbits)
    if dty == "ue8m0x2":
        lo, hi = _two(sty, args)
        r = encode_ue8m0(lo, rnd, satfinite).astype(np.uint16) | (
            encode_ue8m0(hi, rnd, satfinite).astype(np.uint16) << np.uint16(8)
        )
        return out(r)
    if sty.endswith("x2") and sty[:-2] in LUT:
        return _from_small(dty, sty, args[0], relu)
    if dty in ITY:
        return _float_to_int(args[0], ITY[dty], sty, rnd, ftz, dbits)
    if dty in PACKED or sty in PACKED:
        raise UnsupportedError(f"cvt.{'.'.join(mods)}.{dty}.{sty}")
    if sty in ITY:
        return out(_int_to_float(args[0], ITY[sty], dty, rnd or "rn"))
    return out(_float_to_float(args[0], dty, sty, rnd, ftz, "sat" in mods, relu, satfinite))


def cvt_pack(dty, args):
    """``cvt.pack.sat``: saturate two signed 32-bit integers to ``dty`` (u16, s16, u8, s8, u4, s4, u2, s2) and pack
    ``a`` above ``b``; with a third operand its low bits move above both."""
    bits, signed = int(dty[1:]), dty[0] == "s"
    lo, hi = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)

    def sat(v):
        return np.clip(vec(v, 32).view(np.int32).astype(np.int64), lo, hi).astype(np.uint64) & np.uint64(
            (1 << bits) - 1
        )

    r = (sat(args[0]) << np.uint64(bits)) | sat(args[1])
    if len(args) > 2:
        r = r | (vec(args[2], 32).astype(np.uint64) << np.uint64(2 * bits))
    return out((r & np.uint64(0xFFFFFFFF)).astype(np.uint32))


def _int_to_int(a, dst, src, sat, dbits):
    (db, ds), (sb, ss) = dst, src
    lo, hi = (-(1 << db - 1), (1 << db - 1) - 1) if ds else (0, MASK[db])
    if type(a) is int:
        n = a & MASK[sb]
        if ss and n >> (sb - 1):
            n -= 1 << sb
        if sat:
            n = min(max(n, lo), hi)
        n &= MASK[db]
        if ds and n >> (db - 1):
            n -= 1 << db
        return n & MASK[dbits]
    v: Any = a.astype(UDT[sb])
    if ss:
        v = v.view(SDT[sb])
    if sat:
        v = np.array([min(max(int(x), lo), hi) & MASK[db] for x in v], UDT[db])
    elif ss:
        v = v.astype(np.int64).astype(UDT[db])
    else:
        v = v.astype(UDT[db])
    if ds:
        v = v.view(SDT[db]).astype(SDT[dbits]).view(UDT[dbits])
    return v.astype(UDT[dbits])


def _two(sty, args):
    """(low, high) float arrays of a two-source f32 form or of one packed source."""
    if sty == "f32":
        hi, lo = np.broadcast_arrays(tofloat(args[0], "f32"), tofloat(args[1], "f32"))
        return lo, hi
    if sty in ("f16x2", "bf16x2"):
        return unpack2(args[0], sty)
    raise UnsupportedError(f"packed conversion from {sty}")


def _clamp_negative(x):
    return np.where((x > 0) | np.isnan(x), x, x.dtype.type(0))


def _saturate(bits, ty):
    """Infinities of a 16-bit float to its largest finite magnitude."""
    inf, top = {"f16": (0x7C00, 0x7BFF), "bf16": (0x7F80, 0x7F7F)}[ty]
    return np.where((bits & np.uint16(0x7FFF)) == inf, (bits & np.uint16(0x8000)) | np.uint16(top), bits).astype(
        np.uint16
    )


def _pair_from_f32(dty, args, rnd, relu, satfinite):
    lo, hi = _two("f32", args)
    if relu:
        lo, hi = _clamp_negative(lo), _clamp_negative(hi)
    el = PACKED[dty]
    if rnd == "rs":  # 13 (f16) or 16 (bf16) random bits per half of the last operand
        word = vec(args[2], 32)
        bits = 13 if el == "f16" else 16
        rl, rh = word & np.uint32((1 << bits) - 1), (word >> np.uint32(16)) & np.uint32((1 << bits) - 1)
        lo, rl, hi, rh = np.broadcast_arrays(lo, rl, hi, rh)
        lo, hi = np.ascontiguousarray(lo), np.ascontiguousarray(hi)
        if el == "f16":
            halves = [stochastic_f16(lo, rl), stochastic_f16(hi, rh)]
        else:
            halves = [f32_to_bf16(lo, "rs", rl), f32_to_bf16(hi, "rs", rh)]
    else:
        halves = [round_to(x.astype(np.float64), el, rnd) for x in (lo, hi)]
    if satfinite:
        halves = [_saturate(h, el) for h in halves]
    return pack_bits(halves[0], halves[1], dty)


def _to_small(dty, sty, args, rnd, relu, dbits):
    t, n = dty[:-2], int(dty[-1])
    width = 4 if t == "e2m1" else 8
    if n == 4:
        if rnd != "rs" or sty != "f32":
            raise UnsupportedError(f"cvt.{rnd}.{dty}.{sty}")
        word = vec(args[4], 32)
        # The PTX ISA's figures of rbits: of E2M1 8 bits from each half of the word, the upper ones for the first two
        # operands. That those of the upper half come first has not been compared with a GPU.
        if t == "e2m1":
            first = (word >> np.uint32(24) << np.uint32(8)) | (word >> np.uint32(8) & np.uint32(0xFF))
            second = (word >> np.uint32(16) & np.uint32(0xFF)) << np.uint32(8) | (word & np.uint32(0xFF))
        else:
            first, second = word >> np.uint32(16), word & np.uint32(M16)
        values = [tofloat(a, "f32") for a in (args[3], args[2], args[1], args[0])]
        random = [second, second, first, first]
    else:
        values, random = list(_two(sty, args)), [None, None]
    r: Any = None
    for i, (x, bits) in enumerate(zip(values, random, strict=True)):
        if relu:
            x = _clamp_negative(x)
        if bits is not None:
            x, bits = np.broadcast_arrays(x, bits)
        code = encode_small(x, t, rnd, bits).astype(np.uint32) << np.uint32(width * i)
        r = code if r is None else r | code
    return out(r.astype(UDT[max(dbits, 16)]))


def _from_small(dty, sty, a, relu):
    t = sty[:-2]
    v = vec(a, 16)
    width = 4 if t == "e2m1" else 8
    mask = (1 << CODE_BITS.get(t, 8)) - 1
    if dty not in ("f16x2", "bf16x2", "f32x2"):
        raise UnsupportedError(f"cvt.{dty}.{sty}")
    lo, hi = LUT[t][v & mask], LUT[t][(v >> width) & mask]
    if relu:
        lo, hi = _clamp_negative(lo), _clamp_negative(hi)
    return pack2(lo, hi, dty)


def _float_to_int(a, dst, sty, rnd, ftz, dbits):
    db, ds = dst
    if rnd not in _TO_INTEGRAL:
        raise UnsupportedError(f"cvt.{rnd} from {sty} to an integer")
    x = tofloat(a, sty)
    if ftz:
        x = flush(x, sty)
    x = _TO_INTEGRAL[rnd](x.astype(np.float64))
    lo, hi = (-(1 << db - 1), (1 << db - 1) - 1) if ds else (0, MASK[db])
    nan = 1 << (db - 1) if sty == "f64" or db == 64 else 0  # PTX: only 32-bit and narrower pairs give 0

    def one(t):
        if math.isnan(t):
            v = nan
        elif math.isinf(t):
            v = hi if t > 0 else lo
        else:
            v = min(max(int(t), lo), hi)
        v &= MASK[db]
        if ds and v >> (db - 1):
            v -= 1 << db
        return v & MASK[dbits]

    return out(np.array([one(float(t)) for t in x], UDT[max(dbits, 16)]))


def _int_to_float(a, src, dty, rnd):
    sb, ss = src
    v = np.array([a & MASK[sb]], UDT[sb]) if type(a) is int else a.astype(UDT[sb])
    if ss:
        v = v.view(SDT[sb])
    if sb <= 32:
        return round_to(v.astype(np.float64), dty, rnd)
    if dty == "f64":
        return np.array([_int_to_f64(int(x), rnd) for x in v]).view(np.uint64)
    neg = v < 0 if ss else np.zeros(v.shape, bool)
    m = np.where(neg, -v, v).astype(np.uint64)
    # keep 53 bits and make the last one sticky: the second rounding is then exact
    sticky = (m >> np.uint64(11)) | ((m & np.uint64(0x7FF)) != 0)
    x = np.where(m >> np.uint64(53), sticky.astype(np.float64) * 2048.0, m.astype(np.float64))
    return round_to(np.where(neg, -x, x), dty, rnd)


def _int_to_f64(v, rnd):
    r = float(v)
    if (rnd == "rz" and abs(int(r)) > abs(v)) or (rnd == "rm" and int(r) > v) or (rnd == "rp" and int(r) < v):
        r = math.nextafter(r, {"rz": 0.0, "rm": -math.inf, "rp": math.inf}[rnd])
    return r


_KEPT = {("f32", "bf16"), ("f32", "f64"), ("f16", "f64"), ("f64", "f32"), ("f64", "f16")}
_FRACTION = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}  # bits


def _keep_nan(bits, a, dty, sty):
    """NaN keep sign and payload, as many bits as there are from above; from and to f64 they are made quiet."""
    nan = np.isnan(tofloat(a, sty))
    if not nan.any():
        return bits
    u, (ours, theirs) = vec(a, WIDTH[sty]).astype(np.uint64), (_FRACTION[dty], _FRACTION[sty])
    sign, payload = u >> np.uint64(WIDTH[sty] - 1), u & np.uint64((1 << theirs) - 1)
    payload = payload << np.uint64(ours - theirs) if ours > theirs else payload >> np.uint64(theirs - ours)
    exponent = (1 << (WIDTH[dty] - 1)) - (1 << ours)
    if "f64" in (dty, sty):
        exponent |= 1 << (ours - 1)
    kept = sign << np.uint64(WIDTH[dty] - 1) | np.uint64(exponent) | payload
    return np.where(nan, kept.astype(bits.dtype), bits)


def _float_to_float(a, dty, sty, rnd, ftz, sat, relu, satfinite):
    x = tofloat(a, "f32" if sty == "tf32" else sty)
    if dty == "tf32":
        if rnd not in ("rn", "rz", "rna"):
            raise UnsupportedError(f"cvt.{rnd}.tf32")
        return f32_to_tf32(_clamp_negative(x) if relu else x, rnd, satfinite)
    if dty not in WIDTH:
        raise UnsupportedError(f"cvt to {dty}")
    if ftz and sty == "f32":
        x = flush(x, "f32")
    x = x.astype(np.float64)
    if rnd in _TO_INTEGRAL:
        x, rnd = _TO_INTEGRAL[rnd](x), "rn"
    if sat:
        x = np.where(x > 0, np.minimum(x, 1.0), 0.0)
    if relu:
        x = _clamp_negative(x)
    if ftz and (dty, sty) == ("f32", "f64"):
        x = flush_result(x, "f32", rnd or "rn")
    bits = round_to(x, dty, rnd or "rn")
    if not sat and (dty, sty) in _KEPT:
        bits = _keep_nan(bits, a, dty, sty)
    if ftz and dty == sty == "f32":
        f = flush(bits.view(np.float32), "f32")
        bits = np.where(np.isnan(f), np.uint32(NAN_BITS["f32"]), np.ascontiguousarray(f).view(np.uint32))
    if satfinite:
        if dty not in ("f16", "bf16"):
            raise UnsupportedError(f"cvt.satfinite.{dty}")
        bits = _saturate(bits, dty)
    return bits
