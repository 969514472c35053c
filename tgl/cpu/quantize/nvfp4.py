"""NVFP4 on the CPU: which blocks there are, in which group, and where their bytes go; ``fp4`` has the arithmetic.

Everything is a stack of planes: rows in groups are one, weights are G. Rowwise, a step takes some rows of a plane, or
some whole planes, ``[P, R, K]``. Columnwise it takes runs of 16 rows, ``[P * R, 16, K]``, zero-filled where a group
ends; runs of rows in groups begin where the placement says. Either way a block's elements lie along one dimension and
all others are vectorised over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...aten.group_factors import fp4_scales
from ...aten.indexed import Indexed
from ...meta import placement
from ...meta.components import Components
from ...meta.quantized import DequantizeOptions, Options
from ..permutation import rows_at
from . import fp4
from ._rows import Groups, matrices_at
from ._scales import RowScales
from .fp4 import BLOCK

_STEP = 1 << 17  # elements per thread: the float32 and int32 temporaries of a step stay in the cache
_UNIT = 64  # tokens
_RUNS = _UNIT // BLOCK

Step = tuple[slice, slice]


def _steps(planes: int, rows: int, width: int, multiple: int) -> Iterator[Step]:
    """Slices of planes and rows of about a step's elements: whole planes, or ``multiple`` rows (or more) of one."""
    if not planes or not rows or not width:
        return
    size = _STEP * torch.get_num_threads()
    whole = size // (rows * width)
    if whole > 0:
        for p in range(0, planes, whole):
            yield slice(p, min(p + whole, planes)), slice(0, rows)
        return
    some = max(size // (width * multiple), 1) * multiple
    for p in range(planes):
        for r in range(0, rows, some):
            yield slice(p, p + 1), slice(r, min(r + some, rows))


class _Stack:
    """Planes of rows, and the groups that their rows belong to.

    Attributes:
        groups: of the rows; those of weights are the planes.
        grouped: whether it is rows in groups.
        planes: how many.
        columns: K.
        routed: rows to be quantised in each plane.
        runs: runs of 16 rows in each plane, those in the gaps of the placement included; 0 without rows.
    """

    def __init__(self, x: Tensor | Indexed, offs: Tensor | None, slots: Tensor | None = None) -> None:
        self.groups = Groups(x, offs, slots)
        self.grouped = offs is not None
        self.columns = x.shape[-1]
        if offs is None:
            self.planes, self.routed = self.groups.count, x.shape[1]
            self.runs = -(-self.routed // BLOCK)
        else:
            self.planes, self.routed = 1, self.groups.routed
            self.runs = _RUNS * int(placement.units(x.shape[0], self.groups.count, _UNIT)) if self.routed else 0

    def stacked(self, t: Tensor) -> Tensor:
        """A tensor that has a plane dimension for weights only, with one in any case."""
        return t[None] if self.grouped else t

    def group_of_rows(self, step: Step) -> Tensor:
        """int64 ``[P, R]`` or ``[P, 1]``."""
        planes, rows = step
        if self.grouped:
            return self.groups.of_rows(rows.start, rows.stop)[None]
        return torch.arange(planes.start, planes.stop, device="cpu")[:, None]

    def group_of_runs(self, step: Step) -> Tensor:
        """int64 ``[P * R]``."""
        planes, runs = step
        if not self.grouped:
            return torch.arange(planes.start, planes.stop, device="cpu").repeat_interleave(runs.stop - runs.start)
        first = self.groups.begins(_UNIT) // BLOCK
        return torch.searchsorted(first, torch.arange(runs.start, runs.stop, device="cpu"), right=True) - 1

    def rows_of_runs(self, step: Step) -> Tensor:
        """int64 ``[R, 16]`` for rows in groups: the rows of each run, -1 where there is none."""
        group = self.group_of_runs(step)[:, None]
        place = torch.arange(step[1].start * BLOCK, step[1].stop * BLOCK, device="cpu").view(-1, BLOCK)
        rows = place + (self.groups.firsts - self.groups.begins(_UNIT))[group]
        return torch.where(rows < self.groups.ends[group], rows, -1)

    def flat(self, step: Step) -> tuple[int, int]:
        """The range of rows of a step, all planes stacked; steps are whole planes or part of one."""
        planes, rows = step
        return planes.start * self.routed + rows.start, (planes.stop - 1) * self.routed + rows.stop


@dataclass(frozen=True)
class _Source:
    """What is quantised: ``x`` in a stack, times ``row_scale``; ``matrices`` are the planes at slots of it, or None."""

    x: Tensor | Indexed
    row_scale: Tensor | None
    stack: _Stack
    matrices: list[Tensor] | None

    def rows(self, step: Step) -> Tensor:
        """``[P, R, K]``, contiguous, in x's dtype."""
        planes, rows = step
        if self.matrices is not None:
            return torch.stack([matrix[rows] for matrix in self.matrices[planes]])
        if isinstance(self.x, Indexed):
            x = rows_at(self.x.t, self.x.index[rows])[None]
        else:
            x = self.stack.stacked(self.x)[step].contiguous()
        if self.row_scale is None:
            return x
        return (x.float() * self.row_scale[rows].float()[:, None]).to(x.dtype)

    def runs(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """Runs ``[., 16, K]`` that have a row, zeros where there is none, and which of the step's they are (None: all).

        Of ragged groups up to three runs in four have none.
        """
        planes, runs = step
        if not self.stack.grouped:
            rows = slice(runs.start * BLOCK, min(runs.stop * BLOCK, self.stack.routed))
            x = self.rows((planes, rows))
            missing = (runs.stop - runs.start) * BLOCK - x.shape[1]
            x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
            return x.reshape(-1, BLOCK, x.shape[-1]), None
        index = self.stack.rows_of_runs(step)
        first, last = int(index[0, 0]), int(index[-1, -1])
        if first >= 0 and last - first == index.numel() - 1:
            return self.rows((planes, slice(first, last + 1))).view(*index.shape, self.x.shape[-1]), None
        used = index[:, 0] >= 0
        some = None if bool(used.all()) else used.nonzero().flatten()
        index = index if some is None else index[some]
        flat = index.flatten().clamp_min(0)
        if isinstance(self.x, Indexed):
            x = rows_at(self.x.t, self.x.index.index_select(0, flat))
        else:
            x = self.x.index_select(0, flat)
        if self.row_scale is not None:
            x = (x.float() * self.row_scale.index_select(0, flat).float()[:, None]).to(x.dtype)
        return x.view(*index.shape, x.shape[1]).masked_fill_((index < 0)[..., None], 0.0), some


# --- amax -------------------------------------------------------------------------------------------------------------


def _magnitude(x: Tensor) -> Tensor:
    """|x| as integers of the same width, which compare like the magnitudes, NaN above Inf."""
    as_integer = torch.int32 if x.dtype == torch.float32 else torch.int16
    return x.view(as_integer).bitwise_and(torch.iinfo(as_integer).max)


def _finite_amax(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """float32 maximum of |x| over ``dim``, leaving out what is not finite."""
    magnitude = _magnitude(x)
    infinity = int(_magnitude(torch.tensor([float("inf")], dtype=x.dtype, device="cpu")))
    found = magnitude.amax(dim)
    if bool((found >= infinity).any()):
        found = magnitude.masked_fill_(magnitude >= infinity, 0).amax(dim)
    return found.view(x.dtype).float()


def _block_amax(x: Tensor, dim: int) -> Tensor:
    """float32 maximum of |x| over the blocks of 16 along ``dim``; Inf or NaN if the block holds one."""
    return _magnitude(x).amax(dim).view(x.dtype).float()


def _group_amax(source: _Source) -> Tensor:
    """float32 ``[G]``: amax of every group's finite elements."""
    stack, k = source.stack, source.stack.columns
    amax = torch.zeros(stack.groups.count, dtype=torch.float32, device="cpu")
    for step in _steps(stack.planes, stack.routed, k, 1):
        group = stack.group_of_rows(step)
        found = _finite_amax(source.rows(step), -1)
        amax.scatter_reduce_(0, group.expand_as(found).flatten(), found.flatten(), "amax")
    return amax


def _transformed_amax(source: _Source) -> Tensor:
    """float32 ``[G]``: amax of every group's finite elements after the Hadamard transform."""
    stack, k = source.stack, source.stack.columns
    amax = torch.zeros(stack.groups.count, dtype=torch.float32, device="cpu")
    for step in _steps(stack.planes, stack.runs, k * BLOCK, _RUNS):
        x, some = source.runs(step)
        found = _finite_amax(fp4.hadamard(x), (1, 2))
        amax.scatter_reduce_(0, _picked(stack.group_of_runs(step), some), found, "amax")
    return amax


# --- quantise ---------------------------------------------------------------------------------------------------------


def quantize(
    x: Tensor | Indexed,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    rng: Tensor | None,
    slots: Tensor | None,
    *,
    options: Options,
    out: Components,
) -> None:
    """See the package."""
    stack = _Stack(x, offs, slots)
    matrices = None if slots is None or isinstance(x, Indexed) else matrices_at(x, slots)
    source = _Source(x, row_scale, stack, matrices)
    own = options.rowwise or not options.rht
    amax = _group_amax(source) if own else torch.empty(0, dtype=torch.float32, device="cpu")
    seed = (int(rng[0]), int(rng[1])) if rng is not None else None
    if options.rowwise:
        out.amax.copy_(amax)
        _rowwise(source, amax, seed, options, out.data, out.scale)
    if options.columnwise:
        amax = _transformed_amax(source) if options.rht else amax
        out.columnwise_amax.copy_(amax)
        _columnwise(source, amax, seed, options, out.columnwise_data, out.columnwise_scale)


def _rowwise(
    source: _Source, amax: Tensor, seed: tuple[int, int] | None, options: Options, data: Tensor, scale: Tensor
) -> None:
    stack, k = source.stack, source.stack.columns
    data, blocks = stack.stacked(data), -(-k // BLOCK)
    scales = RowScales(scale, stack.groups, blocks, options.blocked)
    encode, decode = fp4_scales(amax)
    data[:, stack.routed :].zero_()
    scales.clear()
    for step in _steps(stack.planes, stack.routed, k, BLOCK):
        x = source.rows(step)
        if k % BLOCK:
            x = torch.nn.functional.pad(x, (0, blocks * BLOCK - k))
        x = x.view(*x.shape[:2], blocks, BLOCK)
        found = _block_amax(x, -1)
        if options.block_2d:
            found = _shared_by_rows(found)
        group = stack.group_of_rows(step)[..., None]
        bytes_, multiplier, broken = fp4.block_scales(found, encode[group], decode[group])
        y = x * multiplier[..., None]
        if seed is None:
            codes = fp4.nearest(y)
        else:
            codes = fp4.stochastic(y, fp4.random_bits(_rowwise_blocks(stack, step, blocks), *seed, stream=0))
        pairs = fp4.pack(codes).masked_fill_(broken[..., None], fp4.PAIR_NAN)
        data[step] = pairs.flatten(2)[..., : k // 2]
        scales.write(*stack.flat(step), bytes_.flatten(0, 1))


def _shared_by_rows(amax: Tensor) -> Tensor:
    """``[P, R, B]`` maxima of blocks to those of squares of 16 rows, R counted from a multiple of 16."""
    rows = amax.shape[1]
    padded = torch.nn.functional.pad(amax, (0, 0, 0, -rows % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).amax(2).repeat_interleave(BLOCK, 1)[:, :rows]


def _rowwise_blocks(stack: _Stack, step: Step, blocks: int) -> Tensor:
    """int64 ``[P, R, B]``: position of every block among all."""
    planes, rows = (torch.arange(s.start, s.stop, device="cpu") for s in step)
    row = planes[:, None] * stack.routed + rows  # of groups, the one plane is 0
    return row[..., None] * blocks + torch.arange(blocks, device="cpu")


def _columnwise(
    source: _Source, amax: Tensor, seed: tuple[int, int] | None, options: Options, data: Tensor, scale: Tensor
) -> None:
    stack, k = source.stack, source.stack.columns
    data, scale = stack.stacked(data), stack.stacked(scale)
    if options.blocked or not stack.routed:
        scale.zero_()
    if not stack.routed:
        data.zero_()
        return
    encode, decode = fp4_scales(amax)
    for step in _steps(stack.planes, stack.runs, k * BLOCK, _RUNS):
        x, some = source.runs(step)
        if options.rht:
            x = fp4.hadamard(x)
        found = _block_amax(x, 1)
        if options.block_2d:
            found = _shared_by_columns(found)
        group = _picked(stack.group_of_runs(step), some)[:, None]
        bytes_, multiplier, broken = fp4.block_scales(found, encode[group], decode[group])
        y = x * multiplier[:, None]
        if seed is None:
            codes = fp4.nearest(y)
        else:
            random = fp4.random_bits(_picked(_columnwise_blocks(stack, step, k), some), *seed, stream=1)
            codes = fp4.stochastic(y, random.transpose(1, 2))
        pairs = fp4.pack_rows(codes).masked_fill_(broken[:, None], fp4.PAIR_NAN)
        planes, runs = step
        count = planes.stop - planes.start
        if some is not None:
            pairs = pairs.new_zeros((runs.stop - runs.start, *pairs.shape[1:])).index_copy_(0, some, pairs)
            bytes_ = bytes_.new_zeros((runs.stop - runs.start, k)).index_copy_(0, some, bytes_)
        across = data[planes, :, runs.start * BLOCK // 2 : runs.stop * BLOCK // 2]
        across.copy_(pairs.view(count, -1, k)[:, : across.shape[-1]].transpose(1, 2))
        turned = bytes_.view(count, -1, k).transpose(1, 2)
        if options.blocked:
            scale[planes].index_copy_(1, _blocked(stack, runs), turned.flatten(1))
        else:
            scale[planes, :, runs] = turned


def _blocked(stack: _Stack, runs: slice) -> Tensor:
    """int64: offsets of the scales ``[K, R]`` of runs in a blocked plane."""
    y, x = torch.arange(stack.columns, device="cpu")[:, None], torch.arange(runs.start, runs.stop, device="cpu")
    return placement.blocked_offset(y, x, stack.runs).flatten()  # type: ignore[union-attr]


def _picked(of_runs: Tensor, some: Tensor | None) -> Tensor:
    return of_runs if some is None else of_runs[some]


def _shared_by_columns(amax: Tensor) -> Tensor:
    """``[R, K]`` maxima of blocks to those of squares of 16 columns."""
    k = amax.shape[1]
    padded = torch.nn.functional.pad(amax, (0, -k % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).amax(2).repeat_interleave(BLOCK, 1)[:, :k]


def _columnwise_blocks(stack: _Stack, step: Step, k: int) -> Tensor:
    """int64 ``[P * R, K]``: position of every block among all."""
    planes, runs = (torch.arange(s.start, s.stop, device="cpu") for s in step)
    return (planes[:, None] * stack.runs + runs).flatten()[:, None] * k + torch.arange(k, device="cpu")


# --- dequantise -------------------------------------------------------------------------------------------------------


def dequantize(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> None:
    """See the package."""
    assert amax is not None
    stack = _Stack(out, offs)
    decode = fp4_scales(amax)[1]
    if options.columnwise:
        _columnwise_back(data, scale, decode, stack, options, out)
    else:
        _rowwise_back(data, scale, decode, stack, options, out)


def _rowwise_back(
    data: Tensor, scale: Tensor, decode: Tensor, stack: _Stack, options: DequantizeOptions, out: Tensor
) -> None:
    k = stack.columns
    blocks = -(-k // BLOCK)
    scales = RowScales(scale, stack.groups, blocks, options.blocked)
    data, out = stack.stacked(data), stack.stacked(out)
    out[:, stack.routed :].zero_()
    for step in _steps(stack.planes, stack.routed, k, 1):
        bytes_ = scales.read(*stack.flat(step)).view(*data[step].shape[:2], blocks)
        pairs = torch.nn.functional.pad(data[step], (0, blocks * BLOCK // 2 - k // 2))
        values = fp4.values(pairs).unflatten(-1, (blocks, BLOCK))
        values *= fp4.decoded(bytes_, decode[stack.group_of_rows(step)[..., None]])[..., None]
        out[step] = values.flatten(2)[..., :k]


def _columnwise_back(
    data: Tensor, scale: Tensor, decode: Tensor, stack: _Stack, options: DequantizeOptions, out: Tensor
) -> None:
    k = stack.columns
    data, scale = stack.stacked(data), stack.stacked(scale)
    if stack.grouped:
        out[stack.routed :].zero_()
    for step in _steps(stack.planes, stack.runs, k * BLOCK, _RUNS):
        planes, runs = step
        if options.blocked:
            bytes_ = scale[planes].index_select(1, _blocked(stack, runs)).unflatten(1, (k, -1))
        else:
            bytes_ = scale[planes, :, runs]
        pairs = data[planes, :, runs.start * BLOCK // 2 : runs.stop * BLOCK // 2]
        pairs = torch.nn.functional.pad(pairs, (0, (runs.stop - runs.start) * BLOCK // 2 - pairs.shape[-1]))
        values = fp4.values(pairs.contiguous()).unflatten(-1, (-1, BLOCK))  # [P, K, R, 16]
        group = stack.group_of_runs(step).view(planes.stop - planes.start, 1, -1)
        values *= fp4.decoded(bytes_, decode[group])[..., None]
        x = values.permute(0, 2, 3, 1).reshape(-1, BLOCK, k)
        if options.rht:
            x = fp4.hadamard_back(x)
        x = x.to(out.dtype)
        if not stack.grouped:
            rows = slice(runs.start * BLOCK, min(runs.stop * BLOCK, stack.routed))
            out[planes, rows] = x.view(planes.stop - planes.start, -1, k)[:, : rows.stop - rows.start]
        else:
            index = stack.rows_of_runs(step).flatten()
            used = index >= 0
            out[index[used]] = x.view(-1, k)[used]
