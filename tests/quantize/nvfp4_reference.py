"""NVFP4 written again with plain loops over single numbers: the reference of the byte-equality tests.

Numbers are ``numpy.float32`` scalars, whose operations are IEEE. Matrices are lists of rows; a group is one matrix.
"""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

F = np.float32
FLT_MAX = F(np.finfo(np.float32).max)
SIXTH = np.array([0x3E2AAAAB], dtype=np.uint32).view(np.float32)[0]
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


E4M3 = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float).tolist()
E2M1 = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(float).tolist()


def _code(value, largest, dtype):
    """Return the code of the nearest element, of two equally near ones the even one; saturating."""
    return int(F(min(max(value, -largest), largest)).astype(dtype).view(np.uint8))


def e4m3(value):
    return _code(value, 448.0, ml_dtypes.float8_e4m3fn)


def e2m1(value):
    return _code(value, 6.0, ml_dtypes.float4_e2m1fn)


def e2m1_stochastic(value, random):
    """Up in magnitude if ``random`` of 2^16 is below the distance to the lower neighbour, in 2^-16 of a step."""
    magnitude = min(abs(float(value)), 6.0)
    lower = max(i for i in range(8) if E2M1[i] <= magnitude)
    if E2M1[lower] != magnitude:
        distance = (Fraction(magnitude) - Fraction(E2M1[lower])) / Fraction(E2M1[lower + 1] - E2M1[lower])
        lower += random < round(distance * 65536)  # of Fractions, round is to nearest even
    return lower | (8 if np.signbit(value) else 0)


def bfloat16(value):
    return F(torch.tensor([float(value)], dtype=torch.float64).float().bfloat16().double().item())


def group_scales(amax):
    encode = F(1.0) if amax == 0 else min(F(2688.0) / F(amax), FLT_MAX)
    return encode, F(1.0) / encode


def finite_amax(values):
    return max((abs(v) for v in values if np.isfinite(v)), default=F(0.0))


def block(values, members, amax, random=None):
    """Scale byte and nibbles of a block; ``members`` are the values that decide its scale."""
    if not all(np.isfinite(v) for v in members):
        return 0x7F, [0x7] * len(values)
    encode, decode = group_scales(amax)
    scale = e4m3(max(abs(v) for v in members) * (encode * SIXTH))
    multiplier = min(F(1.0) / (F(E4M3[scale]) * decode), FLT_MAX)
    scaled = [v * multiplier for v in values]
    if random is None:
        return scale, [e2m1(v) for v in scaled]
    return scale, [e2m1_stochastic(v, r) for v, r in zip(scaled, random)]


def hadamard(values):
    """16 numbers: signs, butterfly at distance 1, 2, 4, 8, a quarter, bfloat16."""
    values = [v * F(s) for v, s in zip(values, SIGNS)]
    for distance in (1, 2, 4, 8):
        for i in range(16):
            if not i & distance:
                a, b = values[i], values[i + distance]
                values[i], values[i + distance] = a + b, a - b
    return [bfloat16(v * F(0.25)) for v in values]


def philox(counter, key):
    """Philox 4x32-10 on Python integers."""
    mask = 2**32 - 1
    for _ in range(10):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & mask,
            (first >> 32) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def random_bits(position, seed, offset, stream):
    """The sixteen 16-bit numbers of the block at a position."""
    numbers = []
    for half in range(2):
        low, offset64 = 2 * position + half, offset % 2**64
        counter = [low % 2**32, low >> 32 | stream << 31, offset64 % 2**32, offset64 >> 32]
        for word in philox(counter, [seed % 2**32, seed % 2**64 >> 32]):
            numbers += [word & 0xFFFF, word >> 16]
    return numbers


def pack(nibbles):
    return [low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2])]


def encode_rows(rows, amax, positions=None, rng=None, stream=0, square=False):
    """Bytes and scale bytes of every row of a matrix; ``square``: 16 rows share a scale."""
    data, scales = [], []
    for i, row in enumerate(rows):
        band = rows[i // 16 * 16 : i // 16 * 16 + 16] if square else [row]
        nibbles, row_scales = [], []
        for b in range(0, len(row), 16):
            members = [v for other in band for v in other[b : b + 16]]
            random = random_bits(positions[i][b // 16], *rng, stream) if rng else None
            scale, codes = block(row[b : b + 16], members, amax, random)
            nibbles += codes
            row_scales.append(scale)
        data.append(pack(nibbles))
        scales.append(row_scales)
    return data, scales


def blocked(placed, rows, columns):
    """Bytes of ``{(y, x): scale}`` in tiles of 128 x 4."""
    across = (columns + 3) // 4
    flat = [0] * (512 * ((rows + 127) // 128) * across)
    for (y, x), byte in placed.items():
        flat[(y // 128 * across + x // 4) * 512 + y % 32 * 16 + y % 128 // 32 * 4 + x % 4] = byte
    return flat


def _tensor(values, shape, dtype=torch.uint8):
    made = torch.tensor(values, dtype=dtype)
    return made.reshape(shape) if made.numel() else made.reshape([max(n, 0) for n in shape])


def grouped(x, sizes, *, rht=False, rng=None, layout="compact"):
    """Components of rows ``[T, K]`` in groups, as tensors by name."""
    rows, k = x.shape
    values = [[F(v) for v in row] for row in x.double().tolist()]
    blocks, groups = -(-k // 16), len(sizes)
    units = max(-(-rows // 64) + groups - 1, 0)
    data, scales = [[0] * (k // 2) for _ in range(rows)], [[0] * blocks for _ in range(rows)]
    columnwise = [[0] * (32 * units) for _ in range(k)]
    columnwise_scales = [[0] * (4 * units) for _ in range(k)]
    amax, columnwise_amax, placed = [], [], {}
    start = 0
    for g, size in enumerate(sizes):
        group = values[start : start + size]
        amax.append(finite_amax(v for row in group for v in row))
        positions = [[t * blocks + b for b in range(blocks)] for t in range(start, start + size)]
        data[start : start + size], scales[start : start + size] = encode_rows(group, amax[-1], positions, rng)
        for i in range(size):
            for b in range(blocks):
                placed[128 * (start // 128 + g) + i, b] = scales[start + i][b]
        turned = [[row[column] for row in group] for column in range(k)]
        turned = [row + [F(0.0)] * (-size % 16) for row in turned]
        if rht:
            turned = [[v for r in range(0, len(row), 16) for v in hadamard(row[r : r + 16])] for row in turned]
        columnwise_amax.append(finite_amax(v for row in turned for v in row))
        run = 4 * (start // 64 + g)
        positions = [[(run + r) * k + column for r in range(len(turned[0]) // 16)] for column in range(k)]
        bytes_, byte_scales = encode_rows(turned, columnwise_amax[-1], positions, rng, 1)
        for column in range(k):
            columnwise[column][8 * run : 8 * run + len(bytes_[column])] = bytes_[column]
            columnwise_scales[column][run : run + len(byte_scales[column])] = byte_scales[column]
        start += size
    made = {
        "data": _tensor(data, (rows, k // 2)),
        "scale": _tensor(scales, (rows, blocks)),
        "amax": _tensor([float(v) for v in amax], (groups,), torch.float32),
        "columnwise_data": _tensor(columnwise, (k, 32 * units)),
        "columnwise_scale": _tensor(columnwise_scales, (k, 4 * units)),
        "columnwise_amax": _tensor([float(v) for v in columnwise_amax], (groups,), torch.float32),
    }
    if layout == "blocked":
        high = 128 * max(-(-rows // 128) + groups - 1, 0)
        made["scale"] = _tensor(blocked(placed, high, blocks), (-1,))
        turned = {(y, x): byte for y, row in enumerate(columnwise_scales) for x, byte in enumerate(row)}
        made["columnwise_scale"] = _tensor(blocked(turned, k, 4 * units), (-1,))
    return made


def matrices(x, *, square=False, rng=None, layout="compact"):
    """Components of weights ``[G, N, K]``, as tensors by name."""
    groups, n, k = x.shape
    blocks, runs = -(-k // 16), -(-n // 16)
    found = {name: [] for name in ("data", "scale", "amax", "columnwise_data", "columnwise_scale", "columnwise_amax")}
    for g in range(groups):
        rows = [[F(v) for v in row] for row in x[g].double().tolist()]
        amax = finite_amax(v for row in rows for v in row)
        positions = [[(g * n + i) * blocks + b for b in range(blocks)] for i in range(n)]
        data, scale = encode_rows(rows, amax, positions, rng, 0, square)
        turned = [[row[column] for row in rows] for column in range(k)]
        positions = [[(g * runs + r) * k + column for r in range(runs)] for column in range(k)]
        columnwise, columnwise_scale = encode_rows(turned, amax, positions, rng, 1, square)
        if layout == "blocked":
            scale = blocked({(y, c): b for y, row in enumerate(scale) for c, b in enumerate(row)}, n, blocks)
            placed = {(y, c): b for y, row in enumerate(columnwise_scale) for c, b in enumerate(row)}
            columnwise_scale = blocked(placed, k, runs)
        for name, value in zip(found, (data, scale, float(amax), columnwise, columnwise_scale, float(amax))):
            found[name].append(value)
    shapes = {
        "data": (groups, n, k // 2),
        "scale": (groups, n, blocks) if layout == "compact" else (groups, -1),
        "amax": (groups,),
        "columnwise_data": (groups, k, n // 2),
        "columnwise_scale": (groups, k, runs) if layout == "compact" else (groups, -1),
        "columnwise_amax": (groups,),
    }
    return {
        name: _tensor(value, shapes[name], torch.float32 if name.endswith("amax") else torch.uint8)
        for name, value in found.items()
    }


def dequantize(data, scale, amax):
    """float32 ``[rows][columns]`` of one matrix from its bytes, compact scale bytes and amax."""
    decode = group_scales(F(amax))[1]
    rows = []
    for bytes_, byte_scales in zip(data.tolist(), scale.tolist()):
        row = []
        for i, byte in enumerate(bytes_):
            code = byte_scales[i // 8]
            unit = F(math.nan) if code == 0x7F else F(E4M3[code]) * decode
            for nibble in (byte & 15, byte >> 4):
                row.append(F(-E2M1[nibble & 7] if nibble & 8 else E2M1[nibble]) * unit)
        rows.append(row)
    return rows


def hadamard_back(values):
    """The inverse in float32: butterfly, a quarter, signs."""
    values = list(values)
    for distance in (1, 2, 4, 8):
        for i in range(16):
            if not i & distance:
                a, b = values[i], values[i + distance]
                values[i], values[i + distance] = a + b, a - b
    return [v * F(0.25) * F(s) for v, s in zip(values, SIGNS)]
