"""NVFP4 on the CPU: the scales of groups and of blocks; ``fp4`` has the arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from ....meta.components import Components
from ....meta.quantized import DequantizeOptions, Options
from ...portable.group_factors import fp4_scales
from . import fp4
from ._fp4_loops import columnwise, columnwise_back, magnitude, picked, rowwise, rowwise_back
from ._fp4_stacks import Stack, Stacked, steps
from ._rows import Source
from .fp4 import BLOCK


class _NVFP4Scales:
    """E4M3 scales of blocks of groups whose largest finite magnitudes are ``amax [G]``."""

    def __init__(self, amax: Tensor) -> None:
        self.encode, self.decode = fp4_scales(amax)

    def scales(self, amax: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return fp4.block_scales(amax, self.encode[group], self.decode[group])

    def decoded(self, scale: Tensor, group: Tensor) -> Tensor:
        return fp4.decoded(scale, self.decode[group])


def quantize(source: Source, options: Options, out: Components) -> None:
    """Quantise; see the package for the contract."""
    stacked, rng = Stacked.of(source, options.description), source.rng
    own = options.rowwise or not options.rht
    amax = _group_amax(stacked) if own else torch.empty(0, dtype=torch.float32, device="cpu")
    seed = (int(rng[0]), int(rng[1])) if rng is not None else None
    if options.rowwise:
        out.amax.copy_(amax)
        rowwise(stacked, _NVFP4Scales(amax), seed, options, out.data, out.scale)
    if options.columnwise:
        amax = _transformed_amax(stacked) if options.rht else amax
        out.columnwise_amax.copy_(amax)
        columnwise(stacked, _NVFP4Scales(amax), seed, options, out.columnwise_data, out.columnwise_scale)


def dequantize(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> None:
    """Dequantise; see the package for the contract."""
    assert amax is not None
    back = columnwise_back if options.columnwise else rowwise_back
    back(data, scale, _NVFP4Scales(amax), Stack(options.description, out, offs), options, out)


# --- amax -------------------------------------------------------------------------------------------------------------


def _finite_amax(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the float32 maximum of finite |x| over ``dim``."""
    found = magnitude(x)
    infinity = int(magnitude(torch.tensor([float("inf")], dtype=x.dtype, device="cpu")))
    largest = found.amax(dim)
    if bool((largest >= infinity).any()):
        largest = found.masked_fill_(found >= infinity, 0).amax(dim)
    return largest.view(x.dtype).float()


def _group_amax(source: Stacked) -> Tensor:
    """Return the amax of every group's finite elements, float32 ``[G]``."""
    stack, k = source.stack, source.stack.columns
    amax = torch.zeros(stack.groups.count, dtype=torch.float32, device="cpu")
    for step in steps(stack.planes, stack.routed, k, 1):
        group = stack.group_of_rows(step)
        found = _finite_amax(source.rows(step), -1)
        amax.scatter_reduce_(0, group.expand_as(found).flatten(), found.flatten(), "amax")
    return amax


def _transformed_amax(source: Stacked) -> Tensor:
    """Return the amax of every group's finite elements after the Hadamard transform, float32 ``[G]``."""
    stack, k = source.stack, source.stack.columns
    amax = torch.zeros(stack.groups.count, dtype=torch.float32, device="cpu")
    for step in steps(stack.planes, stack.runs, k * BLOCK, stack.runs_of_unit):
        x, some = source.runs(step)
        found = _finite_amax(fp4.hadamard(x), (1, 2))
        amax.scatter_reduce_(0, picked(stack.group_of_runs(step), some), found, "amax")
    return amax
