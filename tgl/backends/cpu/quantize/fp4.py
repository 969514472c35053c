"""NVFP4 arithmetic on whole blocks of 16: scales, E2M1 elements, random bits, the Hadamard transform.

Everything is float32 with one rounding per operation, in the order written, so that the bytes are the same on every
machine. Division is by ``torch.div`` of two tensors: ``number / tensor`` multiplies by a rounded reciprocal.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
SCALE_NAN = 0x7F  # the scale of a block that holds Inf or NaN, in E4M3
PAIR_NAN = 0x77  # two elements of such a block

_FLT_MAX = torch.finfo(torch.float32).max
_SIXTH = 0.16666667163372040  # float32(1 / 6), 0x3E2AAAAB
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

# --- scales -----------------------------------------------------------------------------------------------------------


def block_scales(amax: Tensor, encode: Tensor, decode: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return E4M3 scale bytes of blocks, the multipliers of their elements, and which blocks hold Inf or NaN.

    Args:
        amax: float32, amax of each block; Inf or NaN if the block holds one.
        encode, decode: the scales of their groups; broadcast to ``amax``.
    """
    broken = ~torch.isfinite(amax)
    scale = (amax * (encode * _SIXTH)).clamp_max(448.0).to(torch.float8_e4m3fn)
    product = scale.float() * decode
    multiplier = torch.div(torch.ones_like(product), product).clamp_max_(_FLT_MAX)
    return scale.view(torch.uint8).masked_fill_(broken, SCALE_NAN), multiplier, broken


def decoded(scale: Tensor, decode: Tensor) -> Tensor:
    """Return the float32 scale of blocks, from their E4M3 bytes and the decoding scale of their groups."""
    return scale.contiguous().view(torch.float8_e4m3fn).float() * decode


# --- elements ---------------------------------------------------------------------------------------------------------


def nearest(y: Tensor) -> Tensor:
    """Return E2M1 codes (uint8, 0 to 15) of float32 values: nearest, ties to even, saturating; NaN gives any code."""
    return _codes(y, 0, None)


def stochastic(y: Tensor, random: Tensor) -> Tensor:
    """Return E2M1 codes; a value rounds up in magnitude with the probability of its distance from the lower neighbour.

    ``random`` holds integers uniform in [0, 2^16), int32. The distance counts in units of 2^-16 of a step, so that is
    the granularity of the probability; a value that E2M1 can represent is never moved.
    """
    return _codes(y, 16, random)


def _codes(y: Tensor, bits: int, random: Tensor | None) -> Tensor:
    # Adding 1.5 * 2^(22 - bits) * p, with p the value's power of two (at least 1, where the subnormals begin), leaves
    # the value in the low mantissa bits of the sum as a fixed-point number with `bits` fractional bits, in units of the
    # element's step p / 2: 0 to 4, rounded to nearest even. Its exponent field says which binade that was.
    magnitude = y.abs().clamp_max_(6.0)
    magic = magnitude.view(torch.int32).bitwise_and(0x7F800000)
    magic.clamp_min_(0x3F800000).add_(((22 - bits) << 23) | 0x400000)
    fixed = magnitude.add_(magic.view(torch.float32)).view(torch.int32)
    steps = fixed.bitwise_and((8 << bits) - 1)
    if random is not None:
        steps.add_((1 << bits) - 1).sub_(random).bitwise_right_shift_(bits)
    # (exponent, first mantissa bit) of the sum is 2 * (127 + 22 - bits + log2 p) + 1, and each binade has two codes.
    codes = fixed.bitwise_right_shift_(22).add_(steps).sub_(2 * (149 - bits) + 1)
    sign = y.view(torch.int32).bitwise_right_shift(28).bitwise_and_(8)
    return codes.bitwise_or_(sign).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Pack two codes per byte along the last dimension, contiguous and of even length; the first in the low nibble."""
    pairs = codes.view(torch.int16)  # the first code in the low byte: as fast as on the CPU's little-endian order it is
    return pairs.bitwise_right_shift(4).bitwise_or_(pairs).to(torch.uint8)


def pack_rows(codes: Tensor) -> Tensor:
    """Pack two codes per byte along dimension 1 of ``[R, 16, K]``."""
    low, high = codes.unflatten(1, (-1, 2)).unbind(2)
    return high.bitwise_left_shift(4).bitwise_or_(low)


def values(packed: Tensor) -> Tensor:
    """Return float32 elements of packed bytes: ``[..., n]`` to ``[..., 2 n]``."""
    table = torch.tensor([*_VALUES, *(-v for v in _VALUES)], dtype=torch.float32, device="cpu")
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=1)
    return pairs.index_select(0, packed.flatten().to(torch.int32)).view(*packed.shape[:-1], 2 * packed.shape[-1])


# --- random bits ------------------------------------------------------------------------------------------------------


def random_bits(blocks: Tensor, seed: int, offset: int, stream: int) -> Tensor:
    """Return int32 ``[..., 16]``, uniform in [0, 2^16): bits for the elements of blocks, from their positions alone.

    Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), keyed by ``seed``, on the
    128-bit counter (two per block, ``stream`` in its bit 63, ``offset`` above): no two positions, streams or offsets
    share one. Each counter gives eight 16-bit numbers.

    Args:
        blocks: int64 positions of the blocks, not negative, below 2^62.
        seed, offset: 64-bit integers of either sign.
        stream: 0 or 1.
    """
    counter = torch.stack([2 * blocks, 2 * blocks + 1], dim=-1)
    words = _philox(counter & _LOW, (counter >> 32) | (stream << 31), offset & _64_BITS, seed & _64_BITS)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=-1).flatten(-2).to(torch.int32)


_LOW, _64_BITS = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def _philox(c0: Tensor, c1: Tensor, high: int, key: int) -> tuple[Tensor, ...]:
    """Run ten rounds on counters of four 32-bit words, held in int64; ``high`` are the upper two, shared by all."""
    k0, k1 = key & _LOW, key >> 32
    words: tuple[Tensor, ...] = (c0, c1, torch.full_like(c0, high & _LOW), torch.full_like(c0, high >> 32))
    for _ in range(10):
        c0, c1, c2, c3 = words
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # overflow modulo 2^64 is harmless after the shifts and masks
        words = (
            (second >> 32).bitwise_and_(_LOW).bitwise_xor_(c1).bitwise_xor_(k0),
            second.bitwise_and_(_LOW),
            (first >> 32).bitwise_and_(_LOW).bitwise_xor_(c3).bitwise_xor_(k1),
            first.bitwise_and_(_LOW),
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return words


# --- Hadamard transform -----------------------------------------------------------------------------------------------


def hadamard(runs: Tensor) -> Tensor:
    """Transform bfloat16 ``[R, 16, K]``: every run of 16 times its signs, through a Sylvester butterfly, times 1/4."""
    return _butterfly(runs * _signs()).mul_(0.25).to(torch.bfloat16)


def hadamard_back(runs: Tensor) -> Tensor:
    """Invert the transform, in float32: the butterfly, times 1/4, times the signs."""
    return _butterfly(runs.clone()).mul_(0.25).mul_(_signs())


def _signs() -> Tensor:
    return torch.tensor(_SIGNS, dtype=torch.float32, device="cpu")[:, None]


def _butterfly(value: Tensor) -> Tensor:
    """Run four stages over dimension 1 of ``[R, 16, K]``: a + b and a - b at distance 1, 2, 4, 8; overwrites
    ``value``.
    """
    count, _, k = value.shape
    other = torch.empty_like(value)
    for distance in (1, 2, 4, 8):
        pairs = (count, BLOCK // (2 * distance), 2, distance, k)
        (a, b), (total, difference) = value.view(pairs).unbind(2), other.view(pairs).unbind(2)
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        value, other = other, value
    return value
