"""Decode E2M1 codes under E4M3 scales by bfloat16 products alone, with the bits that float32 products have.

A code times a scale has at most six significant bits, so their product ``p`` is exact in bfloat16. What remains is its
product with the float32 factor of the group, rounded once. With the factor as a sum of two bfloat16 numbers that is
``fma(p, high, p * low)``, except for the rounding of ``p * low``. Whether the two agree depends on the significands of
the factor, the code and the scale; there are 16 pairs of the latter two. So lanes try all pairs, once per tile, with
five numbers around the rest of the factor as ``low``, and for almost all factors one of them works.

Exponents: codes are spread to their number times 2^-126 and bytes of scales to theirs times 2^-120. The latter are
multiplied by 2^127, and the parts of factors by the remaining 2^119.
"""

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, cute

from ...bits import reinterpret
from ...instructions import bfloat16_products, bfloat16_products_with_half, bfloat16_sums_of_products
from ...quantize.decode import product
from ..copies import WORD
from .swap_ab_dequantize import ABOVE, LanePart, pair_at, read_codes, read_words, spread

LEAST, BEYOND = 2.0**-80, 2.0**8  # range of factors whose products are all normal numbers
MISSING = 2.0**119  # factor that products of codes and scales still need
FURTHER = 0x7F007F00  # bfloat16's 2^127 in both halves, for scales
ONES = 0x01010101
NUDGES = (0, 1, -1, 2, -2)  # units in the last place of ``low``


class Parts(NamedTuple):
    """Parts of a group's factor times ``MISSING``, each twice in a word of bfloat16."""

    high: Int32
    low: Int32


def doubled(value: Float32) -> Int32:
    """Return a bfloat16 number in both halves of a word."""
    bits = reinterpret(value, Int32)
    return Int32(cute.arch.prmt(bits, Int32(0), 0x3232))


def rounded(value: Float32) -> Float32:
    """Return ``value`` rounded to bfloat16."""
    return value.to(BFloat16).to(Float32)


@cute.jit
def split(whole: Float32) -> tuple[Boolean, Parts]:
    """Return whether the split factor gives the same products as the factor, and its parts; the whole warp calls it.

    Lane ``l`` tries the significands of the code ``1 + l % 2 / 2`` and of the scale ``8 + l / 2 % 8``.
    """
    lane = cute.arch.lane_idx()
    code, scale = Float32(1) + Float32(lane & 1) * 0.5, Float32(8 + (lane >> 1 & 7))
    wanted = doubled(rounded(product(code, product(scale, whole))))
    tried = doubled(product(code, scale) * Float32(1 / MISSING))
    raised = whole * Float32(MISSING)
    first = rounded(raised)
    high, rest = doubled(first), doubled(rounded(raised - first))
    found, low = Boolean(False), rest
    for nudge in cutlass.range_constexpr(len(NUDGES)):
        near = rest + NUDGES[nudge] * 0x00010001
        same = bfloat16_sums_of_products(tried, high, bfloat16_products(tried, near)) == wanted
        if cute.arch.vote_all_sync(same):
            if not found:
                low = near
            found = Boolean(True)
    return found and whole >= Float32(LEAST) and whole < Float32(BEYOND), Parts(high, low)


@cute.jit
def read_bytes(
    gemm: cutlass.Constexpr, words_at: Int32, own: LanePart, exact: Boolean, left: Int32, scales: cute.Tensor
) -> Boolean:
    """Read a lane's scales of a stage; return whether the split is exact and no scale of the warp is negative or NaN.

    Args:
        words_at: address of the stage's words for the first of a tile's columns.
        exact: whether the parts of the factor multiply to the bit.
        left: elements of the contraction from this stage on.
        scales: is set, see ``read_words``.
    """
    seen = Int32(0)
    read_words(gemm, words_at, own, left, scales)
    for i in cutlass.range_constexpr(cute.size(scales)):
        # Adding one sets the upper bit of 0x7F. Only 0xFF carries further, and it has the upper bit itself.
        seen = seen | scales[i] | (scales[i] + ONES)
    return cute.arch.vote_all_sync(exact and (seen & ABOVE) == 0)


@cute.jit
def decode_split(
    gemm: cutlass.Constexpr,
    codes: Int32,
    own: LanePart,
    part: cutlass.Constexpr,
    scales: cute.Tensor,
    parts: Parts,
    held: cute.Tensor,
):
    """Decode a lane's elements of a part, times its positive scales and the factor: ``((2, 2, 2), blocks, 2)``.

    A zero may have the other sign, which does not affect any sum.
    """
    pairs = cute.recast_tensor(held, Int32)
    first = part * (gemm.part // gemm.packed.decoding.block)
    chosen = (0x4140, 0x4342)[first % WORD // 2]  # byte selector into the lower bytes of halves
    for i in cutlass.range_constexpr(2 * gemm.blocks):
        both = Int32(cute.arch.prmt(scales[first // WORD, i], Int32(0), chosen))
        both = bfloat16_products(both * 16, Int32(FURTHER))
        for number, byte in enumerate(read_codes(gemm, codes, own, i, part)):
            scaled = bfloat16_products_with_half(spread(byte), both, number // 2)
            rest = bfloat16_products(scaled, parts.low)
            pairs[pair_at(gemm, i, number)] = bfloat16_sums_of_products(scaled, parts.high, rest)
