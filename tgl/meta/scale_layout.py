"""Scale layouts of other libraries, as maps from the compact layout of ``group_quantize``.

Every layout is one map: the offset of each compact scale in the other layout's memory, computed on the device from
``offs``; bytes that no scale maps to are zero. In the maps, scales run *along* the tokens of a group (or the rows of a
weight) and *across* the other dimension.

Layouts:
    ``"blocked"``: the layout of ``group_quantize(scale_layout="blocked")``.
    ``"torch"``: the layout of ``torch.nn.functional.scaled_grouped_mm`` (``SwizzleType.SWIZZLE_32_4_4``): every group
        is blocked on its own and follows the one before it. Rowwise ``[T + 128 G, columns]``; columnwise, where groups
        divide the contraction, ``[rows, ceil(T / block) + 4 G]``; weights ``[G, bytes]``.
    ``"te"``: the flat buffers of TransformerEngine's GroupedTensor: the groups' scale matrices one after the other,
        each padded as by its quantizer's ``get_scale_shape``.
    ``"te_swizzled"``: those buffers after ``optimize_for_gemm``: every group blocked on its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks, placement
from .components import ComponentSpecs, component_specs
from .formats import FORMATS, Format, ScaleMatrix
from .placement import ROW_UNIT, Dim, blocked_offset, ceil_div
from .quantized import Options, known_format
from .specs import TensorSpec

LAYOUTS = ("blocked", "torch", "te", "te_swizzled")


_ROWWISE, _COLUMNWISE = ScaleMatrix(False, 128, 4, tiled=True), ScaleMatrix(True, 128, 4, tiled=True)


class Scales(NamedTuple):
    """The checked arguments of the conversion of one scale component.

    Attributes:
        layout: one of ``LAYOUTS``.
        description: the format.
        columnwise: whether it is the columnwise component.
        square: whether blocks are square and stored once (``Format.square_scales``).
        shape: ``(T, K)`` or ``(G, N, K)`` of the quantised tensor.
        groups: G.
        compact: spec of the compact component.
        other: spec of the component in ``layout``.
    """

    layout: str
    description: Format
    columnwise: bool
    square: bool
    shape: tuple[Dim, ...]
    groups: Dim
    compact: TensorSpec
    other: TensorSpec

    @property
    def matrix(self) -> ScaleMatrix:
        """The layout of one group's scales in ``layout``."""
        if self.layout == "te":
            assert self.description.te_scales is not None
            return self.description.te_scales.of(self.columnwise, self.square)
        return _COLUMNWISE if self.columnwise else _ROWWISE

    @property
    def block_along(self) -> int:
        """Number of tokens that share a scale."""
        return self.description.block if self.columnwise or self.square else 1

    @property
    def across(self) -> Dim:
        """Number of scales across."""
        return (
            self.shape[-1] if self.columnwise and not self.square else ceil_div(self.shape[-1], self.description.block)
        )


def scales(
    op: str,
    scale: Tensor,
    offs: Tensor | None,
    shape: tuple[Dim, ...],
    *,
    layout: str,
    format: str,
    given: str,
    columnwise: bool = False,
    block_2d: bool = False,
    rows: Tensor | None = None,
) -> Scales:
    """Check the arguments of a conversion; ``scale`` is in layout ``given``, which is ``layout`` or ``"compact"``.

    With ``rows``, ``scale`` has the compact scales of any number of rows, which ``rows`` gathers.
    """
    f = known_format(op, format)
    checks.require(layout in LAYOUTS, op, "layout", f"one of {', '.join(LAYOUTS)}", repr(layout))
    if not _converts(f, layout):
        users = [name for name, other in FORMATS.items() if _converts(other, layout)]
        checks.require(False, op, "format", f"{' or '.join(users)} for layout {layout!r}", repr(format))
    if block_2d and not (f.square_scales and offs is None):
        users = [name for name, other in FORMATS.items() if other.square_scales]
        must = "(other scales of square blocks are stored once per row)"
        checks.require(False, op, "block_2d", f"False except for weights in {' or '.join(users)} {must}", True)
    if offs is None:
        checks.require(len(shape) == 3, op, "shape", "(G, N, K) when `offs` is None", tuple(shape))
    else:
        checks.require(len(shape) == 2, op, "shape", "(T, K) when `offs` is given", tuple(shape))
        checks.offsets(op, offs, None, "scale", scale.device)
    for size in shape:
        checks.require(size >= 0, op, "shape", "free of negative sizes", tuple(shape))
    if rows is not None:
        must = "None unless `scale` is rowwise and `offs` is given"
        checks.require(not columnwise and offs is not None, op, "rows", must, rows.shape)
        checks.row_index(op, "rows", rows, "scale", scale.device)
        checks.size(op, "rows", rows, 0, shape[0], lambda: f"of length {shape[0]}, the first size of `shape`")
    groups = shape[0] if offs is None else offs.shape[0]

    def component(scale_layout: str) -> TensorSpec:
        options = Options(format, scale_layout=scale_layout, block_2d=block_2d).resolved(op)
        specs: ComponentSpecs = component_specs(options, tuple(shape), groups, scale.device, grouped=offs is not None)
        return specs.columnwise_scale if columnwise else specs.scale

    compact = component("compact")
    found = Scales(layout, f, columnwise, block_2d, tuple(shape), groups, compact, compact)
    other = (
        component("blocked")
        if layout == "blocked"
        else compact._replace(shape=_shape(found, offs is not None), stride=None)
    )
    found = found._replace(other=other)
    expected = compact.shape if given == "compact" else other.shape
    if rows is not None:
        checks.ndim(op, "scale", scale, 2, "[S, columns]")
        expected = (scale.shape[0], *expected[1:])
    checks.either_dtype(op, "scale", scale, f.scale_dtype)
    checks.shape(op, "scale", scale, expected, f"of {given} {'columnwise ' if columnwise else ''}{format} scales")
    return found


def _converts(f: Format, layout: str) -> bool:
    """Return whether a format's scales can have the layout; layouts for tensor cores need one-byte scales."""
    return f.te_scales is not None if layout == "te" else "blocked" in f.layouts


def _shape(s: Scales, grouped: bool) -> tuple[Dim, ...]:
    """Return the worst-case shape of a layout that pads every group, by at most one row less than the multiple."""
    m = s.matrix
    pad_along, pad_across = (m.pad_columns, m.pad_rows) if m.transposed else (m.pad_rows, m.pad_columns)
    across = _up(s.across, pad_across)
    if not grouped:
        groups, n, _ = s.shape
        along = _up(ceil_div(n, s.block_along), pad_along)
        return (groups, along * across) if s.layout == "torch" else (groups * along * across,)
    # ceil(n / block), padded, is at most n / block + pad - 1 / block; with pad 1 the - 1 / block still leaves ceil.
    along = ceil_div(s.shape[0], s.block_along) + (pad_along if s.block_along * pad_along > 1 else 0) * s.groups
    if s.layout == "torch":
        return (across, along) if m.transposed else (along, across)
    return (along * across,)


def _up(n: Dim, multiple: int) -> Dim:
    return ceil_div(n, multiple) * multiple


class _Along(NamedTuple):
    """The compact scales seen as ``[along, across]``: one entry per position along, over all groups.

    Attributes:
        group: int64, the group of the position (arbitrary if it is in none).
        local: int64, its index in the group.
        used: whether it is in a group.
        place: int64, its row in a blocked rowwise matrix of all groups, or its column in a columnwise one.
        length: int64 ``[G]``, number of positions in each group.
    """

    group: Tensor
    local: Tensor
    used: Tensor
    place: Tensor
    length: Tensor


def _of_weights(s: Scales, count: int) -> _Along:
    groups = int(s.groups)
    index = torch.arange(count, device=s.compact.device).repeat(groups)
    group = torch.arange(groups * count, device=s.compact.device) // max(count, 1)
    return _Along(group, index, torch.ones_like(index, dtype=torch.bool), index, index.new_full((groups,), count))


def _of_groups(s: Scales, offs: Tensor, count: int) -> _Along:
    """Return the positions of grouped rows; ends outside ``[0, T]`` are clamped, a descending end is an empty group."""
    place = torch.arange(count, device=offs.device)
    if not s.groups:  # represented by one empty group
        nothing = torch.zeros_like(place)
        return _Along(nothing, place, nothing.bool(), place, place.new_zeros(1))
    ends = offs.to(torch.int64).clamp(0, int(s.shape[0])).cummax(0).values
    first = placement.first_rows(ends)
    length = (ends - first + s.block_along - 1) // s.block_along
    if s.columnwise:
        start = placement.starts(ends, s.description.unit_scale) // s.block_along
        group = torch.searchsorted(start, place, right=True) - 1
    else:
        start, group = first, torch.searchsorted(ends, place, right=True).clamp_(max=length.shape[0] - 1)
    index = place - start[group]
    used = index < length[group]
    if not s.columnwise:
        place = placement.starts(ends, ROW_UNIT)[group] + index
    return _Along(group, index, used, place, length)


def offsets(s: Scales, offs: Tensor | None) -> Tensor:
    """Return int64 of the compact shape: the offset of each scale in ``s.layout``, -1 for scales in no group."""
    transposed = s.columnwise and (s.description.transposed_scale or s.square)  # compact scales are [across, along]
    count, width = int(s.compact.shape[-1 if transposed else -2]), int(s.across)
    at = _of_weights(s, count) if offs is None else _of_groups(s, offs, count)
    across = torch.arange(width, device=s.compact.device)
    if s.layout == "blocked" and offs is not None:  # one matrix for all groups
        place = at.place[:, None]
        offset = blocked_offset(across, place, count) if s.columnwise else blocked_offset(place, across, width)
    else:
        footprint = _footprint(s.matrix, at.length, width)
        begin = footprint.cumsum(0) - footprint
        offset = _within(s.matrix, at.local[:, None], across, at.length[at.group][:, None], width)
        offset = offset + begin[at.group][:, None]
    offset = torch.where(at.used[:, None], offset, -1)  # type: ignore[arg-type]
    if offs is None:
        offset = offset.unflatten(0, (int(s.groups), count))
    return offset.transpose(-1, -2) if transposed else offset


def _footprint(m: ScaleMatrix, along: Tensor, across: int) -> Tensor:
    """Return the number of scales in each group's own matrix, including padding."""
    if m.transposed:
        return _round_up(along, m.pad_columns) * _up(across, m.pad_rows)  # type: ignore[return-value]
    return _round_up(along, m.pad_rows) * _up(across, m.pad_columns)  # type: ignore[return-value]


def _within(m: ScaleMatrix, along: Tensor, across: Tensor, n_along: Tensor, n_across: int) -> Tensor:
    """Return the offset of a scale in its group's own matrix."""
    y, x = (across, along) if m.transposed else (along, across)
    columns = n_along if m.transposed else n_along.new_full((), n_across)
    if m.tiled:
        return blocked_offset(y, x, columns)  # type: ignore[arg-type, return-value]
    return y * _round_up(columns, m.pad_columns) + x


def _round_up(n: Tensor, multiple: int) -> Tensor:
    return (n + multiple - 1) // multiple * multiple
