"""The formats written again, one element at a time: what the bytes of every component must be.

Python floats hold float32 values exactly; ``f32`` is where a float32 operation rounds.
"""

from __future__ import annotations

import bisect
import math
import struct

import ml_dtypes
import numpy as np

NAN = float("nan")
FLT_MAX = float(np.finfo(np.float32).max)


def f32(value):
    """The float32 nearest to a Python float."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def from_bits(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def to_bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


class Element:
    """An FP8 or FP4 type of ``ml_dtypes``; the index of one of its non-negative ``values`` is its code.

    ``nan`` is the code of the elements of a block that holds Inf or NaN.
    """

    def __init__(self, dtype, inverse_max, nan=0x7F):
        about, self.nan = ml_dtypes.finfo(dtype), nan
        self.dtype, self.mantissa, self.max = dtype, about.nmant, float(about.max)
        last = int(np.float32(self.max).astype(dtype).view(np.uint8))
        self.values = np.arange(last + 1, dtype=np.uint8).view(dtype).astype(float).tolist()
        self.max_exponent, self.inverse_max = math.frexp(self.max)[1] - 1, from_bits(inverse_max)

    def cast(self, value):
        """Nearest, ties to the even code, saturating; one NaN."""
        if math.isnan(value):
            return self.nan
        return int(np.float32(min(max(value, -self.max), self.max)).astype(self.dtype).view(np.uint8))


E4M3 = Element(ml_dtypes.float8_e4m3fn, 0x3B124925)
E5M2 = Element(ml_dtypes.float8_e5m2, 0x37924925)
E2M1 = Element(ml_dtypes.float4_e2m1fn, 0x3E2AAAAB, 0x7)
POWERS = [2.0 ** (byte - 127) for byte in range(255)]


def largest(values):
    """Maximum magnitude; NaN if any is."""
    amax = 0.0
    for value in values:
        if math.isnan(value):
            return NAN
        amax = max(amax, abs(value))
    return amax


def e8m0(amax, element, scaling):
    """The scale byte of a block."""
    if not math.isfinite(amax):
        return 0xFF
    if scaling == "rceil":
        return bisect.bisect_left(POWERS, f32(amax * element.inverse_max))  # the product of two float32 is exact
    fraction, exponent = math.frexp(amax)  # amax = fraction * 2^exponent, fraction in [0.5, 1)
    if scaling == "even":
        steps = 2.0 ** (element.mantissa + 1)
        fraction = math.floor(fraction * steps + 0.5) / steps
        exponent += fraction == 1.0
    return max(exponent - 1 + 127 - element.max_exponent, 0) if amax else 0


def mx_block(values, element, scaling):
    """Scale byte and element bytes."""
    byte = e8m0(largest(values), element, scaling)
    if byte == 0xFF:
        return byte, [element.nan] * len(values)
    return byte, [element.cast(f32(value * 2.0 ** (127 - byte))) for value in values]


def fp8_scale(amax, element, power_of_two, eps):
    """``scale`` and ``scale_inv``."""
    if not math.isfinite(amax):
        return 1.0, NAN
    amax = max(amax, eps)
    with np.errstate(over="ignore"):
        scale = 1.0 if amax == 0 else min(float(np.float32(element.max) / np.float32(amax)), FLT_MAX)
    if power_of_two:
        scale = from_bits(to_bits(scale) & 0xFF800000)
    return scale, float(np.float32(1) / np.float32(scale))


def fp8_block(values, element, power_of_two, eps):
    """``scale_inv`` and element bytes."""
    scale, inverse = fp8_scale(largest(values), element, power_of_two, eps)
    return inverse, [element.cast(f32(value * scale)) for value in values]


# --- layouts ----------------------------------------------------------------------------------------------------------


def begins(ends, unit):
    """Coordinate of every group's first token."""
    return [(first // unit + group) * unit for group, first in enumerate([0, *ends][: len(ends)])]


def padded(rows, groups, unit):
    return unit * max(math.ceil(rows / unit) + groups - 1, 0)


def blocked_offset(y, x, columns):
    return ((y // 128) * math.ceil(columns / 4) + x // 4) * 512 + (y % 32) * 16 + ((y % 128) // 32) * 4 + x % 4


def blocked_bytes(rows, columns):
    return 512 * math.ceil(rows / 128) * math.ceil(columns / 4)


class Sink:
    """The scales of one matrix ``[rows, columns]``, compact (perhaps stored transposed) or blocked."""

    def __init__(self, rows, columns, dtype, blocked):
        self.columns, self.blocked = columns, blocked
        self.array = np.zeros(blocked_bytes(rows, columns) if blocked else (rows, columns), dtype)

    def put(self, y, x, value):
        self.array[blocked_offset(y, x, self.columns) if self.blocked else (y, x)] = value


class Operand:
    """Rows in groups, or (``ends=None``) one matrix, which is a single group without placement."""

    def __init__(self, x, ends):
        self.x, self.rows, self.columns = x, *x.shape
        self.placed = ends is not None
        self.ends = list(ends) if self.placed else [self.rows]

    def groups(self):
        first = 0
        for group, end in enumerate(self.ends):
            yield group, range(first, end)
            first = end

    def begins(self, unit):
        return begins(self.ends, unit) if self.placed else [0]

    def padded(self, unit):
        return padded(self.rows, len(self.ends), unit) if self.placed else self.rows

    def units(self, unit, block):
        return self.padded(unit) // block if self.placed else math.ceil(self.rows / block)

    def rowwise(self, block, make, sink, data, unit):
        """``make(values) -> scale, bytes`` for every block along the columns."""
        for group, rows in self.groups():
            for t in rows:
                for b in range(math.ceil(self.columns / block)):
                    columns = range(b * block, min((b + 1) * block, self.columns))
                    scale, data[t, columns.start : columns.stop] = make([float(self.x[t, k]) for k in columns])
                    sink.put(self.begins(unit)[group] + t - rows.start if sink.blocked else t, b, scale)

    def columnwise(self, block, make, put_scale, put_byte):
        """The same along the rows; ``put_byte(group, row, row in the group, column, byte)``."""
        for group, rows in self.groups():
            for b in range(math.ceil(len(rows) / block)):
                chosen = rows[b * block : (b + 1) * block]
                for k in range(self.columns):
                    scale, made = make([float(self.x[t, k]) for t in chosen])
                    put_scale(group, b, k, scale)
                    for t, byte in zip(chosen, made):
                        put_byte(group, t, t - rows.start, k, byte)


# --- formats ----------------------------------------------------------------------------------------------------------

EMPTY_FLOAT, EMPTY_BYTE = np.zeros(0, np.float32), np.zeros(0, np.uint8)


def mxfp8(x, ends, element=E4M3, scaling="rceil", blocked=False):
    operand = Operand(x, ends)
    (rows, columns), across = x.shape, math.ceil(x.shape[1] / 32)

    def make(values):
        return mx_block(values, element, scaling)

    data, other = np.zeros((rows, columns), np.uint8), np.zeros((rows, columns), np.uint8)
    sink = Sink(operand.padded(128) if blocked else rows, across, np.uint8, blocked)
    operand.rowwise(32, make, sink, data, 128)
    down = operand.units(128, 32)
    scales = Sink(columns if blocked else down, down if blocked else columns, np.uint8, blocked)
    first = [begin // 32 for begin in operand.begins(128)]

    def put_scale(group, b, k, scale):
        scales.put(*((k, first[group] + b) if blocked else (first[group] + b, k)), scale)

    def put_byte(group, t, i, k, byte):
        other[t, k] = byte

    operand.columnwise(32, make, put_scale, put_byte)
    return data, sink.array, EMPTY_FLOAT, other, scales.array, EMPTY_FLOAT


def pairs(codes):
    """Two E2M1 codes in a byte, the first in the low half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def mxfp4(x, ends, scaling="rceil", blocked=False):
    operand = Operand(x, ends)
    (rows, columns), across = x.shape, math.ceil(x.shape[1] / 32)

    def make(values):
        return mx_block(values, E2M1, scaling)

    data, other = np.zeros((rows, columns), np.uint8), np.zeros((columns, operand.padded(128)), np.uint8)
    sink = Sink(operand.padded(128) if blocked else rows, across, np.uint8, blocked)
    operand.rowwise(32, make, sink, data, 128)
    scales = Sink(columns, operand.units(128, 32), np.uint8, blocked)
    begins = operand.begins(128)

    def put_scale(group, b, k, scale):
        scales.put(k, begins[group] // 32 + b, scale)
        if scale == 0xFF:  # places of the block that no token has, too
            first = begins[group] + b * 32
            other[k, first : first + 32] = E2M1.nan

    def put_byte(group, t, i, k, byte):
        other[k, begins[group] + i] = byte

    operand.columnwise(32, make, put_scale, put_byte)
    return pairs(data), sink.array, EMPTY_FLOAT, pairs(other), scales.array, EMPTY_FLOAT


def fp8_tensor(x, ends, element=E4M3, power_of_two=False, eps=0.0, scale=None):
    operand = Operand(x, ends)
    data = np.zeros(x.shape, np.uint8)
    turned = np.zeros((x.shape[1], operand.padded(32)), np.uint8)
    inverses, amaxes = np.zeros(len(operand.ends), np.float32), np.zeros(len(operand.ends), np.float32)
    for group, rows in operand.groups():
        amaxes[group] = largest(float(v) for v in x[rows.start : rows.stop].flat)
        made, inverses[group] = fp8_scale(float(amaxes[group]), element, power_of_two, eps)
        if scale is not None:
            made, inverses[group] = float(scale[group]), np.float32(1) / np.float32(scale[group])
        for t in rows:
            for k in range(x.shape[1]):
                data[t, k] = element.cast(f32(float(x[t, k]) * made))
                turned[k, operand.begins(32)[group] + t - rows.start] = data[t, k]
    return data, inverses, amaxes, turned, inverses, amaxes


def fp8_block_1d(x, ends, element=E4M3, power_of_two=True, eps=0.0):
    operand = Operand(x, ends)
    columns = x.shape[1]

    def make(values):
        return fp8_block(values, element, power_of_two, eps)

    data = np.zeros(x.shape, np.uint8)
    sink = Sink(x.shape[0], math.ceil(columns / 128), np.float32, False)
    operand.rowwise(128, make, sink, data, 128)
    scales = np.zeros((operand.units(128, 128), columns), np.float32)
    turned = np.zeros((columns, operand.padded(32)), np.uint8)

    def put_scale(group, b, k, scale):
        scales[operand.begins(128)[group] // 128 + b, k] = scale

    def put_byte(group, t, i, k, byte):
        turned[k, operand.begins(32)[group] + i] = byte

    operand.columnwise(128, make, put_scale, put_byte)
    return data, sink.array, EMPTY_FLOAT, turned, scales, EMPTY_FLOAT


def fp8_block_2d(x, element=E4M3, power_of_two=True, eps=0.0):
    """Return the components of one matrix."""
    rows, columns = x.shape
    data = np.zeros(x.shape, np.uint8)
    scales = np.zeros((math.ceil(rows / 128), math.ceil(columns / 128)), np.float32)
    for b in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            places = [
                (n, k)
                for n in range(b * 128, min(b * 128 + 128, rows))
                for k in range(c * 128, min(c * 128 + 128, columns))
            ]
            scales[b, c], made = fp8_block([float(x[p]) for p in places], element, power_of_two, eps)
            for place, byte in zip(places, made):
                data[place] = byte
    return data, scales, EMPTY_FLOAT, data.T, scales.T, EMPTY_FLOAT
