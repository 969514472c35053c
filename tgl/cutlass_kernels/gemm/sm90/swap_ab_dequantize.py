"""What lanes of ``swap_ab_kernel`` decode: a stage's codes and scales in shared memory to registers that MMAs read.

A stage has 64 or 128 bytes of codes of a column, and is decoded 32 or 64 elements at a time. Each step of 16 of them
goes to an MMA, of which a lane has a pair of neighbours twice, 8 apart, for every of its columns.

==============================  ========================================================================================
elements and scales             how a pair is decoded
==============================  ========================================================================================
E2M1, powers of two             its codes spread over a register, times the scale: products of bfloat16 that are exact
E2M1, scales of E4M3            the same spread, by products in bfloat16 alone: see ``swap_ab_split``
E2M1, the few it cannot do      the same spread, exact products with 2^126, then in float32 times the scale
E4M3 and E5M2                   widened to float32, times the scale
==============================  ========================================================================================

Products in float32 are rounded to bfloat16 once, as dequantising rounds them.
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
STEP = 16  # of the contraction, an MMA's depth
PAIR = 8  # elements of which a lane has a pair
NO_SCALES = 0x3F003F00  # twice bfloat16's 2^-1, what the scale 2^-127 becomes as a factor
ALL_THE_WAY = 0x7E807E80  # twice bfloat16's 2^126
ABOVE = -0x7F7F7F80  # the upper bit of every byte
BLOCK = 32  # elements that share a scale that is a power of two


class LanePart(NamedTuple):
    """A lane's part of a stage."""

    column: Int32  # its first one
    spot: Int32  # of its first byte in the first chunk of codes of the first column
    scales: cute.Tensor  # of every column, see ``beginnings``
    whole: Float32  # what all scales of the group are multiplied by


def behind(number: int) -> int:
    """How far a lane's column of this number is from its first one."""
    return number % 2 * 8 + number // 2 * MMA_ROWS


def has_powers(packed: PackedSpec) -> bool:
    """Return whether codes of E2M1 have powers of two as scales."""
    return packed.element == FP4 and packed.decoding.scale == "float8_e8m0fnu"


def has_bytes(packed: PackedSpec) -> bool:
    """Return whether codes of E2M1 have scales of E4M3."""
    return packed.element == FP4 and packed.decoding.scale == "float8_e4m3fn"


def place(gemm: Any) -> tuple[Int32, Int32]:
    """Return a lane's first column in a tile, and where in its codes of a stage the lane's first byte is."""
    thread, _, _ = cute.arch.thread_idx()
    group, warp, lane = thread // 128, thread % 128 // 32, thread % 32
    column = group * (gemm.blocks * MMA_ROWS) + warp * 16 + lane // 4
    turned = lane // (512 // gemm.width)  # what the swizzle flips in the number of a chunk
    first = lane % 4 * (2 // gemm.packed.per_byte)
    return column, column * gemm.width + turned * CHUNK + first


def beginnings(gemm: Any, matrices: Matrices, group: Int32, left: Int32, column: Int32) -> cute.Tensor:
    """Of each of a lane's columns: where the scales of the first stage begin among its words.

    Scales of E2M1 are read by words, so that it is a choice of bytes of two words; else it is an address, from that of
    the words of the stage on.

    Args:
        left: the lane's first column of the product.
        column: of the tile.
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
    """Words of scales that a lane holds for a stage of a column; of other formats than FP4 it is their address."""
    packed = gemm.packed
    return gemm.config.tile_k // packed.decoding.block // WORD if packed.element == FP4 else 1


def scales_at(gemm: Any, column: Int32, number: int) -> Int32:
    """From the words of a stage's scales to those of a lane's column of this number; ``column`` is its first one."""
    return (column + behind(number)) * (gemm.pitch * WORD)


@cute.jit
def whole_scale(gemm: cutlass.Constexpr, matrices: Matrices, group: Int32, product: Boolean) -> Float32:
    """What all scales of a group are multiplied by: one that follows from its largest magnitude, or the only one."""
    found = Float32(1)
    if product:
        if cutlass.const_expr(gemm.packed.decoding.amax):
            found = decoding_scale(matrices.amax[group])
        if cutlass.const_expr(gemm.packed.decoding.block == 0):
            found = matrices.scale[group]
    return found


@cute.jit
def read_powers(gemm: cutlass.Constexpr, words_at: Int32, own: LanePart, left: Int32, scales: cute.Tensor) -> Boolean:
    """A lane's bytes of a stage to ``scales``, see ``read_words``, none above 2^1; whether any of the warp's is."""
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
    """A lane's bytes of scales of a stage, ``[words, columns]``, with zeros behind the contraction's end."""
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
    """The addresses of a lane's scales of stage ``k``, one for each of its columns, to ``scales``.

    Where a stage has two bytes of them, every other one begins two bytes further on in its words.
    """
    packed = gemm.packed
    halfway = packed.decoding.block and gemm.config.tile_k // packed.decoding.block * packed.scale_bytes == WORD // 2
    for i in range(cute.size(scales)):
        scales[i] = words_at + (own.scales[i] ^ ((k & 1) * 2) if halfway else own.scales[i])


def twice(word: Int32, block: int) -> Int32:
    """Return a block's byte in either half."""
    return Int32(cute.arch.prmt(word, Int32(0), (4 << 12) + (block << 8) + (4 << 4) + block))


def load_byte(source: Int32) -> Int32:
    """Return a byte from shared memory."""
    place = cute.make_ptr(Uint8, source, cute.AddressSpace.smem)
    return Int32(Uint8(cute.make_tensor(place, cute.make_layout(1))[0]))


def pair_at(gemm: Any, column: int, number: int) -> int:
    """Where in registers ``((2, 2, 2), blocks, 2)``, in words, the pair of a lane's column and of 8 elements is."""
    return number // 2 * (4 * gemm.blocks) + column // 2 * 4 + number % 2 * 2 + column % 2


def pairs_of(gemm: Any) -> range:
    """Numbers of a lane's pairs in a part of a column."""
    return range(gemm.part // PAIR)


def spot(gemm: Any, own: LanePart, column: int, part: int, number: int) -> Int32:
    """Return where in a stage's codes the pair of a lane's column and of 8 elements of a part is."""
    at = (part * gemm.part + number * PAIR) // gemm.packed.per_byte
    return (own.spot ^ at // CHUNK * CHUNK) + (behind(column) * gemm.width + at % CHUNK)


def read_codes(gemm: Any, codes: Int32, own: LanePart, column: int, part: int) -> list[Int32]:
    """Return the bytes of a lane's pairs of FP4 in a part of a column."""
    return [load_byte(codes + spot(gemm, own, column, part, number)) for number in pairs_of(gemm)]


def spread(byte: Int32) -> Int32:
    """Two codes of E2M1 as bfloat16, times 2^-126.

    Their signs go to bit 15 of either half, and their other bits to bits 8 to 6, the lower two of the exponent and the
    upper one of the mantissa.
    """
    magnitudes, signs = byte * ((1 << 6) + (1 << 18)), byte * ((1 << 12) + (1 << 24))
    return (magnitudes & 0x01C001C0) | (signs & -0x7FFF8000)


@cute.jit
def decode_powers(
    gemm: cutlass.Constexpr,
    codes: Int32,
    own: LanePart,
    part: cutlass.Constexpr,
    scales: cute.Tensor,
    held: cute.Tensor,
):
    """A lane's elements of a part, times its scales up to 2: registers ``((2, 2, 2), blocks, part / 16)``."""
    pairs = cute.recast_tensor(held, Int32)
    for i in cutlass.range_constexpr(2 * gemm.blocks):
        factors = [twice(word, byte) * 128 + NO_SCALES for word, byte in scales_of(gemm, scales, i, part)]
        for number, byte in enumerate(read_codes(gemm, codes, own, i, part)):
            pairs[pair_at(gemm, i, number)] = bfloat16_products(spread(byte), factors[number * PAIR // BLOCK])


def scales_of(gemm: Any, scales: cute.Tensor, column: int, part: int) -> list[tuple[Int32, int]]:
    """Return the words that have the scales of a part of a lane's column, and which of a word's bytes each is."""
    count = gemm.part // BLOCK
    return [(scales[at // WORD, column], at % WORD) for at in range(part * count, (part + 1) * count)]


@cute.jit
def raise_further(
    gemm: cutlass.Constexpr, words_at: Int32, own: LanePart, left: Int32, part: cutlass.Constexpr, held: cute.Tensor
):
    """What ``decode_powers`` gives, times what scales are above 2^1; NaN for the scale 255. They are read once more."""
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
    """A lane's elements of a part, times its scales, rounded to bfloat16: ``((2, 2, 2), blocks, part / 16)``.

    Args:
        scales: of each column the address of a stage's, or under E2M1 two words of them, ``[2, columns]``.
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
    """What the elements of each step of a part of a lane's column are multiplied by."""
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
    """Return the numbers of the lower two bytes of E4M3."""
    halves = cute.make_rmem_tensor(2, Uint16)
    halves[0], halves[1] = Uint16(pair & 0xFFFF), Uint16(0)
    wide = cute.make_rmem_tensor(4, Float32)
    wide.store(widened_fp8(cute.recast_tensor(halves, Uint8), TYPES["float8_e4m3fn"]))
    return [wide[0], wide[1]]


def spread_wide(codes: list[Int32]) -> cute.Tensor:
    """Pairs of E2M1 of these bytes as float32."""
    wide = cute.make_rmem_tensor(2 * len(codes), Float32)
    for number, byte in enumerate(codes):
        pair = bfloat16_products(spread(byte), Int32(ALL_THE_WAY))
        wide[2 * number], wide[2 * number + 1] = as_float(pair << 16), as_float(pair & -0x10000)
    return wide


def fp8_wide(packed: PackedSpec, at: list[Int32]) -> cute.Tensor:
    """Pairs of FP8 from these addresses as float32."""
    held = cute.make_rmem_tensor(len(at), Uint16)
    for number, address in enumerate(at):
        place = cute.make_ptr(Uint16, address, cute.AddressSpace.smem)
        held[number] = cute.make_tensor(place, cute.make_layout(1))[0]
    wide = cute.make_rmem_tensor(2 * len(at), Float32)
    wide.store(widened_fp8(cute.recast_tensor(held, Uint8), TYPES[packed.element]))
    return wide


@cute.jit
def clear_behind(gemm: cutlass.Constexpr, left: Int32, held: cute.Tensor):
    """Zeros where a part of which ``left`` elements are of the contraction has others, whatever their scale is."""
    pairs = cute.recast_tensor(held, Int32)
    if left < gemm.part:
        for i in cutlass.range_constexpr(cute.size(pairs)):
            if left <= i // (4 * gemm.blocks) * STEP:
                pairs[i] = Int32(0)
