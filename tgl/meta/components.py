"""Shapes of the components of quantised operands, as functions of the number of rows.

Letters: T rows (tokens), G groups, K and N the dimensions of a matrix, Tp the padded number of tokens (``placement``).
Shapes follow from (T, K, G). T changes in every step of a training run, so everything that does not depend on T is
computed once, and a new T costs a few integer operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .checks import guard_or_false
from .placement import ROW_UNIT, TILE_COLUMNS, TILE_ROWS, blocked_size, ceil_div, room
from .specs import Dim, TensorSpec, row_major

if TYPE_CHECKING:
    from .quantized import Options

Shape = tuple[Dim, ...]
Sizes = Callable[[Dim], Shape]  # a shape as a function of T
ABSENT: Shape = (0,)
SCALE, COLUMNWISE_SCALE = 1, 4  # indices in ``Components``


class Components(NamedTuple):
    """A quantised operand. A component that the format or the call does not have is an empty tensor of shape ``[0]``.

    Attributes:
        data: rowwise elements, blocks along K.
        scale: their scales.
        amax: float32 ``[G]``, largest magnitude of each group.
        columnwise_data: elements with blocks along the tokens (the rows of a weight).
        columnwise_scale: their scales.
        columnwise_amax: like ``amax``, of the values that ``columnwise_data`` was made from.
        dbias: float32 ``[G, K]``, sum over the rows of each group.
    """

    data: Tensor
    scale: Tensor
    amax: Tensor
    columnwise_data: Tensor
    columnwise_scale: Tensor
    columnwise_amax: Tensor
    dbias: Tensor


class ComponentSpecs(NamedTuple):
    """The specs of ``Components``."""

    data: TensorSpec
    scale: TensorSpec
    amax: TensorSpec
    columnwise_data: TensorSpec
    columnwise_scale: TensorSpec
    columnwise_amax: TensorSpec
    dbias: TensorSpec


class ComponentPlan(NamedTuple):
    """Components of rows in groups for any number of rows T, or of matrices, which do not depend on T.

    Attributes:
        shapes: function from T to the shapes of all components.
        parts: function from T to the shape, for each component.
        dtypes: dtype of each component.
        by_columns: whether each component is column-major, with strides ``(1, T)``.
        device: device of the components.
    """

    shapes: Callable[[Dim], tuple[Shape, ...]]
    parts: tuple[Sizes, ...]
    dtypes: tuple[torch.dtype, ...]
    by_columns: tuple[bool, ...]
    device: torch.device

    def at(self, rows: Dim) -> SizedComponents:
        """Return the components for ``rows`` rows."""
        return SizedComponents(self, rows)

    def layout(self, part: int) -> Callable[[int], tuple[Shape, Shape]]:
        """Return a function from T to shape and strides of an allocated component, index ``part`` in ``Components``."""
        sizes, strides = self.parts[part], column_major if self.by_columns[part] else row_major
        return lambda rows: ((shape := sizes(rows)), strides(shape))


class SizedComponents:
    """``Components`` to be allocated, from a plan for T rows."""

    __slots__ = ("plan", "shapes")

    def __init__(self, plan: ComponentPlan, rows: Dim) -> None:
        self.plan, self.shapes = plan, plan.shapes(rows)

    def for_rows(self) -> Callable[[Dim], SizedComponents]:
        """For calls with other numbers of rows T."""
        return functools.partial(SizedComponents, self.plan)

    def empty(self) -> Components:
        """Allocate uninitialised components, inline, because seven calls would take half of an op's time."""
        _, _, dtypes, by_columns, device = self.plan
        made = []
        for shape, dtype, columns in zip(self.shapes, dtypes, by_columns):
            if columns:
                made.append(torch.empty_strided(shape, column_major(shape), dtype=dtype, device=device))
            else:
                made.append(torch.empty(*shape, dtype=dtype, device=device))
        return tuple.__new__(Components, made)

    def meta(self) -> Components:
        """Return the components on the meta device."""
        return Components(*(spec.meta() for spec in self.specs()))

    def specs(self) -> ComponentSpecs:
        """Return the spec of each component."""
        _, _, dtypes, by_columns, device = self.plan
        strides = [column_major(shape) if columns else None for shape, columns in zip(self.shapes, by_columns)]
        made = zip(self.shapes, dtypes, strides)
        return ComponentSpecs(*(TensorSpec(shape, dtype, device, stride) for shape, dtype, stride in made))


def column_major(shape: Shape) -> Shape:
    """Return the strides of a column-major matrix, for no rows like PyTorch."""
    rows = shape[0]
    return 1, max(rows, 1) if isinstance(rows, int) else rows


def component_specs(
    options: Options, shape: Shape, groups: Dim, device: torch.device, *, grouped: bool
) -> ComponentSpecs:
    """Return the component specs of a tensor of the given shape.

    Args:
        options: resolved.
        shape: ``(T, K)`` of rows in groups, or ``(G, N, K)`` of G matrices.
        groups: G.
        device: where they live.
        grouped: whether it is rows in groups.
    """
    return sized_components(options, shape, groups, device, grouped=grouped).specs()


def sized_components(
    options: Options, shape: Shape, groups: Dim, device: torch.device, *, grouped: bool
) -> SizedComponents:
    """Return ``component_specs`` together with their plan."""
    matrix = None if grouped else shape[1:]
    return component_plan(options, shape[-1], groups, device, matrix=matrix).at(shape[0])


def component_plan(
    options: Options, k: Dim, groups: Dim, device: torch.device, *, matrix: Shape | None = None
) -> ComponentPlan:
    """Return the plan for components of rows ``[T, K]`` in groups for every T, or of matrices ``[G, N, K]``.

    Args:
        options: resolved.
        k: K.
        groups: G.
        device: where they live.
        matrix: ``(N, K)`` of matrices.
    """
    f = options.description
    assert options.dtype is not None
    sides = _grouped_sides(options, k, groups) if matrix is None else _matrix_sides(options, matrix, groups)
    data, scale, columnwise_data, columnwise_scale = (
        side if wanted else constant(ABSENT)
        for side, wanted in zip(sides, (options.rowwise, options.rowwise, options.columnwise, options.columnwise))
    )
    amax = (groups,) if f.has_amax else ABSENT
    row_amax, column_amax = amax if options.rowwise else ABSENT, amax if options.columnwise else ABSENT
    dbias = (groups, k) if options.dbias else ABSENT

    def shapes(rows: Dim) -> tuple[Shape, ...]:
        row, column = (data(rows), scale(rows)), (columnwise_data(rows), columnwise_scale(rows))
        return *row, row_amax, *column, column_amax, dbias

    # One column has the same layout row-major, with strides that PyTorch treats as contiguous.
    several = matrix is None and f.scale_by_columns and not guard_or_false(ceil_div(k, f.block) == 1)
    element, factor, sums = options.dtype, f.scale_dtype, torch.float32
    return ComponentPlan(
        shapes=shapes,
        parts=(
            data,
            scale,
            constant(row_amax),
            columnwise_data,
            columnwise_scale,
            constant(column_amax),
            constant(dbias),
        ),
        dtypes=(element, factor, sums, element, factor, sums, sums),
        by_columns=tuple(part == "scale" and several and options.rowwise for part in Components._fields),
        device=device,
    )


def constant(shape: Shape) -> Sizes:
    """Return a shape function that does not depend on T."""
    return lambda rows: shape


def _grouped_sides(options: Options, k: Dim, groups: Dim) -> tuple[Sizes, Sizes, Sizes, Sizes]:
    """Return shape functions of data, scale, columnwise data, columnwise scale for rows ``[T, K]`` in G groups."""
    f = options.description
    packed, per_byte = ceil_div(k, f.per_byte), f.per_byte

    def data(rows: Dim) -> Shape:
        return rows, packed

    places = room(groups, f.unit_data) if f.transposed_columnwise else None

    def columnwise_data(rows: Dim) -> Shape:
        return (rows, k) if places is None else (k, places(rows) // per_byte)

    if not f.block:
        return data, constant((groups,)), columnwise_data, constant((groups,))
    block, across, tokens = f.block, ceil_div(k, f.block), room(groups, f.unit_scale)
    if options.blocked:
        tile_rows, row_of_tiles, column_of_tiles = room(groups, ROW_UNIT), blocked_size(1, across), blocked_size(k, 1)
        return (
            data,
            lambda rows: (tile_rows(rows) // TILE_ROWS * row_of_tiles,),
            columnwise_data,
            lambda rows: (ceil_div(tokens(rows) // block, TILE_COLUMNS) * column_of_tiles,),
        )
    if f.transposed_scale:
        return data, lambda rows: (rows, across), columnwise_data, lambda rows: (k, tokens(rows) // block)
    return data, lambda rows: (rows, across), columnwise_data, lambda rows: (tokens(rows) // block, k)


def _matrix_sides(options: Options, matrix: Shape, groups: Dim) -> tuple[Sizes, ...]:
    """Return shape functions of data, scale, columnwise data, columnwise scale for G matrices ``[N, K]``."""
    f, (n, k) = options.description, matrix
    data = constant((groups, n, ceil_div(k, f.per_byte)))
    columnwise_data = constant((groups, k, ceil_div(n, f.per_byte))) if f.transposed_columnwise else data
    if not f.block:
        return data, constant((groups,)), columnwise_data, constant((groups,))
    across, down = ceil_div(k, f.block), ceil_div(n, f.block)
    scales: tuple[Shape, Shape] = (groups, n, across), (groups, k, down) if f.transposed_scale else (groups, down, k)
    if options.blocked:
        scales = (groups, blocked_size(n, across)), (groups, blocked_size(k, down))
    elif f.square_scales and options.block_2d:
        scales = (groups, down, across), (groups, across, down)
    return data, constant(scales[0]), columnwise_data, constant(scales[1])
