"""Conversion of bytes to float32, and the behaviour of torch's casts."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..scratch import Scratch


def table(dtype: torch.dtype) -> Tensor:
    """Return the float32 value of every byte of an 8-bit dtype."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()


@functools.cache
def cast_saturates(dtype: torch.dtype) -> bool:
    """Return whether torch's cast saturates at the largest element, as it does since 2.12 for E4M3."""
    largest = torch.finfo(dtype).max
    return bool(torch.tensor([2 * largest], dtype=torch.float32, device="cpu").to(dtype).float() == largest)


def fp8_values(data: Tensor, values: Tensor, scratch: Scratch) -> Tensor:
    """Return FP8 ``data`` (2-D) as float32, in a buffer; a table is five times as fast as the CPU's cast from E4M3."""
    index = scratch.room("index", *data.shape, dtype=torch.int32).copy_(data.view(torch.uint8))
    flat = torch.index_select(values, 0, index.view(-1), out=scratch.room("values", data.numel()))
    return flat.view(data.shape)


def power_of_two(byte: Tensor) -> Tensor:
    """Return E8M0 bytes as float32: ``2^(byte - 127)``, NaN for 0xFF."""
    bits = (byte.to(torch.int32) << 23).clamp_(min=0x00400000)
    return bits.view(torch.float32).masked_fill_(byte == 0xFF, torch.nan)


def multiply_blocks(wide: Tensor, factors: Tensor, block: int) -> None:
    """Multiply every run of ``block`` columns, the last one partial, by its factor, in place."""
    whole = wide.shape[1] // block
    wide[:, : whole * block].unflatten(1, (whole, block)).mul_(factors[:, :whole, None])
    wide[:, whole * block :].mul_(factors[:, whole:])
