"""Dequantisation in ``swap_ab_kernel``: a stage's codes and scales in shared memory to registers that MMAs read.

A stage has 64 or 128 bytes of codes per column, and is decoded 32 or 64 elements at a time. Each step of 16 elements is
one MMA, of which a lane has two pairs of neighbours, 8 apart, for each of its columns.

==============================  ========================================================================================
elements and scales             how a pair is decoded
==============================  ========================================================================================
E2M1, powers of two             codes spread over a register, times the scale: exact products of bfloat16; two pairs at
                                once where A is in the order of ``swap_ab_rows``
E2M1, scales of E4M3            the same spread, with products in bfloat16 alone: see ``swap_ab_split``
E2M1, other cases               the same spread, exact products with 2^126, then in float32 times the scale
E4M3 and E5M2                   widened to float32, times the scale
==============================  ========================================================================================

Products in float32 are rounded to bfloat16 once, as in dequantisation.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Uint8, Uint16, cute

from ...bits import as_float
from ...instructions import bfloat16_products, widened_fp8
from ...quantize.decode import FP4, decoding_scale
from ...runtime.elements import TYPES
from ..copies import WORD
from ..mma_sync.packed_decode import FACTORS
from ..mma_sync.packed_load import Matrices, load_word, scale_address
from ..mma_sync.packed_tilings import PackedSpec
from .tilings import MMA_ROWS

CHUNK = 16  # bytes that the swizzle moves together
STEP = 16  # depth of an MMA
PAIR = 8  # elements of which a lane has a pair
NO_SCALES = 0x3F003F00  # bfloat16's 2^-1 in both halves: the factor for scale 2^-127
ALL_THE_WAY = 0x7E807E80  # bfloat16's 2^126 in both halves
ABOVE = -0x7F7F7F80  # the upper bit of every byte
BLOCK = 32  # elements that share a power-of-two scale


class LanePart(NamedTuple):
    """A lane's part of a stage."""

    column: Int32  # its first column
    spot: Int32  # offset of its first byte in the first chunk of codes of the first column
    scales: cute.Tensor  # start of the scales of every column, see ``beginnings``
    whole: Float32  # factor of all scales of the group


def behind(number: int) -> int:
    """Return the distance of a lane's column of this number from its first one."""
    return number % 2 * 8 + number // 2 * MMA_ROWS


def has_powers(packed: PackedSpec) -> bool:
    """Return whether codes are E2M1 with power-of-two scales."""
    return packed.element == FP4 and packed.decoding.scale == "float8_e8m0fnu"


def has_bytes(packed: PackedSpec) -> bool:
    """Return whether codes are E2M1 with E4M3 scales."""
    return packed.element == FP4 and packed.decoding.scale == "float8_e4m3fn"


def place(gemm: Any) -> tuple[Int32, Int32]:
    """Return a lane's first column in a tile, and the offset of its first byte in the codes of a stage."""
    thread, _, _ = cute.arch.thread_idx()
    group, warp, lane = thread // 128, thread % 128 // 32, thread % 32
    column = group * (gemm.blocks * MMA_ROWS) + warp * 16 + lane // 4
    turned = lane // (512 // gemm.width)  # bits of a chunk's number that the swizzle flips
    first = lane % 4 * (2 if gemm.permuted else 2 // gemm.packed.per_byte)
    return column, column * gemm.width + turned * CHUNK + first


def beginnings(gemm: Any, matrices: Matrices, group: Int32, left: Int32, column: Int32) -> cute.Tensor:
    """Return, for each of a lane's columns, where the scales of the first stage begin among its words.

    Scales of E2M1 are read as words, so this is a byte selector for two words; otherwise it is an address, relative to
    the words of the stage.

    Args:
        left: the lane's first column of the product.
        column: the lane's first column of the tile.
    """
    packed = gemm.packed
    found = cute.make_rmem_tensor((2, gemm.blocks), Int32)
    for i in range(cute.size(found)):
        start = Int32(0)
        if packed.decoding.block:
            start = Int32(scale_address(packed, matrices.scale, group, left + behind(i), Int32(0))) & WORD - 1
        found[i] = 0x3210 + start * 0x1111 if packed.element == FP4 else scales_at(gemm, column, i) + start
    return found


def scale_registers(gemm: Any) -> int:
    """Return the words of scales that a lane holds per column of a stage; for formats other than FP4, an address."""
    packed = gemm.packed
    return gemm.config.tile_k // packed.decoding.block // WORD if packed.element == FP4 else 1


def scales_at(gemm: Any, column: Int32, number: int) -> Int32:
    """Return the offset of the scales of a lane's column ``number`` in a stage; ``column`` is its first one."""
    return (column + behind(number)) * (gemm.pitch * WORD)


@cute.jit
def whole_scale(gemm: cutlass.Constexpr, matrices: Matrices, group: Int32, product: Boolean) -> Float32:
    """Return the factor of all scales of a group: one that follows from its amax, or its only scale."""
    found = Float32(1)
    if product:
        if cutlass.const_expr(gemm.packed.decoding.amax):
            found = decoding_scale(matrices.amax[group])
        if cutlass.const_expr(gemm.packed.decoding.block == 0):
            found = matrices.scale[group]
    return found


@cute.jit
def read_powers(gemm: cutlass.Constexpr, words_at: Int32, own: LanePart, left: Int32, scales: cute.Tensor) -> Boolean:
    """Read a lane's scale bytes of a stage, capped at 2^1; return whether any of the warp's is larger."""
    seen = Int32(0)
    read_words(gemm, words_at, own, left, scales)
    for i in cutlass.range_constexpr(cute.size(scales)):
        seen = seen | scales[i]
    extreme = cute.arch.vote_any_sync((seen & ABOVE) != 0)
    if extreme:
        for i in cutlass.range_constexpr(cute.size(scales)):
            low = Int32(0)
            for block in cutlass.range_constexpr(WORD):
                low = low | (cutlass.min((scales[i] >> (8 * block)) & 0xFF, Int32(128)) << (8 * block))
            scales[i] = low
    return extreme


@cute.jit
def read_words(gemm: cutlass.Constexpr, words_at: Int32, own: LanePart, left: Int32, scales: cute.Tensor):
    """Read a lane's scale bytes of a stage, ``[words, columns]``, with zeros past the end of the contraction."""
    held, columns = scale_registers(gemm), 2 * gemm.blocks
    for i in cutlass.range_constexpr(columns):
        at = words_at + scales_at(gemm, own.column, i)
        place = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=gemm.pitch * WORD)
        words = cute.make_rmem_tensor(gemm.pitch, Int32)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(gemm.pitch)), words)
        for word in cutlass.range_constexpr(held):
            scales[word, i] = Int32(cute.arch.prmt(words[word], words[word + 1], own.scales[i]))
    if left < gemm.config.tile_k:
        count = left // gemm.packed.decoding.block
        for word in cutlass.range_constexpr(held):
            inside = Int32(-1)
            if count < WORD * (word + 1):
                inside = (Int32(1) << (cutlass.max(count - WORD * word, 0) * 8)) - 1
            for i in cutlass.range_constexpr(columns):
                scales[word, i] = scales[word, i] & inside


def find_scales(gemm: Any, words_at: Int32, own: LanePart, k: Int32, scales: cute.Tensor) -> None:
    """Write to ``scales`` the addresses of a lane's scales of stage ``k``, one for each of its columns.

    If a stage has two bytes of scales, those of every other stage begin two bytes further on in the words.
    """
    packed = gemm.packed
    halfway = packed.decoding.block and gemm.config.tile_k // packed.decoding.block * packed.scale_bytes == WORD // 2
    for i in range(cute.size(scales)):
        scales[i] = words_at + (own.scales[i] ^ ((k & 1) * 2) if halfway else own.scales[i])


def twice(word: Int32, block: int) -> Int32:
    """Return the byte of a block in both halves of a word."""
    return Int32(cute.arch.prmt(word, Int32(0), (4 << 12) + (block << 8) + (4 << 4) + block))


def load_byte(source: Int32) -> Int32:
    """Return a byte from shared memory."""
    place = cute.make_ptr(Uint8, source, cute.AddressSpace.smem)
    return Int32(Uint8(cute.make_tensor(place, cute.make_layout(1))[0]))


def pair_at(gemm: Any, column: int, number: int) -> int:
    """Return the word index, in registers ``((2, 2, 2), blocks, 2)``, of pair ``number`` of a lane's column."""
    return number // 2 * (4 * gemm.blocks) + column // 2 * 4 + number % 2 * 2 + column % 2


def pairs_of(gemm: Any) -> range:
    """Return the numbers of a lane's pairs in a part of a column."""
    return range(gemm.part // PAIR)


def spot(gemm: Any, own: LanePart, column: int, part: int, number: int) -> Int32:
    """Return the offset, in a stage's codes, of pair ``number`` of a part of a lane's column."""
    at = (part * gemm.part + number * PAIR) // gemm.packed.per_byte
    return (own.spot ^ at // CHUNK * CHUNK) + (behind(column) * gemm.width + at % CHUNK)


def read_codes(gemm: Any, codes: Int32, own: LanePart, column: int, part: int) -> list[Int32]:
    """Return the bytes of a lane's FP4 pairs in a part of a column."""
    return [load_byte(codes + spot(gemm, own, column, part, number)) for number in pairs_of(gemm)]


def spread(byte: Int32) -> Int32:
    """Return two E2M1 codes as bfloat16, times 2^-126.

    Their signs go to bit 15 of each half, and their other bits to bits 8 to 6: the lower two bits of the exponent and
    the upper one of the mantissa.
    """
    magnitudes, signs = byte * ((1 << 6) + (1 << 18)), byte * ((1 << 12) + (1 << 24))
    return (magnitudes & 0x01C001C0) | (signs & -0x7FFF8000)


def spread_part(gemm: Any, codes: Int32, own: LanePart, column: int, part: int) -> list[Int32]:
    """Return the pairs of E2M1 codes in a part of a lane's column as bfloat16, times 2^-126."""
    if not gemm.permuted:
        return [spread(byte) for byte in read_codes(gemm, codes, own, column, part)]
    steps = (load_two_bytes(codes + spot(gemm, own, column, part, number)) for number in pairs_of(gemm)[::2])
    return [pair for step in steps for pair in spread_four(step)]


def spread_four(halfword: Int32) -> list[Int32]:
    """Return the first and third, and the second and fourth of E2M1 codes as bfloat16, times 2^-126."""
    both = Int32(cute.arch.prmt(halfword, Int32(0), 0x4140))
    products = (both & 0x000F000F) * ((1 << 6) + (1 << 12)), (both & 0x00F000F0) * ((1 << 2) + (1 << 8))
    return [product & -0x7E3F7E40 for product in products]


def load_two_bytes(source: Int32) -> Int32:
    """Return two bytes from shared memory."""
    place = cute.make_ptr(Uint16, source, cute.AddressSpace.smem)
    return Int32(Uint16(cute.make_tensor(place, cute.make_layout(1))[0]))


@cute.jit
def decode_powers(
    gemm: cutlass.Constexpr,
    codes: Int32,
    own: LanePart,
    part: cutlass.Constexpr,
    scales: cute.Tensor,
    held: cute.Tensor,
):
    """Decode a lane's elements of a part, times its scales up to 2: registers ``((2, 2, 2), blocks, part / 16)``."""
    pairs = cute.recast_tensor(held, Int32)
    for i in cutlass.range_constexpr(2 * gemm.blocks):
        factors = [twice(word, byte) * 128 + NO_SCALES for word, byte in scales_of(gemm, scales, i, part)]
        for number, pair in enumerate(spread_part(gemm, codes, own, i, part)):
            pairs[pair_at(gemm, i, number)] = bfloat16_products(pair, factors[number * PAIR // BLOCK])


def scales_of(gemm: Any, scales: cute.Tensor, column: int, part: int) -> list[tuple[Int32, int]]:
    """Return the words that hold the scales of a part of a lane's column, and the index of each scale's byte."""
    count = gemm.part // BLOCK
    return [(scales[at // WORD, column], at % WORD) for at in range(part * count, (part + 1) * count)]


@cute.jit
def raise_further(
    gemm: cutlass.Constexpr, words_at: Int32, own: LanePart, left: Int32, part: cutlass.Constexpr, held: cute.Tensor
):
    """Multiply the result of ``decode_powers`` by scales above 2^1, read once more; NaN for the scale 255."""
    pairs = cute.recast_tensor(held, Int32)
    scales = cute.make_rmem_tensor((scale_registers(gemm), 2 * gemm.blocks), Int32)
    read_words(gemm, words_at, own, left, scales)
    for i in cutlass.range_constexpr(2 * gemm.blocks):
        for block, (word, number) in enumerate(scales_of(gemm, scales, i, part)):
            byte = (word >> (8 * number)) & 0xFF
            factor = cutlass.max(byte - 128, Int32(0)) * 0x00800080 + 0x3F803F80
            if byte == 0xFF:
                factor = Int32(0x7FC07FC0)
            for j in cutlass.range_constexpr(BLOCK // PAIR):
                at = pair_at(gemm, i, block * (BLOCK // PAIR) + j)
                pairs[at] = bfloat16_products(pairs[at], factor)


@cute.jit
def decode_any(
    gemm: cutlass.Constexpr,
    codes: Int32,
    own: LanePart,
    part: cutlass.Constexpr,
    scales: cute.Tensor,
    held: cute.Tensor,
):
    """Decode a lane's elements of a part, times its scales, rounded to bfloat16: ``((2, 2, 2), blocks, part / 16)``.

    Args:
        scales: for each column the address of a stage's scales, or for E2M1 two words of them, ``[2, columns]``.
    """
    pairs = cute.recast_tensor(held, Int32)
    for i in cutlass.range_constexpr(2 * gemm.blocks):
        if cutlass.const_expr(gemm.packed.element == FP4):
            wide = spread_wide(read_codes(gemm, codes, own, i, part))
        else:
            wide = fp8_wide(gemm.packed, [codes + spot(gemm, own, i, part, number) for number in pairs_of(gemm)])
        for step, factor in enumerate(factors(gemm, own, scales, i, part)):
            for j in cutlass.range_constexpr(STEP // WORD):
                wide[STEP // WORD * step + j] = wide[STEP // WORD * step + j] * factor
        rounded = cute.make_rmem_tensor(cute.size(wide), BFloat16)
        rounded.store(wide.load().to(BFloat16))
        words = cute.recast_tensor(rounded, Int32)
        for number in cutlass.range_constexpr(cute.size(words)):
            pairs[pair_at(gemm, i, number)] = words[number]


def factors(gemm: Any, own: LanePart, scales: cute.Tensor, column: int, part: int) -> list[Float32]:
    """Return the factor of the elements in each step of a part of a lane's column."""
    packed = gemm.packed
    block, steps = packed.decoding.block, range(part * gemm.part, (part + 1) * gemm.part, STEP)
    if not block:
        return [own.whole] * len(steps)
    numbers = [first // block for first in steps]
    if has_bytes(packed):
        pair = scales[numbers[0] // WORD, column] >> (numbers[0] % WORD * 8)
        return [value * own.whole for value in e4m3_values(pair)]
    scale = scales[column]
    word = load_word(scale) if packed.scale_bytes == WORD else load_byte(scale + numbers[0])
    return [FACTORS[packed.decoding.scale](word, Int32(0), own.whole)] * len(steps)


def e4m3_values(pair: Int32) -> list[Float32]:
    """Return the numbers of the lower two E4M3 bytes."""
    halves = cute.make_rmem_tensor(2, Uint16)
    halves[0], halves[1] = Uint16(pair & 0xFFFF), Uint16(0)
    wide = cute.make_rmem_tensor(4, Float32)
    wide.store(widened_fp8(cute.recast_tensor(halves, Uint8), TYPES["float8_e4m3fn"]))
    return [wide[0], wide[1]]


def spread_wide(codes: list[Int32]) -> cute.Tensor:
    """Return the E2M1 pairs in these bytes as float32."""
    wide = cute.make_rmem_tensor(2 * len(codes), Float32)
    for number, byte in enumerate(codes):
        pair = bfloat16_products(spread(byte), Int32(ALL_THE_WAY))
        wide[2 * number], wide[2 * number + 1] = as_float(pair << 16), as_float(pair & -0x10000)
    return wide


def fp8_wide(packed: PackedSpec, at: list[Int32]) -> cute.Tensor:
    """Return the FP8 pairs at these addresses as float32."""
    held = cute.make_rmem_tensor(len(at), Uint16)
    for number, address in enumerate(at):
        place = cute.make_ptr(Uint16, address, cute.AddressSpace.smem)
        held[number] = cute.make_tensor(place, cute.make_layout(1))[0]
    wide = cute.make_rmem_tensor(2 * len(at), Float32)
    wide.store(widened_fp8(cute.recast_tensor(held, Uint8), TYPES[packed.element]))
    return wide


@cute.jit
def clear_behind(gemm: cutlass.Constexpr, left: Int32, held: cute.Tensor):
    """Write zeros past the ``left`` elements of a part that belong to the contraction, whatever their scale is."""
    pairs = cute.recast_tensor(held, Int32)
    if left < gemm.part:
        for i in cutlass.range_constexpr(cute.size(pairs)):
            if left <= i // (4 * gemm.blocks) * STEP:
                pairs[i] = Int32(0)
