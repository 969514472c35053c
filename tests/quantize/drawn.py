"""NVFP4 of a CPU as kernels write it whose stochastic rounding is an instruction: other random bits, and its rounding.

The instruction is ``cvt.rs.satfinite.e2m1x4.f32``, as the emulator has it. Random words are those of
``fp4.random_bits``, of which two rows share a half of a block, or two columns; places are counted in tiles of 128 rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cute_emulator.numerics.formats import encode_small
from tgl.backends.cpu.quantize import fp4
from tgl.cutlass_kernels.archs import serving

TILE, BLOCK, UNIT = 128, 16, 64  # rows of a tile, of a block, and of the placement of columnwise data


@contextlib.contextmanager
def as_on(chip: str, x: Tensor, offs: Tensor | None, options: Mapping[str, Any]) -> Iterator[None]:
    """Let the CPU quantise so, if a kernel for the chip does; ``options`` are those of ``group_quantize``."""
    entry = serving(chip)
    if options.get("rng") is None or entry is None or chip not in entry.draws_to_fp4:
        yield
        return
    with by_instruction(x, offs, options.get("slots" if offs is None else "rows")):
        yield


@contextlib.contextmanager
def by_instruction(x: Tensor, offs: Tensor | None, order: Tensor | None = None) -> Iterator[None]:
    """Let the CPU quantise so; ``order`` is what takes rows or matrices of ``x`` out of order, if anything does."""
    columns, count = x.shape[-1], (x if order is None else order).shape[0]
    rows, runs = _of_matrices(count, x.shape[1]) if offs is None else _of_groups(count, offs.tolist())
    usual = fp4.random_bits, fp4.stochastic

    def random_bits(blocks: Tensor, seed: int, offset: int, stream: int) -> Tensor:
        across = columns if stream else -(-columns // BLOCK)
        down, along = (runs if stream else rows)[blocks // across], blocks % across
        if stream:
            pair, second = (down * across + along) // 2, along % 2
        else:
            pair, second = down // 2 * across + along, down % 2
        words = usual[0](pair, seed, offset, stream).unflatten(-1, (2, 2, 2, 2))  # half, row or column, word, its half
        low, high = torch.where(second[..., None, None, None].bool(), words[..., 1, :, :], words[..., 0, :, :]).unbind(
            -1
        )
        lower, upper = (high & 0xFF) << 8 | low & 0xFF, high >> 8 << 8 | low >> 8
        return torch.stack([lower, lower, upper, upper], -1).flatten(-3)

    def stochastic(y: Tensor, random: Tensor) -> Tensor:
        return torch.from_numpy(encode_small(y.numpy(), "e2m1", "rs", random.numpy())).contiguous()

    fp4.random_bits, fp4.stochastic = random_bits, stochastic
    try:
        yield
    finally:
        fp4.random_bits, fp4.stochastic = usual


def _of_matrices(count: int, rows: int) -> tuple[Tensor, Tensor]:
    """The row in tiles of every row, and the block down the tiles of every block of 16 of them."""
    tall, runs = -(-rows // TILE) * TILE, -(-rows // BLOCK)
    first = torch.arange(count)[:, None]
    return (first * tall + torch.arange(rows)).flatten(), (first * tall // BLOCK + torch.arange(runs)).flatten()


def _of_groups(tokens: int, ends: list[int]) -> tuple[Tensor, Tensor]:
    """Likewise; 0 of what no group has."""
    rows = torch.zeros(tokens, dtype=torch.int64)
    runs = torch.zeros(UNIT // BLOCK * (-(-tokens // UNIT) + len(ends)), dtype=torch.int64)
    for g, (start, end) in enumerate(zip([0, *ends], ends)):
        tile, place, count = start // TILE + g, (start // UNIT + g) * UNIT // BLOCK, -(-(end - start) // BLOCK)
        rows[start:end] = tile * TILE + torch.arange(end - start)
        runs[place : place + count] = tile * TILE // BLOCK + torch.arange(count)
    return rows, runs
