"""NVFP4 arithmetic in registers, to the bit that of the CPU: scales, E2M1 elements, random bits, Hadamard transform.

Elements are PTX: what is written as ``.rn`` is not contracted, so every operation rounds once.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute

from ..bits import INFINITY, NAN, as_bits, as_float
from ..instructions import e4m3_byte, e4m3_value
from .lane_tile import LANES, STEPS, VECTOR

BLOCK = 16
LARGEST = 0x7F7FFFFF
RANGE = 2688.0  # 448 * 6, the largest E4M3 times the largest E2M1
SIXTH = 0x3E2AAAAB  # float32(1 / 6)
SCALES = 128  # bytes without a sign
SCALE_NAN = 0x7F
ROUNDER = 0x4B400000  # 1.5 * 2^23
NORMAL = 0x3C800000  # 2^-6, the smallest scale of full precision
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

# --- scales -----------------------------------------------------------------------------------------------------------


@cute.jit
def group_scales(amax: Float32) -> tuple[Float32, Float32]:
    """Return the encoding and decoding scale of a group, from its finite amax."""
    encode = as_float(cutlass.min(as_bits(Float32(RANGE) / amax), Int32(LARGEST)))
    if as_bits(amax) == 0:
        encode = Float32(1.0)
    return encode, Float32(1.0) / encode


@cute.jit
def multiplier(byte: Int32, decode: Float32) -> Float32:
    """Return the multiplier of the elements of a block with this scale; NaN if the block holds Inf or NaN."""
    scale = e4m3_value(Uint8(byte))
    inverse = cutlass.min(as_bits(Float32(1.0) / (scale * decode)), Int32(LARGEST))
    if byte == SCALE_NAN:
        inverse = Int32(NAN)
    return as_float(inverse)


def scale_bytes(maxima, factor: Float32) -> tuple[Int32, Any]:
    """E4M3 bytes of four blocks in a word, and whether one has to be clamped, as its scale is coarse, or is broken.

    ``maxima`` are bits of float32.
    """
    word, coarse = Int32(0), cutlass.Boolean(False)
    for i, bits in enumerate(maxima):
        product = as_float(bits) * factor
        byte = e4m3_byte(product)
        broken = bits >= INFINITY
        byte = cutlass.select_(broken, Int32(SCALE_NAN), byte)
        coarse = coarse | broken | ((bits > 0) & (as_bits(product) < NORMAL))
        word = word | (byte << (8 * i))
    return word, coarse


# --- elements ---------------------------------------------------------------------------------------------------------


class Eight(NamedTuple):
    """Eight values of a lane, next to each other in memory or in a column; widened where they are used.

    So the assembler does not keep all 64 of a lane as float32 for both directions.

    Attributes:
        words: what holds them, four or eight.
        halves: which half of its word each is, None of float32.
        kind: their dtype.
    """

    words: list
    halves: list
    kind: Any


def row_of(values, i: int) -> Eight:
    """Return the values of a row of a lane's ``(VECTOR, STEPS)``."""
    words = cute.recast_tensor(values, Int32)
    many = cute.size(words, mode=[0])
    halves = [None] * VECTOR if many == VECTOR else [0, 1] * many
    return Eight([words[j, i] for j in range(many)], halves, values.element_type)


def column_of(values, j: int) -> Eight:
    """Return the values of a column."""
    words = cute.recast_tensor(values, Int32)
    whole = cute.size(words, mode=[0]) == VECTOR
    halves = [None if whole else j % 2] * STEPS
    return Eight([words[j if whole else j // 2, i] for i in range(STEPS)], halves, values.element_type)


def nearest(values: Eight, factor: Float32, converts: bool, clamped: bool) -> Int32:
    """Return eight E2M1 elements of ``values * factor`` in a word: nearest, ties to even, saturating, NaN to 0x7.

    Args:
        values: the values to round.
        factor: their multiplier.
        converts: whether the architecture has an instruction for it.
        clamped: without one, whether products may be 7 or more, or NaN.
    """
    lines = _converted(values) if converts else _by_addition(values, clamped)
    return cute.arch.inline_ptx(
        "\n".join(("{", *lines, "}")), write_only_types=[Int32], read_only_args=[factor, *values.words]
    )


REGISTERS = f".reg .f32 y<{VECTOR}>;\n.reg .b32 wide;\n.reg .b16 narrow<2>;"


def _product(values: Eight, i: int, magnitude: bool = False) -> list[str]:
    """``y{i}``, or its magnitude; the words are the operands after the factor, which is not negative."""
    word, half = f"{{$r{1 + i * len(values.words) // VECTOR}}}", values.halves[i]
    product = [f"abs.f32 y{i}, y{i};"] * magnitude + [f"mul.rn.f32 y{i}, y{i}, {{$r0}};"]
    if half is None:
        return [f"mov.b32 y{i}, {word};", *product]
    if values.kind is BFloat16:
        widen = f"and.b32 wide, {word}, 0xFFFF0000;" if half else f"shl.b32 wide, {word}, 16;"
        return [widen, f"mov.b32 y{i}, wide;", *product]
    return [f"mov.b32 {{narrow0, narrow1}}, {word};", f"cvt.f32.f16 y{i}, narrow{half};", *product]


def _converted(values: Eight) -> list[str]:
    lines = [REGISTERS, f".reg .b8 b<{VECTOR // 2}>;"]
    for i in range(0, VECTOR, 2):
        lines += [*_product(values, i), *_product(values, i + 1)]
        lines.append(f"cvt.rn.satfinite.e2m1x2.f32 b{i // 2}, y{i + 1}, y{i};")
    return [*lines, "mov.b32 {$w0}, {b0, b1, b2, b3};"]


def _by_addition(values: Eight, clamped: bool) -> list[str]:
    """Round by adding 1.5 * 2^23, which leaves an integer in the low bits.

    The code of a magnitude y is ``min(2 y, y + 2, y / 2 + 4)`` before rounding. The least of the three sums, each
    rounded on its own, is the same, and ties go to the same side, as 2 and 4 are even. Signs are gathered from the
    values.
    """
    lines = [REGISTERS, ".reg .f32 a, b, c;", ".reg .b32 m, n, word;", ".reg .pred broken;"]
    lines.append(f"mov.b32 word, {-sum(ROUNDER << (4 * i) for i in range(VECTOR)) & 0xFFFFFFFF:#x};")
    for i in range(VECTOR):
        lines += _product(values, i, magnitude=True)
        if clamped:
            lines.append(f"min.f32 y{i}, y{i}, 0f40C00000;")
        lines += [
            f"fma.rn.f32 a, y{i}, 0f40000000, 0f{ROUNDER:08X};",
            f"add.rn.f32 b, y{i}, 0f{ROUNDER + 2:08X};",
            f"fma.rn.f32 c, y{i}, 0f3F000000, 0f{ROUNDER + 4:08X};",
            "mov.b32 m, a;",
            "mov.b32 n, b;",
            "min.s32 m, m, n;",
            "mov.b32 n, c;",
            "min.s32 m, m, n;",
            f"mad.lo.s32 word, m, {1 << (4 * i)}, word;",
        ]
    lines += [*_signs(values), "or.b32 word, word, m;"]
    if clamped:
        lines += ["setp.nan.f32 broken, {$r0}, {$r0};", "selp.b32 word, 0x77777777, word, broken;"]
    return [*lines, "mov.b32 {$w0}, word;"]


def _signs(values: Eight) -> list[str]:
    """``m``: the signs, each in the upper bit of its nibble."""
    words = [f"{{$r{1 + i}}}" for i in range(len(values.words))]
    lines = [".reg .b32 p, q, even, odd;"]
    if len(words) == VECTOR // 2:
        lines += [
            f"prmt.b32 p, {words[0]}, {words[1]}, 0x7351;",
            f"prmt.b32 q, {words[2]}, {words[3]}, 0x7351;",
            "prmt.b32 even, p, q, 0x5410;",
            "prmt.b32 odd, p, q, 0x7632;",
        ]
    else:
        top = 3 if values.halves[0] is None else 1 + 2 * values.halves[0]
        for name, first in (("even", 0), ("odd", 1)):
            lines += [
                f"prmt.b32 p, {words[first]}, {words[first + 2]}, {top | (top + 4) << 4:#x};",
                f"prmt.b32 q, {words[first + 4]}, {words[first + 6]}, {top | (top + 4) << 4:#x};",
                f"prmt.b32 {name}, p, q, 0x5410;",
            ]
    return [
        *lines,
        "shr.b32 even, even, 4;",
        "and.b32 even, even, 0x08080808;",
        "and.b32 odd, odd, 0x80808080;",
        "or.b32 m, even, odd;",
    ]


def stochastic(values: Eight, factor: Float32, random) -> Int32:
    """Return elements as ``nearest`` does, but rounded up with a probability equal to the distance from the lower one.

    ``random``: four words, each with 16 bits for two elements. The distance counts in units of 2^-16 of a step.
    """
    lines = [REGISTERS, ".reg .f32 m, p;", ".reg .b32 r, c, s, word;", "mov.b32 word, 0;"]
    for i in range(VECTOR):
        word = f"{{$r{1 + len(values.words) + i // 2}}}"
        lines += [
            *_product(values, i),
            f"abs.f32 m, y{i};",
            "min.f32 m, m, 0f40C00000;",
            "max.f32 p, m, 0f3F800000;",
            "and.b32 p, p, 0x7F800000;",
            "fma.rn.f32 m, p, 0f42C00000, m;",  # 1.5 * 2^6 p
            f"shr.u32 r, {word}, 16;" if i % 2 else f"and.b32 r, {word}, 0xFFFF;",
            "and.b32 c, m, 0x7FFFF;",
            "add.s32 c, c, 0xFFFF;",
            "sub.s32 c, c, r;",
            "shr.u32 c, c, 16;",
            "shr.b32 s, m, 22;",
            "add.s32 c, c, s;",
            f"sub.s32 c, c, {2 * (149 - 16) + 1};",
            f"shr.b32 s, y{i}, 28;",
            "and.b32 s, s, 8;",
            "or.b32 c, c, s;",
            f"shl.b32 c, c, {4 * i};",
            "or.b32 word, word, c;",
        ]
    return cute.arch.inline_ptx(
        "\n".join(("{", *lines, "mov.b32 {$w0}, word;", "}")),
        write_only_types=[Int32],
        read_only_args=[factor, *values.words, *random],
    )


def drawn(values: Eight, factor: Float32, random) -> Int32:
    """Return ``stochastic`` by an instruction of some chips, which takes two words of random bits.

    The upper two elements of four get 16 bits from the upper bytes of a word's halves, the higher one first, and the
    two below get the lower bytes (PTX ISA, ``cvt.rs`` to ``.e2m1x4``). The magnitude is rounded up where its distance
    from the lower neighbour, in steps, plus the bits, as a fraction, is at least 1.
    """
    lines = [REGISTERS]
    for i in range(VECTOR):
        lines += _product(values, i)
    words = len(values.words)
    for half in range(2):
        four = ", ".join(f"y{4 * half + i}" for i in (3, 2, 1, 0))
        lines.append(f"cvt.rs.satfinite.e2m1x4.f32 narrow{half}, {{{four}}}, {{$r{1 + words + half}}};")
    return cute.arch.inline_ptx(
        "\n".join(("{", *lines, "mov.b32 {$w0}, {narrow0, narrow1};", "}")),
        write_only_types=[Int32],
        read_only_args=[factor, *values.words, *random],
    )


# --- random bits ------------------------------------------------------------------------------------------------------


def random_words(block: Int64, half: Any, seed, offset, stream: int):
    """Return four words of random bits for a half of a block, or for two: Philox 4x32-10 of its position.

    ``seed`` and ``offset`` are two words each, the lower first; see ``random_bits`` of the CPU.
    """
    counter = block * 2 + half
    lines = [".reg .u32 c<4>;", ".reg .u32 d<4>;", ".reg .u32 k<2>;"]
    lines += [f"mov.b32 c{i}, {{$r{i}}};" for i in range(4)]
    lines += [f"mov.b32 k{i}, {{$r{4 + i}}};" for i in range(2)]
    for turn in range(10):
        if turn:
            lines += ["add.u32 k0, k0, 0x9E3779B9;", "add.u32 k1, k1, 0xBB67AE85;"]
        lines += [
            "mul.hi.u32 d0, c2, 0xCD9E8D57;",
            "mul.lo.u32 d1, c2, 0xCD9E8D57;",
            "mul.hi.u32 d2, c0, 0xD2511F53;",
            "mul.lo.u32 d3, c0, 0xD2511F53;",
            "xor.b32 c0, d0, c1;",
            "xor.b32 c0, c0, k0;",
            "xor.b32 c2, d2, c3;",
            "xor.b32 c2, c2, k1;",
            "mov.b32 c1, d1;",
            "mov.b32 c3, d3;",
        ]
    lines += [f"mov.b32 {{$w{i}}}, c{i};" for i in range(4)]
    upper = (counter >> 32).to(Int32) | (stream << 31 if not stream else -(1 << 31))
    return cute.arch.inline_ptx(
        "\n".join(("{", *lines, "}")),
        write_only_types=[Int32] * 4,
        read_only_args=[counter.to(Int32), upper, *offset, *seed],
    )


# --- Hadamard transform -----------------------------------------------------------------------------------------------


def hadamard(values, lane: Int32):
    """Transform 16 rows, eight of them in this lane and eight in the one 16 lanes on, as bfloat16.

    ``values`` are ``(VECTOR, STEPS)`` of any dtype, and so is the result.
    """
    result = cute.make_rmem_tensor((VECTOR, STEPS), BFloat16)
    sign = cutlass.select_(lane < LANES // 2, Float32(1.0), Float32(-1.0))
    signs = [sign * a if a != b else a for a, b in zip(SIGNS[:STEPS], SIGNS[STEPS:])]
    # A convergence point: after it the assembler keeps no separate divergent path and hoists nothing from below; both
    # would take registers.
    cute.arch.sync_warp()
    for j in range(VECTOR):
        column = [values[j, i].to(Float32) * s for i, s in enumerate(signs)]
        for distance in (1, 2, 4):
            for i in range(STEPS):
                if not i & distance:
                    a, b = column[i], column[i + distance]
                    column[i], column[i + distance] = a + b, a - b
        for i, own in enumerate(column):
            other = cute.arch.shuffle_sync_bfly(own, LANES // 2)
            result[j, i] = ((other + own * sign) * Float32(0.25)).to(BFloat16)
    return result
