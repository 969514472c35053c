"""Decode pieces of packed matrices in a stage to lines of 16-bit elements in shared memory, for ``ldmatrix``.

A piece is decoded once for all warps. It becomes 128 bits of a line at a time, in the order of ``load``.
"""

from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Uint8, cute

from ...bits import as_float
from ...instructions import bfloat16_products, e4m3_value, widened_fp8
from ...quantize.decode import FP4, decoding_scale, e8m0_value
from ...runtime.elements import TYPES
from ..copies import LINE, PIECE
from .packed_load import load_word, piece_of
from .packed_tilings import WORD, PackedSpec, pieces

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, by code
SIGNS = -0x7F7F7F80  # the upper bit of every byte
EIGHT = 8  # elements of 16 bits in a piece of a line


def _e8m0(word: Int32, at: Int32, whole: Any) -> Float32:
    return e8m0_value((word >> at) & 0xFF)


def _e4m3(word: Int32, at: Int32, whole: Any) -> Float32:
    return e4m3_value(Uint8((word >> at) & 0xFF)) * whole


def _float32(word: Int32, at: Int32, whole: Any) -> Float32:
    return as_float(word)


FACTORS = {"float8_e8m0fnu": _e8m0, "float8_e4m3fn": _e4m3, "float32": _float32}
"""By type of scale: the factor of elements, from the scale's word, its first bit in there, and the group's factor."""


def multiplied(spec: PackedSpec, held: cute.Tensor, factors: list[Float32], element: Any) -> cute.Tensor:
    """Return FP8 bytes in registers, times the factor that they share."""
    found = cute.make_rmem_tensor(spec.elements, element)
    found.store((widened_fp8(held, TYPES[spec.element]) * factors[0]).to(element))
    return found


def tables_of(factor: Float32, element: Any) -> tuple[list[Int32], list[Int32]]:
    """Return the lower bytes of E2M1's eight magnitudes times a factor, rounded to 16 bits, and the upper ones."""
    magnitudes = cute.make_rmem_tensor(len(MAGNITUDES), element)
    for i, magnitude in enumerate(MAGNITUDES):
        magnitudes[i] = (factor * magnitude).to(element)
    w = cute.recast_tensor(magnitudes, Int32)
    lower, upper = ([Int32(cute.arch.prmt(w[i], w[i + 1], which)) for i in (0, 2)] for which in (0x6420, 0x7531))
    return lower, upper


def looked_up(spec: PackedSpec, held: cute.Tensor, factors: list[Float32], element: Any) -> cute.Tensor:
    """Return E2M1 codes in registers, times the factors of equal parts of them.

    Of four codes at a time the lower three bits select a magnitude's bytes. With the fourth bit set, ``prmt``
    replicates the upper bit of the selected byte eight times, so the lowest bit of a selector into ``SIGNS`` is the
    number's sign.
    """
    words, found = cute.recast_tensor(held, Int32), cute.make_rmem_tensor(spec.elements, element)
    pairs, each = cute.recast_tensor(found, Int32), cute.size(words) // len(factors)
    for i in range(cute.size(words)):
        if i % each == 0:
            lower, upper = tables_of(factors[i // each], element)
        for half in range(2):
            codes = words[i] >> (16 * half)
            picked = codes & 0x7777
            signs = Int32(cute.arch.prmt(Int32(SIGNS), Int32(SIGNS), codes)) << 7
            low, high = (Int32(cute.arch.prmt(t[0], t[1], picked)) for t in (lower, upper))
            high = high ^ (signs & SIGNS)  # a scale may be negative
            for pair in range(2):
                pairs[4 * i + 2 * half + pair] = Int32(cute.arch.prmt(low, high, (0x5140, 0x7362)[pair]))
    return found


def has_powers(spec: PackedSpec, element: Any) -> bool:
    """Return whether E2M1 codes have power-of-two factors, and products in ``element`` are as exact as in float32."""
    return spec.element == FP4 and spec.decoding.scale == "float8_e8m0fnu" and element is BFloat16


def raw_pairs(word: Int32) -> list[Int32]:
    """Return eight E2M1 codes as pairs of bfloat16, times 2^-126: neighbours, the first one in the lower half.

    The sign goes to bit 15, and the three others to bits 8 to 6, the lower two of the exponent and the upper one of the
    mantissa. First the codes of a pair are moved to the same bits of both halves: bits 4 to 7, then 12 to 15.
    """
    early, pairs = word << 4, []
    for chosen in (0x5410, 0x7632):
        four = Int32(cute.arch.prmt(early, word, chosen))
        pairs.append(((four & 0x00F000F0) * 0x104) & -0x7E3F7E40)
        pairs.append((four & -0x7FFF8000) | ((four >> 6) & 0x01C001C0))
    return pairs


@cute.jit
def raised(spec: cutlass.Constexpr, held: cute.Tensor, byte: Int32):
    """Return E2M1 codes in registers, times ``2^(byte - 127)`` as bfloat16, NaN where ``byte`` is 255.

    Factors are powers of two, so products are exact. One factor suffices for the way from 2^-126 unless the scale is
    above 2; then there is a second one.
    """
    words, found = cute.recast_tensor(held, Int32), cute.make_rmem_tensor(spec.elements, BFloat16)
    pairs, factor = cute.recast_tensor(found, Int32), (cutlass.min(byte, Int32(128)) + 126) * 0x00800080
    for i in cutlass.range_constexpr(cute.size(words)):
        for j, pair in enumerate(raw_pairs(words[i])):
            pairs[4 * i + j] = bfloat16_products(pair, factor)
    if byte > 128:
        factor = (byte - 1) * 0x00800080
        if byte == 255:
            factor = Int32(0x7FC07FC0)
        for i in cutlass.range_constexpr(cute.size(pairs)):
            pairs[i] = bfloat16_products(pairs[i], factor)
    return found


@cute.jit
def decode_piece(gemm: cutlass.Constexpr, turn: cutlass.Constexpr, stage: Int32, buffer: Int32):
    """Decode a thread's piece of a turn, from the stage at the address ``stage`` to the lines at ``buffer``."""
    spec, part = gemm.packed, gemm.decoded
    total = pieces(spec, gemm.config)
    index, piece = piece_of(gemm, turn)
    held = cute.make_rmem_tensor(PIECE, Uint8)
    place = cute.make_ptr(Uint8, stage + gemm.pieces_at + index * PIECE, cute.AddressSpace.smem, assumed_align=PIECE)
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(PIECE)), held)
    slot = stage + gemm.words_at + index * WORD
    word, at, whole = load_word(slot), Int32(0), Float32(1.0)
    if cutlass.const_expr(spec.scale_bytes < WORD):
        at = load_word(slot + total * WORD)
    if cutlass.const_expr(spec.decoding.amax):
        whole = decoding_scale(as_float(load_word(slot + (spec.words - 1) * total * WORD)))
    if cutlass.const_expr(has_powers(spec, gemm.element)):
        found = raised(spec, held, (word >> at) & 0xFF)
    else:
        scales = max(spec.elements // (spec.decoding.block or spec.elements), 1)
        factors = [FACTORS[spec.decoding.scale](word, at + 8 * i, whole) for i in range(scales)]
        found = (looked_up if spec.element == FP4 else multiplied)(spec, held, factors, gemm.element)
    lines = part.extent if cutlass.const_expr(part.along) else gemm.config.tile_k
    line = buffer + (piece.block * lines + piece.line) * LINE
    first = piece.number * (spec.elements // EIGHT)
    for i in cutlass.range_constexpr(spec.elements // EIGHT):
        to = line + ((first + i) ^ (piece.line & 7)) * PIECE
        place = cute.make_ptr(gemm.element, to, cute.AddressSpace.smem, assumed_align=PIECE)
        eight = cute.make_tensor(found.iterator + i * EIGHT, cute.make_layout(EIGHT))
        cute.autovec_copy(eight, cute.make_tensor(place, cute.make_layout(EIGHT)))
