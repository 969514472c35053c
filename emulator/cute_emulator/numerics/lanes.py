"""Integer and bit arithmetic on the 32 lanes of a warp.

A register value is either *uniform* (a Python ``int`` of raw, non-negative bits; ``bool`` for predicates) or a numpy
array of 32 raw bit patterns (``uint16``/``uint32``/``uint64``; ``bool`` for predicates). 8-bit data lives in 16-bit
arrays. Every function takes and returns register values unless it says otherwise; keeping uniform values as Python
integers is what makes address and loop arithmetic cheap.
"""

from typing import Any

import numpy as np

M8, M16, M32, M64 = 0xFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
MASK = {8: M8, 16: M16, 32: M32, 64: M64}
UDT = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SDT = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
LANES = np.arange(32, dtype=np.uint32)


def s16(a):
    """The value as a signed 16-bit number (Python int or int16 array)."""
    return (a - 0x10000 if a & 0x8000 else a) if type(a) is int else a.astype(np.uint16).view(np.int16)


def s32(a):
    """The value as a signed 32-bit number (Python int or int32 array)."""
    return (a - 0x100000000 if a & 0x80000000 else a) if type(a) is int else a.view(np.int32)


def s64(a):
    """The value as a signed 64-bit number (Python int or int64 array)."""
    return (a - (1 << 64) if a >> 63 else a) if type(a) is int else a.view(np.int64)


SIGNED = {16: s16, 32: s32, 64: s64}


def vec(a, bits):
    """The value as an array of ``bits``-wide patterns: 32 elements, or a single one if it is uniform."""
    if type(a) is int:
        return np.array([a & MASK[bits]], UDT[bits])
    if type(a) is bool:
        return np.array([a])
    return a if a.dtype == UDT[bits] else a.astype(UDT[bits])


def full(a, bits):
    """The value as an array of 32 ``bits``-wide patterns."""
    if type(a) is int:
        return np.full(32, a & MASK[bits], UDT[bits])
    return a if a.dtype == UDT[bits] else a.astype(UDT[bits])


def fullp(p):
    """A predicate as an array of 32 booleans."""
    return np.full(32, p) if type(p) is bool else p


def out(r):
    """Turn an array of 1 or 32 patterns back into a register value."""
    return int(r[0]) if r.size == 1 else r


def outp(r):
    """Turn an array of 1 or 32 booleans back into a predicate."""
    return bool(r[0]) if r.size == 1 else r


def merge(m, new, old, bits):
    """``new`` in the lanes of the mask ``m``, ``old`` elsewhere."""
    if type(new) is int and type(old) is int and new == old:
        return new
    return np.where(m, full(new, bits), full(old, bits))


def mergep(m, new, old):
    """:func:`merge` for predicates."""
    if type(new) is bool and type(old) is bool and new == old:
        return new
    return np.where(m, new, old)


def selp(p, a, b, bits):
    """``a`` where the predicate holds, else ``b``."""
    if type(p) is bool:
        return a if p else b
    return np.where(p, full(a, bits), full(b, bits))


def _per_lane(fn, bits_out, *args):
    """Apply a function of Python integers lane by lane (used where no vector form exists)."""
    if all(type(a) in (int, bool) for a in args):
        return fn(*args)
    cols = [np.full(32, a, np.uint64) if type(a) in (int, bool) else a for a in args]
    return np.array([fn(*[int(c[i]) for c in cols]) for i in range(32)], UDT[max(bits_out, 16)])


# ---- shifts ---------------------------------------------------------------------------------------------------------
def shl(a, n, bits):
    """Shift left; amounts of ``bits`` and more give 0."""
    if type(n) is int:
        if n >= bits:
            return 0
        if type(a) is int:
            return (a << n) & MASK[bits]
        return np.left_shift(vec(a, bits), UDT[bits](n))
    x, k = vec(a, bits), np.minimum(n, bits).astype(UDT[bits])
    return np.where(k >= bits, 0, np.left_shift(x, np.minimum(k, bits - 1))).astype(UDT[bits])


def shru(a, n, bits):
    """Logical shift right; amounts of ``bits`` and more give 0."""
    if type(n) is int:
        if n >= bits:
            return 0
        if type(a) is int:
            return a >> n
        return np.right_shift(vec(a, bits), UDT[bits](n))
    x, k = vec(a, bits), np.minimum(n, bits).astype(UDT[bits])
    return np.where(k >= bits, 0, np.right_shift(x, np.minimum(k, bits - 1))).astype(UDT[bits])


def shrs(a, n, bits):
    """Arithmetic shift right; amounts of ``bits`` and more give the sign."""
    if type(n) is int:
        n = min(n, bits - 1)
        if type(a) is int:
            return (SIGNED[bits](a) >> n) & MASK[bits]
        return np.right_shift(vec(a, bits).view(SDT[bits]), SDT[bits](n)).view(UDT[bits])
    x, k = vec(a, bits), np.minimum(n, bits - 1).astype(SDT[bits])
    return np.right_shift(x.view(SDT[bits]), k).view(UDT[bits])


def shf(a, b, c, left, wrap):
    """Funnel shift of the 64-bit value ``b:a`` by ``c`` (modulo 32 with ``wrap``, clamped to 32 without)."""

    def one(a, b, c):
        n = c & 31 if wrap else min(c, 32)
        v = (b << 32) | a
        return ((v << n) >> 32) & M32 if left else (v >> n) & M32

    if type(c) is int and not (type(a) is int and type(b) is int):
        n = c & 31 if wrap else min(c, 32)
        v = (vec(b, 32).astype(np.uint64) << np.uint64(32)) | vec(a, 32).astype(np.uint64)
        r = (v << np.uint64(n)) >> np.uint64(32) if left else v >> np.uint64(n)
        return r.astype(np.uint32)
    return _per_lane(one, 32, a, b, c)


# ---- multiply, divide, compare --------------------------------------------------------------------------------------
def mulhi(a, b, bits, signed):
    """Upper half of the double-width product."""
    if type(a) is int and type(b) is int:
        if signed:
            a, b = SIGNED[bits](a), SIGNED[bits](b)
        return ((a * b) >> bits) & MASK[bits]
    if bits == 64:
        return _per_lane(lambda x, y: mulhi(x, y, 64, signed), 64, a, b)
    p = mulwide(a, b, bits, signed)
    return (p >> p.dtype.type(bits)).astype(UDT[bits])


def mulwide(a, b, bits, signed):
    """Double-width product."""
    if type(a) is int and type(b) is int:
        if signed:
            a, b = SIGNED[bits](a), SIGNED[bits](b)
        return (a * b) & MASK[2 * bits]
    x, y = vec(a, bits), vec(b, bits)
    if signed:
        x, y = x.view(SDT[bits]), y.view(SDT[bits])
        return (x.astype(SDT[2 * bits]) * y.astype(SDT[2 * bits])).view(UDT[2 * bits])
    return x.astype(UDT[2 * bits]) * y.astype(UDT[2 * bits])


def idiv(a, b, bits, signed, rem):
    """Quotient truncated toward zero, or the remainder. Both are all ones for a division by zero."""

    def one(a, b):
        if b == 0:
            return MASK[bits]
        if not signed:
            return a % b if rem else a // b
        x, y = SIGNED[bits](a), SIGNED[bits](b)
        q = abs(x) // abs(y)
        q = -q if (x < 0) != (y < 0) else q
        return ((x - q * y) if rem else q) & MASK[bits]

    return _per_lane(one, bits, a, b)


def iminmax(a, b, bits, signed, mx):
    """The larger (``mx``) or smaller of two integers."""
    if type(a) is int and type(b) is int:
        if signed:
            return (max if mx else min)(SIGNED[bits](a), SIGNED[bits](b)) & MASK[bits]
        return max(a, b) if mx else min(a, b)
    x, y = vec(a, bits), vec(b, bits)
    if signed:
        x, y = x.view(SDT[bits]), y.view(SDT[bits])
    return (np.maximum if mx else np.minimum)(x, y).view(UDT[bits])


def iminmax2(a, b, signed, mx):
    """The larger (``mx``) or smaller of the lower and of the upper halves of two 32-bit integers."""
    kind = np.int16 if signed else np.uint16
    x, y = vec(a, 32).view(kind).reshape(-1, 2), vec(b, 32).view(kind).reshape(-1, 2)
    picked = (np.maximum if mx else np.minimum)(x, y).view(np.uint32).reshape(-1)
    return int(picked[0]) if type(a) is int and type(b) is int else picked


def addsat(a, b, sub):
    """``add.sat.s32`` / ``sub.sat.s32``: clamped to the signed 32-bit range."""

    def one(a, b):
        r = s32(a) - s32(b) if sub else s32(a) + s32(b)
        return min(max(r, -(1 << 31)), (1 << 31) - 1) & M32

    return _per_lane(one, 32, a, b)


# ---- bits and bytes -------------------------------------------------------------------------------------------------
# prmt modes: the four source bytes for each value of the selector's low two bits
_PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def prmt(a, b, c, mode=""):
    """Pick four bytes of ``b:a`` by the nibbles of ``c``; bit 3 of a nibble replicates the byte's sign.

    ``mode`` (f4e, b4e, rc8, ecl, ecr, rc16) replaces the nibbles by a pattern that the low two bits of ``c`` choose.
    """
    if mode:
        return _per_lane(lambda x, y, z: prmt(x, y, _PRMT_MODES[mode][z & 3]), 32, a, b, c)

    def one(a, b, c):
        src = a | (b << 32)
        r = 0
        for i in range(4):
            s = (c >> (4 * i)) & 0xF
            v = (src >> (8 * (s & 7))) & 0xFF
            if s & 8:
                v = 0xFF if v & 0x80 else 0
            r |= v << (8 * i)
        return r

    if type(c) is int and not (type(a) is int and type(b) is int):
        src = vec(a, 32).astype(np.uint64) | (vec(b, 32).astype(np.uint64) << np.uint64(32))
        r = np.zeros_like(src)
        for i in range(4):
            s = (c >> (4 * i)) & 0xF
            v = (src >> np.uint64(8 * (s & 7))) & np.uint64(0xFF)
            if s & 8:
                v = np.where(v & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            r |= v << np.uint64(8 * i)
        return r.astype(np.uint32)
    return _per_lane(one, 32, a, b, c)


def lop3(a, b, c, lut):
    """Compute any three-input boolean function; bit ``4a+2b+c`` of ``lut`` is its value."""
    r: Any
    if type(a) is int and type(b) is int and type(c) is int:
        r = 0
    else:
        a, b, c = vec(a, 32), vec(b, 32), vec(c, 32)
        r = np.zeros(32, np.uint32)
    ones = M32 if type(a) is int else np.uint32(M32)
    for i in range(8):
        if lut >> i & 1:
            x = a if i & 4 else a ^ ones
            y = b if i & 2 else b ^ ones
            z = c if i & 1 else c ^ ones
            r = r | (x & y & z)
    return r


def bfe(a, p, l, bits, signed):
    """Extract ``l`` bits from position ``p`` (both modulo 256); signed: sign-extended from the field's last bit."""

    def one(a, p, l):
        p, l = p & 0xFF, l & 0xFF
        sign = 0
        if signed and l:
            sign = (a >> min(p + l - 1, bits - 1)) & 1
        have = max(0, min(l, bits - p))
        v = (a >> p) & ((1 << have) - 1) if have else 0
        return v | (MASK[bits] & ~((1 << have) - 1)) if sign else v

    return _per_lane(one, bits, a, p, l)


def bfi(a, b, p, l, bits):
    """Insert the low ``l`` bits of ``a`` into ``b`` at position ``p`` (both modulo 256)."""

    def one(a, b, p, l):
        p, l = p & 0xFF, l & 0xFF
        m = (((1 << l) - 1) << p) & MASK[bits]
        return (b & ~m) | ((a << p) & m)

    return _per_lane(one, bits, a, b, p, l)


def _parts(a, bits, signed):
    """The values packed in a 32-bit register, lowest first: int64 of shape (lanes, 32 // bits)."""
    return vec(a, 32)[:, None].view((SDT if signed else UDT)[bits]).astype(np.int64)


def dp4a(a, b, c, signed_a, signed_b):
    """``c`` plus the dot product of four bytes of ``a`` with four of ``b``."""
    products = _parts(a, 8, signed_a) * _parts(b, 8, signed_b)
    return out((products.sum(1) + vec(c, 32)).astype(np.uint32))


def dp2a(a, b, c, signed_a, signed_b, high):
    """``c`` plus the dot product of the halves of ``a`` with the two low (or high) bytes of ``b``."""
    pair = _parts(b, 8, signed_b)[:, 2:] if high else _parts(b, 8, signed_b)[:, :2]
    products = _parts(a, 16, signed_a) * pair
    return out((products.sum(1) + vec(c, 32)).astype(np.uint32))


def clz(a, bits):
    """Count of leading zeros."""
    return _per_lane(lambda x: bits - x.bit_length(), 32, a)


def popc(a):
    """Count of one bits."""
    return _per_lane(lambda x: x.bit_count(), 32, a)


def brev(a, bits):
    """Bits in reverse order."""
    return _per_lane(lambda x: int(f"{x:0{bits}b}"[::-1], 2), bits, a)


def fns(mask, base, offset):
    """Position of the n-th set bit of ``mask`` from ``base`` upwards (n = ``offset``), or all ones if there is none.

    A negative offset searches downwards, and 0 looks at the bit ``base`` alone.
    """

    def one(mask, base, offset):
        n = s32(offset)
        last = base + 1 if n == 0 else 32 if n > 0 else -1
        positions = [p for p in range(base, last, -1 if n < 0 else 1) if mask >> p & 1]
        index = max(abs(n), 1) - 1
        return positions[index] if index < len(positions) else M32

    return _per_lane(one, 32, mask, base, offset)


def bfind(a, bits, signed, shiftamt):
    """Position of the most significant non-sign bit (or the shift that brings it to the top); all ones if none."""

    def one(x):
        if signed and x >> (bits - 1):
            x = ~x & MASK[bits]
        r = x.bit_length() - 1
        if r < 0:
            return M32
        return bits - 1 - r if shiftamt else r

    return _per_lane(one, 32, a)
