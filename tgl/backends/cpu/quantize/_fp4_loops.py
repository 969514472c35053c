"""Loops over blocks for the E2M1 formats; a ``ScaleRule`` computes a block's scale."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ....meta import placement
from ....meta.quantized import DequantizeOptions, Options
from . import fp4
from ._fp4_stacks import Stack, Stacked, Step, steps
from ._scales import RowScales


class ScaleRule(Protocol):
    """Scales of a format's blocks. ``group`` is int64 and broadcasts to the blocks."""

    def scales(self, amax: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scale bytes, float32 multipliers of the elements, and which blocks hold Inf or NaN.

        Args:
            amax: float32, amax of each block; Inf or NaN if the block holds one.
            group: group of each block.
        """

    def decoded(self, scale: Tensor, group: Tensor) -> Tensor:
        """Return float32 factors of the elements of blocks, from their scale bytes."""


def magnitude(x: Tensor) -> Tensor:
    """Return |x| as integers of the same width, which compare like the magnitudes, NaN above Inf."""
    as_integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    return x.view(as_integer).bitwise_and(torch.iinfo(as_integer).max)


def block_amax(x: Tensor, dim: int) -> Tensor:
    """Return the float32 maximum of |x| over the blocks along ``dim``; Inf or NaN if the block holds one."""
    return magnitude(x).amax(dim).view(x.dtype).float()


# --- quantise ---------------------------------------------------------------------------------------------------------


def rowwise(
    source: Stacked, rule: ScaleRule, seed: tuple[int, int] | None, options: Options, data: Tensor, scale: Tensor
) -> None:
    """Quantise blocks along the columns; with a ``seed`` elements are rounded stochastically."""
    stack, k, block = source.stack, source.stack.columns, source.stack.block
    data, blocks = stack.stacked(data), -(-k // block)
    scales = RowScales(scale, stack.groups, blocks, options.blocked)
    data[:, stack.routed :].zero_()
    scales.clear()
    for step in steps(stack.planes, stack.routed, k, block):
        x = source.rows(step)
        if k % block:
            x = torch.nn.functional.pad(x, (0, blocks * block - k))
        x = x.view(*x.shape[:2], blocks, block)
        found = block_amax(x, -1)
        if options.block_2d:
            found = _shared_by_rows(found, block)
        group = stack.group_of_rows(step)[..., None]
        bytes_, multiplier, broken = rule.scales(found, group)
        y = x * multiplier[..., None]
        if seed is None:
            codes = fp4.nearest(y)
        else:
            codes = fp4.stochastic(y, fp4.random_bits(_rowwise_positions(stack, step, blocks), *seed, stream=0))
        pairs = fp4.pack(codes).masked_fill_(broken[..., None], fp4.PAIR_NAN)
        data[step] = pairs.flatten(2)[..., : k // 2]
        scales.write(*stack.flat(step), bytes_.flatten(0, 1))


def _shared_by_rows(amax: Tensor, block: int) -> Tensor:
    """Reduce ``[P, R, B]`` maxima of blocks to squares of ``block`` rows, R aligned to ``block``."""
    rows = amax.shape[1]
    padded = torch.nn.functional.pad(amax, (0, 0, 0, -rows % block))
    return padded.unflatten(1, (-1, block)).amax(2).repeat_interleave(block, 1)[:, :rows]


def _rowwise_positions(stack: Stack, step: Step, blocks: int) -> Tensor:
    """Return the position of every block among all, int64 ``[P, R, B]``."""
    planes, rows = (torch.arange(s.start, s.stop, device="cpu") for s in step)
    row = planes[:, None] * stack.routed + rows  # with rows in groups, the only plane is 0
    return row[..., None] * blocks + torch.arange(blocks, device="cpu")


def columnwise(
    source: Stacked, rule: ScaleRule, seed: tuple[int, int] | None, options: Options, data: Tensor, scale: Tensor
) -> None:
    """Quantise blocks along the rows, from each group's start; data and compact scales are stored transposed."""
    stack, k, block = source.stack, source.stack.columns, source.stack.block
    data, scale = stack.stacked(data), stack.stacked(scale)
    if options.blocked or not stack.routed:
        scale.zero_()
    if not stack.routed:
        data.zero_()
        return
    for step in steps(stack.planes, stack.runs, k * block, stack.runs_of_unit):
        x, some = source.runs(step)
        if options.rht:
            x = fp4.hadamard(x)
        found = block_amax(x, 1)
        if options.block_2d:
            found = _shared_by_columns(found, block)
        group = picked(stack.group_of_runs(step), some)[:, None]
        bytes_, multiplier, broken = rule.scales(found, group)
        y = x * multiplier[:, None]
        if seed is None:
            codes = fp4.nearest(y)
        else:
            random = fp4.random_bits(picked(_columnwise_positions(stack, step, k), some), *seed, stream=1)
            codes = fp4.stochastic(y, random.transpose(1, 2))
        pairs = fp4.pack_rows(codes).masked_fill_(broken[:, None], fp4.PAIR_NAN)
        planes, runs = step
        count = planes.stop - planes.start
        if some is not None:
            pairs = pairs.new_zeros((runs.stop - runs.start, *pairs.shape[1:])).index_copy_(0, some, pairs)
            bytes_ = bytes_.new_zeros((runs.stop - runs.start, k)).index_copy_(0, some, bytes_)
        across = data[planes, :, runs.start * block // 2 : runs.stop * block // 2]
        across.copy_(pairs.view(count, -1, k)[:, : across.shape[-1]].transpose(1, 2))
        turned = bytes_.view(count, -1, k).transpose(1, 2)
        if options.blocked:
            scale[planes].index_copy_(1, _blocked(stack, runs), turned.flatten(1))
        else:
            scale[planes, :, runs] = turned


def _blocked(stack: Stack, runs: slice) -> Tensor:
    """Return int64 offsets of the scales ``[K, R]`` of runs in a blocked plane."""
    y, x = torch.arange(stack.columns, device="cpu")[:, None], torch.arange(runs.start, runs.stop, device="cpu")
    return placement.blocked_offset(y, x, stack.runs).flatten()  # type: ignore[union-attr]


def picked(of_runs: Tensor, some: Tensor | None) -> Tensor:
    return of_runs if some is None else of_runs[some]


def _shared_by_columns(amax: Tensor, block: int) -> Tensor:
    """Reduce ``[R, K]`` maxima of blocks to squares of ``block`` columns."""
    k = amax.shape[1]
    padded = torch.nn.functional.pad(amax, (0, -k % block))
    return padded.unflatten(1, (-1, block)).amax(2).repeat_interleave(block, 1)[:, :k]


def _columnwise_positions(stack: Stack, step: Step, k: int) -> Tensor:
    """Return the position of every block among all, int64 ``[P * R, K]``."""
    planes, runs = (torch.arange(s.start, s.stop, device="cpu") for s in step)
    return (planes[:, None] * stack.runs + runs).flatten()[:, None] * k + torch.arange(k, device="cpu")


# --- dequantise -------------------------------------------------------------------------------------------------------


def rowwise_back(
    data: Tensor, scale: Tensor, rule: ScaleRule, stack: Stack, options: DequantizeOptions, out: Tensor
) -> None:
    """Write ``out [T, K]`` or ``[G, N, K]`` from rowwise components."""
    k, block = stack.columns, stack.block
    blocks = -(-k // block)
    scales = RowScales(scale, stack.groups, blocks, options.blocked)
    data, out = stack.stacked(data), stack.stacked(out)
    out[:, stack.routed :].zero_()
    for step in steps(stack.planes, stack.routed, k, 1):
        bytes_ = scales.read(*stack.flat(step)).view(*data[step].shape[:2], blocks)
        pairs = torch.nn.functional.pad(data[step], (0, blocks * block // 2 - k // 2))
        values = fp4.values(pairs).unflatten(-1, (blocks, block))
        values *= rule.decoded(bytes_, stack.group_of_rows(step)[..., None])[..., None]
        out[step] = values.flatten(2)[..., :k]


def columnwise_back(
    data: Tensor, scale: Tensor, rule: ScaleRule, stack: Stack, options: DequantizeOptions, out: Tensor
) -> None:
    """Write ``out [T, K]`` or ``[G, N, K]`` from columnwise components."""
    k, block = stack.columns, stack.block
    data, scale = stack.stacked(data), stack.stacked(scale)
    if stack.grouped:
        out[stack.routed :].zero_()
    for step in steps(stack.planes, stack.runs, k * block, stack.runs_of_unit):
        planes, runs = step
        if options.blocked:
            bytes_ = scale[planes].index_select(1, _blocked(stack, runs)).unflatten(1, (k, -1))
        else:
            bytes_ = scale[planes, :, runs]
        pairs = data[planes, :, runs.start * block // 2 : runs.stop * block // 2]
        pairs = torch.nn.functional.pad(pairs, (0, (runs.stop - runs.start) * block // 2 - pairs.shape[-1]))
        values = fp4.values(pairs.contiguous()).unflatten(-1, (-1, block))  # [P, K, R, block]
        group = stack.group_of_runs(step).view(planes.stop - planes.start, 1, -1)
        values *= rule.decoded(bytes_, group)[..., None]
        x = values.permute(0, 2, 3, 1).reshape(-1, block, k)
        if options.rht:
            x = fp4.hadamard_back(x)
        x = x.to(out.dtype)
        if not stack.grouped:
            rows = slice(runs.start * block, min(runs.stop * block, stack.routed))
            out[planes, rows] = x.view(planes.stop - planes.start, -1, k)[:, : rows.stop - rows.start]
        else:
            index = stack.rows_of_runs(step).flatten()
            used = index >= 0
            out[index[used]] = x.view(-1, k)[used]
