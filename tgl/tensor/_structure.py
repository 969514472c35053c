"""The components of a GroupedTensor of a given shape, and the position of each group in them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..meta import checks
from ..meta.placement import ROW_UNIT, TILE_BYTES, TILE_COLUMNS, TILE_ROWS, blocked_size, ceil_div
from ..meta.quantized import Options
from ..meta.specs import Dim, TensorSpec

if TYPE_CHECKING:
    from .grouped_tensor import GroupedTensor

CLASSES: dict[str, type[GroupedTensor]] = {}
"""Classes by name of the format."""

ALIGNMENT = 256  # bytes, of each component of a matrix in a list

Static = tuple[Any, ...]
Shapes = tuple[tuple[int, int], ...]
Specs = dict[str, TensorSpec]

FIELDS = tuple(field.name for field in dataclasses.fields(Options))
OPTIONAL = tuple(name for name in FIELDS if name not in ("format", "dbias"))


def is_grouped(t: Tensor) -> TypeGuard[GroupedTensor]:
    """Return whether ``t`` is a GroupedTensor."""
    return isinstance(t, tuple(CLASSES.values()))


def fields(options: Options) -> Static:
    """Return ``options`` as constants, which Dynamo can read from a traced tensor (unlike a dataclass).

    A float becomes a string, because a float read from a tensor would be a graph input and cause a recompile.
    """
    return tuple([str(v) if isinstance(v := getattr(options, name), float) else v for name in FIELDS])


@lru_cache
def options_of(static: Static) -> Options:
    """Invert ``fields``."""
    values = dict(zip(FIELDS, static))
    return Options(**{**values, "eps": float(values["eps"])})


def resolve(op: str, format: str | Options, options: dict[str, Any]) -> Options:
    """Return the checked ``Options`` for ``format`` and ``options``."""
    for name in options:
        if name not in OPTIONAL:
            raise TypeError(
                f"tgl::{op}: got an unexpected keyword argument `{name}`; options are {', '.join(OPTIONAL)}"
            )
    if isinstance(format, Options):
        checks.require(not options, op, "options", "none beside an Options", ", ".join(options))
        return format if format.format == "dense" else _with_class(op, format.resolved(op))
    if format == "dense":
        checks.require(not options, op, "options", "none for dense values", ", ".join(options))
        return Options("dense", columnwise=False, eps=0.0)  # explicit: Dynamo would make a float default a graph input
    eps = options.get("eps")
    if eps is not None:
        # Dynamo may have made it a graph input; a dict key makes it a constant again.
        (eps,) = {eps: None}
    return _with_class(op, Options(format, **{**options, "eps": 0.0 if eps is None else eps}).resolved(op))


def _with_class(op: str, options: Options) -> Options:
    if options.format not in CLASSES:
        must = f"one of {', '.join(CLASSES)}, which have a class"
        checks.require(False, op, "format", must, checks.unknown(options.format, CLASSES))
    return options


def stacked(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return the shape as a stack of matrices; one matrix becomes a stack of one."""
    return tuple(shape) if len(shape) == 3 else (1, *shape)


def component_specs(
    cls: type[GroupedTensor],
    options: Options,
    shape: tuple[Dim, ...],
    groups: Dim | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Specs:
    """Return the components by name, for rows in ``groups`` groups with their ``offs``, or for matrices."""
    if groups is not None:
        specs = cls._component_specs(options, shape, groups, dtype, device, rows=True)
        return {**specs, "offs": TensorSpec((groups,), torch.int32, device)}
    stack = stacked(shape)
    specs = cls._component_specs(options, stack, stack[0], dtype, device, rows=False)
    return specs if len(shape) == 3 else {name: _first(spec) for name, spec in specs.items()}


def _first(spec: TensorSpec) -> TensorSpec:
    return spec._replace(shape=spec.shape[1:])


# --- a list of matrices -----------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """Position of one matrix's component in the flat buffer of all matrices, in elements."""

    start: int
    shape: tuple[int, ...]

    def view(self, buffer: Tensor) -> Tensor:
        """Return the component as a view of ``buffer``."""
        return buffer[self.start : self.start + math.prod(self.shape)].view(self.shape)


def slots(
    cls: type[GroupedTensor], options: Options, shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> tuple[list[dict[str, Slot]], Specs]:
    """Return the slots of every matrix's components, aligned to ``ALIGNMENT`` bytes, and the specs of their buffers.

    Components of one element per matrix (an amax, a per-tensor scale) are contiguous without alignment: ``[G]``.
    """
    found: list[dict[str, Slot]] = []
    buffers: Specs = {}
    for shape in shapes:
        matrix = {}
        for name, spec in component_specs(cls, options, shape, None, dtype, device).items():
            start = buffers[name].shape[0] if name in buffers else 0
            if spec.shape:
                unit = ALIGNMENT // spec.dtype.itemsize
                start = ceil_div(start, unit) * unit
            matrix[name] = Slot(int(start), tuple(int(size) for size in spec.shape))
            buffers[name] = spec._replace(shape=(start + math.prod(spec.shape),))
        found.append(matrix)
    return found, buffers


# --- groups -----------------------------------------------------------------------------------------------------------


def split(t: GroupedTensor, sizes: Sequence[int] | None) -> list[GroupedTensor]:
    """Implement ``GroupedTensor.split``."""
    op = "split"
    if t.offs is None:
        checks.require(sizes is None, op, "sizes", "None for matrices", sizes)
        if t.shapes is not None:
            found, _ = slots(type(t), t.options, t.shapes, t.dtype, t.device)
            views = [{name: slot.view(getattr(t, name)) for name, slot in matrix.items()} for matrix in found]
            return [_matrix(t, shape, parts) for shape, parts in zip(t.shapes, views)]
        checks.require(t.dim() == 3, op, "self", "a stack or a list of matrices, or rows in groups", t.shape)
        return [matrix_of(t, g) for g in range(t.shape[0])]
    must = "given for rows in groups, whose sizes lie on the device (split_host reads them there)"
    checks.require(sizes is not None, op, "sizes", must, None)
    assert sizes is not None
    fits = len(sizes) == t.num_groups and all(s >= 0 for s in sizes) and sum(sizes) <= t.shape[0]
    checks.require(fits, op, "sizes", f"{t.num_groups} sizes that add up to {t.shape[0]} at most", list(sizes))
    return [
        _rows_of(t, g, start, size) for g, (start, size) in enumerate(zip(itertools.accumulate((0, *sizes)), sizes))
    ]


def matrix_of(t: GroupedTensor, g: int) -> GroupedTensor:
    """Return matrix ``g`` of a stack, as a view."""
    return _matrix(t, t.shape[1:], {name: part[g] for name, part in t.parts().items()})


def _matrix(t: GroupedTensor, shape: Sequence[Dim], parts: dict[str, Tensor]) -> GroupedTensor:
    return type(t)(shape, t.dtype, t.static, parts)


def _rows_of(t: GroupedTensor, g: int, start: int, size: int) -> GroupedTensor:
    """Return the rows of group ``g`` as one matrix of views."""
    k = int(t.shape[1])
    parts = {
        name: _rows_view(t.options, name, part, k, g, start, size) for name, part in t.parts().items() if name != "offs"
    }
    return _matrix(t, (size, k), parts)


def shapes_of_rows(
    cls: type[GroupedTensor], options: Options, shape: Sequence[Dim], dtype: torch.dtype
) -> dict[str, torch.Size]:
    """Return the shapes of the components of a matrix that ``split`` made from a group of rows."""
    rows, k = (int(size) for size in shape)
    specs = component_specs(cls, options, (rows, k), 1, dtype, torch.device("meta"))
    return {
        name: _rows_view(options, name, spec.empty(), k, 0, 0, rows).shape
        for name, spec in specs.items()
        if name != "offs"
    }


def _rows_view(options: Options, name: str, c: Tensor, k: int, g: int, start: int, size: int) -> Tensor:
    """Return the part of component ``c`` of group ``g``, ``size`` rows from ``start``; see ``placement``."""
    direction, kind = name.split("_")
    columnwise = direction == "columnwise"
    if options.format == "dense":
        return c[start : start + size]
    f = options.description
    if kind == "amax" or (kind == "scale" and not f.block):
        return c[g]
    if kind == "data" and columnwise and f.transposed_columnwise:
        first = (start // f.unit_data + g) * f.unit_data
        # A byte belongs to one group, so the last byte of an odd group is included whole.
        unit = f.block if f.fills_blocks else f.per_byte
        width = ceil_div(size, unit) * unit
        return c[:, first // f.per_byte : (first + width) // f.per_byte]
    if kind == "data" or (not columnwise and not options.blocked):
        return c[start : start + size]
    if not columnwise:
        strip = blocked_size(ROW_UNIT, ceil_div(k, f.block))
        first = start // ROW_UNIT + g
        return c[first * strip : (first + ceil_div(size, ROW_UNIT)) * strip]
    first, count = (start // f.unit_scale + g) * f.unit_scale // f.block, ceil_div(size, f.block)
    if not options.blocked:
        return c[:, first : first + count] if f.transposed_scale else c[first : first + count]
    tiles = c.view(max(ceil_div(k, TILE_ROWS), 1), -1, TILE_BYTES)
    return tiles[:, first // TILE_COLUMNS : first // TILE_COLUMNS + ceil_div(count, TILE_COLUMNS)]


def zero_tail(x: Tensor, offs: Tensor) -> Tensor:
    """Return ``x [T, K]`` with zeros in the rows past ``offs[-1]``."""
    end = offs[-1:].sum()  # 0 without groups
    return torch.where(torch.arange(x.shape[0], device=x.device)[:, None] < end, x, 0)
