"""Decode quantised operands to bfloat16, as steps of ATen on any device, without reading values on the host.

A bfloat16 holds every element of every format exactly, and also an E2M1 element times its E4M3 scale. E8M0 scales have
a wider range than bfloat16, so they are taken relative to the largest of a row, a matrix or a group, whose own power
multiplies the product. Float32 scales are not applied here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...meta.formats import E4M3, E8M0, E8M0_NAN

BF16 = torch.bfloat16
_BIAS, _MANTISSA, _NAN_BITS = 127, 7, 0x7FC0  # exponent bias, mantissa bits and NaN of bfloat16
_LEAST = -126  # exponent of the smallest normal number


def elements(data: Tensor) -> Tensor:
    """Decode FP8 data, or FP4 data two per byte along the last dimension."""
    if data.dtype != torch.uint8:
        return data.to(BF16)
    pairs = torch.stack((data & 15, data >> 4), -1).flatten(-2).int()
    magnitude = pairs & 7  # exponent, then one bit of mantissa: 0 is 0 and 1 a half, and the others are normal
    bits = torch.where(magnitude < 2, magnitude * ((_BIAS - 1) << _MANTISSA), (magnitude + 2 * (_BIAS - 1)) << 6)
    return _of_bits(bits | (pairs & 8) << 12)


def block_scales(scale: Tensor) -> Tensor:
    """Decode E4M3 scales."""
    return scale.contiguous().view(E4M3).to(BF16)


def powers(scale: Tensor, largest: Tensor) -> Tensor:
    """Return ``2^(scale - largest)`` of E8M0 bytes up to ``largest``, which broadcasts; NaN for the NaN byte."""
    exponent = scale.int() - largest.int()
    normal = (exponent + _BIAS) << _MANTISSA
    below = exponent - (_LEAST - _MANTISSA)  # of a subnormal number, the place of its one bit
    bits = torch.where(exponent >= _LEAST, normal, torch.where(below >= 0, 1 << below.clamp_min(0), 0))
    return _of_bits(bits.masked_fill(scale == E8M0_NAN, _NAN_BITS))


def scale_by_power(total: Tensor, exponent: Tensor) -> Tensor:
    """Multiply ``total`` by ``2^exponent``, from -254 to 254, in place: in two halves, which float32 can hold."""
    half = exponent // 2
    for part in (half, exponent - half):
        total.mul_((part + _BIAS).to(torch.uint8).view(E8M0).float())
    return total


def finite(scale: Tensor) -> Tensor:
    """Return E8M0 bytes with 0 for the NaN byte, from which the largest is chosen."""
    return scale.masked_fill(scale == E8M0_NAN, 0)


def exponent_of(byte: Tensor) -> Tensor:
    """Return int32 exponents of E8M0 bytes."""
    return byte.int() - _BIAS


def spread(scale: Tensor, block: int, dim: int, length: int) -> Tensor:
    """Repeat every scale ``block`` times along ``dim``, cut to ``length``."""
    return scale.repeat_interleave(block, dim).narrow(dim, 0, length)


def _of_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(BF16)
