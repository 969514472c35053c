"""Codes of E2M1 under scales of E4M3 by products in bfloat16 alone, to the bits that products in float32 have.

A code times a scale has at most six significant bits, so that their product ``p`` is exact in bfloat16. What is left is
its product with the float32 factor of the group, rounded once. With the factor as a sum of two numbers of bfloat16 that
is ``fma(p, high, p * low)``, but for the rounding of ``p * low``. Whether the two agree follows from the significands
of the factor and of the code and the scale, of which there are 16 pairs. So lanes try all pairs, once a tile, with five
numbers around the rest of the factor as ``low``, and for all but a few factors one of them will do.

Exponents: codes are spread to their number times 2^-126 and bytes of scales to theirs times 2^-120. The latter are
multiplied by 2^127, and parts of factors by the 2^119 that are missing still.
"""

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, cute

from ...bits import reinterpret
from ...instructions import bfloat16_products, bfloat16_products_with_half, bfloat16_sums_of_products
from ...quantize.decode import product
from ..copies import WORD
from .swap_ab_dequantize import ABOVE, LanePart, pair_at, read_codes, read_words, spread

LEAST, BEYOND = 2.0**-80, 2.0**8  # of factors whose products are all normal numbers
MISSING = 2.0**119  # from products of codes and scales
FURTHER = 0x7F007F00  # twice bfloat16's 2^127, for scales
ONES = 0x01010101
NUDGES = (0, 1, -1, 2, -2)  # units in the last place of ``low``


class Parts(NamedTuple):
    """Of a group's factor times ``MISSING``, twice each in a word of bfloat16."""

    high: Int32
    low: Int32


def doubled(value: Float32) -> Int32:
    """Return a number that bfloat16 has, in either half."""
    bits = reinterpret(value, Int32)
    return Int32(cute.arch.prmt(bits, Int32(0), 0x3232))


def rounded(value: Float32) -> Float32:
    """To bfloat16."""
    return value.to(BFloat16).to(Float32)


@cute.jit
def split(whole: Float32) -> tuple[Boolean, Parts]:
    """Return whether products of a factor's parts are those of the factor, and the parts; a warp calls it as a whole.

    Lane ``l`` tries the significand of the code ``1 + l % 2 / 2`` and of the scale ``8 + l / 2 % 8``.
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
    """A lane's scales of a stage; whether parts of the factor multiply to the bit and none of the warp's is negative or
    NaN.

    Args:
        words_at: address of the stage's words of the first of a tile's columns.
        exact: the former.
        left: of the contraction from this stage on.
        scales: is set, see ``read_words``.
    """
    seen = Int32(0)
    read_words(gemm, words_at, own, left, scales)
    for i in cutlass.range_constexpr(cute.size(scales)):
        # One more sets the upper bit of 0x7F. It is carried further from 0xFF alone, which has the upper bit itself.
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
    """A lane's elements of a part, times its scales, positive ones, and the factor: ``((2, 2, 2), blocks, 2)``.

    A zero may have the other sign, which no sum shows.
    """
    pairs = cute.recast_tensor(held, Int32)
    first = part * (gemm.part // gemm.packed.decoding.block)
    chosen = (0x4140, 0x4342)[first % WORD // 2]  # bytes to the lower ones of halves
    for i in cutlass.range_constexpr(2 * gemm.blocks):
        both = Int32(cute.arch.prmt(scales[first // WORD, i], Int32(0), chosen))
        both = bfloat16_products(both * 16, Int32(FURTHER))
        for number, byte in enumerate(read_codes(gemm, codes, own, i, part)):
            scaled = bfloat16_products_with_half(spread(byte), both, number // 2)
            rest = bfloat16_products(scaled, parts.low)
            pairs[pair_at(gemm, i, number)] = bfloat16_sums_of_products(scaled, parts.high, rest)
