"""Argument checks of the ops that make and read quantised operands; component shapes are in ``components``.

Letters: T rows (tokens), G groups, K and N the dimensions of a matrix, Tp the padded number of tokens (``placement``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import checks
from .components import COLUMNWISE_SCALE, SCALE, Components, SizedComponents, component_plan, sized_components
from .formats import ELEMENTS, FORMATS, SCALINGS, Format
from .specs import Dim, RowsSpec, TensorSpec

SOURCES = (torch.float32, torch.bfloat16, torch.float16)
_OP = "group_quantize"


@dataclass(frozen=True)
class Options:
    """The options of ``group_quantize``; see there. ``resolved`` checks them and fills in what is None.

    Resolving what is resolved changes nothing.
    """

    format: str
    rowwise: bool = True
    columnwise: bool = True
    dtype: torch.dtype | None = None
    scaling: str = "rceil"
    scale_layout: str = "compact"
    power_of_two: bool | None = None
    eps: float = 0.0
    block_2d: bool = False
    rht: bool = False
    dbias: bool = False

    @property
    def description(self) -> Format:
        """The format's description."""
        return FORMATS[self.format]

    @property
    def blocked(self) -> bool:
        """Whether scales are laid out for tensor cores."""
        return self.scale_layout == "blocked"

    def scales_rows_alone(self, scale: Tensor | None) -> bool:
        """Return whether a row's data depends only on that row: scales are given, or belong to parts of one row."""
        f = self.description
        shared = self.block_2d or f.decodes_with_amax or (f.block == 0 and scale is None)
        return self.rowwise and not shared

    def resolved(self, op: str) -> Options:
        """Return checked options, with the format's defaults for ``dtype`` and ``power_of_two``."""
        f = known_format(op, self.format)
        checks.require(self.rowwise or self.columnwise, op, "rowwise", "True when `columnwise` is False", False)
        known_layout(op, f, self.scale_layout)
        checks.known(op, "scaling", self.scaling, SCALINGS)
        dtype = f.data_dtypes[0] if self.dtype is None else self.dtype
        known_data(op, "dtype", f, dtype)
        checks.require(self.eps >= 0 and math.isfinite(self.eps), op, "eps", "finite and not negative", self.eps)
        for name, default in (("scaling", "rceil"), ("power_of_two", None), ("eps", 0.0), ("block_2d", False)):
            _only_for(op, f, name, getattr(self, name), default)
        _only_for(op, f, "rht", self.rht, False)
        checks.require(self.columnwise or not self.rht, op, "rht", "False without `columnwise`", self.rht)
        power_of_two = self.power_of_two
        if power_of_two is None and "power_of_two" in f.options:
            power_of_two = f.power_of_two
        return replace(self, dtype=dtype, power_of_two=power_of_two)


def known_format(op: str, name: str) -> Format:
    """Return the format ``name``, checked."""
    checks.known(op, "format", name, FORMATS)
    return FORMATS[name]


def known_layout(op: str, f: Format, layout: str) -> None:
    """Check that ``layout`` is a scale layout of the format."""
    must = f"{' or '.join(map(repr, f.layouts))} for {f.name}"
    checks.require(layout in f.layouts, op, "scale_layout", must, repr(layout))


def known_data(op: str, argument: str, f: Format, dtype: torch.dtype) -> None:
    """Check that ``dtype`` is a data dtype of the format."""
    must = f"{' or '.join(map(str, f.data_dtypes))} for {f.name}"
    checks.require(dtype in f.data_dtypes, op, argument, must, dtype, TypeError)


def _only_for(op: str, f: Format, argument: str, value: object, default: object) -> None:
    if value != default and argument not in f.options:
        users = " and ".join(n for n, other in FORMATS.items() if argument in other.options)
        checks.require(False, op, argument, f"left at its default for {f.name} (it is for {users})", value)


# --- group_quantize ---------------------------------------------------------------------------------------------------


def group_quantize(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    slots: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    options: Options,
) -> SizedComponents:
    """Check a call of ``group_quantize`` and return its components; ``options`` are resolved.

    ``x`` is ``[T, K]`` with ``offs``, or ``[S, K]`` with ``rows`` too; without ``offs`` it is ``[G, N, K]``, or
    ``[S, N, K]`` with ``slots``.
    """
    f = options.description
    if offs is None:
        checks.require(rows is None, _OP, "rows", "None when `offs` is None (they are in groups)", "a tensor")
        checks.ndim(_OP, "x", x, 3, "[G, N, K] when `offs` is None")
    else:
        checks.require(slots is None, _OP, "slots", "None when `offs` is given (they number matrices)", "a tensor")
        letters = "[T, K] when `offs` is given" if rows is None else "[S, K] when `rows` is given"
        checks.ndim(_OP, "x", x, 2, letters)
    checks.require(x.dtype in SOURCES, _OP, "x", "float32, bfloat16 or float16", x.dtype, TypeError)
    if offs is not None:
        checks.offsets(_OP, offs, None, "x", x.device)
        checks.require(
            not options.block_2d, _OP, "block_2d", "False when `offs` is given (blocks would span groups)", True
        )
    else:
        checks.require(not options.dbias, _OP, "dbias", "False when `offs` is None", True)
        checks.require(not options.rht, _OP, "rht", "False when `offs` is None", True)
    if f.per_byte == 2:
        even = "[..., {0}] with an even {0} (two elements share a byte): pad it with a column of zeros"
        checks.size_even(_OP, "x", x, -1, even.format("K"))
        if offs is None and options.columnwise:
            checks.size_even(_OP, "x", x, -2, "[G, N, K] with an even N (two elements share a byte): pad it with zeros")
    shape, groups = tuple(x.shape), x.shape[0] if offs is None else offs.shape[0]
    if slots is not None:
        checks.ndim(_OP, "slots", slots, 1, "[G]")
        groups = slots.shape[0]
        checks.slots(_OP, "x", x, slots, groups, "x", x.device)
        shape = (groups, *shape[1:])
    if rows is not None:
        checks.row_index(_OP, "rows", rows, "x", x.device)
        shape = (rows.shape[0], *shape[1:])
    if scale is not None:
        _only_for(_OP, f, "scale", "a tensor", None)
        shaped = options.eps == 0 and not options.power_of_two
        checks.require(
            shaped, _OP, "scale", "None when `eps` or `power_of_two` is given, by which scales are computed", "a tensor"
        )
        checks.operand(_OP, "scale", scale, (groups,), "[G]", (torch.float32,), ("x", x.device))
        checks.contiguous(_OP, "scale", scale)
    if row_scale is not None:
        checks.require(offs is not None, _OP, "row_scale", "None when `offs` is None", "a tensor")
        checks.operand(_OP, "row_scale", row_scale, (shape[0],), "[T]", (x.dtype, torch.float32), ("x", x.device))
    if rng is not None:
        _only_for(_OP, f, "rng", "a tensor", None)
        checks.operand(_OP, "rng", rng, (2,), "[seed, offset]", (torch.int64,), ("x", x.device))
    return sized_components(options, shape, groups, x.device, grouped=offs is not None)


def group_quantize_out(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    rng: Tensor | None,
    noop: Tensor | None,
    slots: Tensor | None,
    rows: Tensor | None,
    *out: Tensor,
    options: Options,
) -> None:
    """Check a call of ``group_quantize.out``: as for ``group_quantize``, and the flag and the buffers."""
    specs = group_quantize(x, offs, scale, row_scale, rng, slots, rows, options=options).specs()
    if noop is not None:
        checks.either_dtype(_OP, "noop", noop, torch.float32, torch.bool)
        if noop.dim() != 0:
            checks.shape(_OP, "noop", noop, (1,), "[] or [1]")
        checks.same_device(_OP, "noop", noop, "x", x.device)
    for name, spec, buffer in zip(OUT_NAMES, specs, out):
        _component(_OP, name, buffer, spec, f"{options.scale_layout} {options.format}", "x")
        if spec.stride is not None:
            checks.strides(_OP, name, buffer, spec.stride, "as `scale` comes out")


def group_quantize_out_moves(x: Tensor, offs: Tensor, *_: Any, options: Options) -> Callable[[int], tuple]:
    """Return the layouts of the buffers for rows in groups, by T; see ``remembered``."""
    plan = component_plan(options, x.shape[1], offs.shape[0], x.device)
    layouts = [plan.layout(part) for part in range(len(OUT_NAMES))]
    return lambda rows: tuple([layout(rows) for layout in layouts])


def _component(op: str, argument: str, t: Tensor, spec: TensorSpec, what: str, reference: str) -> None:
    """Check ``t`` against ``spec``; any strides if the spec is not contiguous; ``what`` names layout and format."""
    sizes = [have == want for have, want in zip(t.shape, spec.shape)] if t.dim() == len(spec.shape) else [False]
    for same in sizes:
        if same is not True:
            checks.require(same, op, argument, lambda: f"{tuple(spec.shape)}, the shape of {what}", t.shape)
    checks.either_dtype(op, argument, t, spec.dtype)
    checks.same_device(op, argument, t, reference, spec.device)
    if spec.stride is None:
        checks.contiguous(op, argument, t)


OUT_NAMES = tuple(f"out_{name}" if name in ("scale", "dbias") else name for name in Components._fields)
"""Names of the buffers of ``group_quantize.out``, where ``scale`` is an input and ``dbias`` an option."""


# --- group_dequantize -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DequantizeOptions:
    """The options of ``group_dequantize``; see there."""

    format: str
    columnwise: bool = False
    scale_layout: str = "compact"
    block_2d: bool = False
    rht: bool = False

    @property
    def description(self) -> Format:
        """The format's description."""
        return FORMATS[self.format]

    @property
    def blocked(self) -> bool:
        """Whether scales are laid out for tensor cores."""
        return self.scale_layout == "blocked"

    def made_with(self, op: str, dtype: torch.dtype) -> Options:
        """Return the resolved options of the ``group_quantize`` that makes such components."""
        return Options(
            self.format,
            rowwise=not self.columnwise,
            columnwise=self.columnwise,
            dtype=dtype,
            scale_layout=self.scale_layout,
            block_2d=self.block_2d,
            rht=self.rht,
        ).resolved(op)


def group_dequantize(
    data: Tensor,
    scale: Tensor,
    offs: Tensor | None,
    amax: Tensor | None = None,
    *,
    options: DequantizeOptions,
    out_dtype: torch.dtype | None = None,
    rows: Dim | None = None,
    op: str = "group_dequantize",
) -> TensorSpec:
    """``[T, K]`` with ``offs``, or ``[G, N, K]`` without."""
    f = known_format(op, options.format)
    known_data(op, "data", f, data.dtype)
    dtype = torch.bfloat16 if out_dtype is None else out_dtype
    checks.require(dtype in SOURCES, op, "out_dtype", "float32, bfloat16 or float16", dtype, TypeError)
    made_with = options.made_with(op, data.dtype)
    transposed = options.columnwise and f.transposed_columnwise
    if offs is None:
        checks.ndim(op, "data", data, 3, "[G, N, K] or [G, K, N] when `offs` is None")
        checks.require(rows is None, op, "rows", "None when `offs` is None", rows)
        shape: tuple[Dim, ...] = (*data.shape[:2], data.shape[2] * f.per_byte)
        shape = (shape[0], shape[2], shape[1]) if transposed else shape
        groups: Dim = data.shape[0]
    else:
        checks.ndim(op, "data", data, 2, "[T, K] or [K, Tp] when `offs` is given")
        checks.offsets(op, offs, None, "data", data.device)
        checks.require(not options.block_2d, op, "block_2d", "False when `offs` is given", True)
        groups = offs.shape[0]
        if transposed:
            checks.require(rows is not None, op, "rows", "the number of rows T of transposed columnwise data", rows)
            assert rows is not None
            shape = (rows, data.shape[0])
        else:
            shape = (data.shape[0], data.shape[1] * f.per_byte)
            if rows is not None:
                checks.require(rows == shape[0], op, "rows", f"{shape[0]} like `data`", rows)
    specs = sized_components(made_with, shape, groups, data.device, grouped=offs is not None).specs()
    picked = specs[3:6] if options.columnwise else specs[:3]
    for name, spec, t in zip(("data", "scale", "amax"), picked, (data, scale, amax)):
        if name == "amax" and not f.decodes_with_amax:
            checks.require(t is None, op, name, f"None for {f.name}", "a tensor")
            continue
        if t is None:
            checks.require(False, op, name, f"given for {f.name}", None)
            continue
        _component(op, name, t, spec, f"{options.scale_layout} {options.format}", "data")
    return (TensorSpec if offs is None else RowsSpec)(shape, dtype, data.device)


def group_dequantize_moves(
    data: Tensor, scale: Tensor, offs: Tensor, amax: Tensor | None = None, *, options: DequantizeOptions, **_: Any
) -> Callable[[int], tuple]:
    """Return the layout of ``scale`` of non-transposed rows in groups, by T; see ``remembered``."""
    made_with = options.made_with("group_dequantize", data.dtype)
    plan = component_plan(made_with, data.shape[1] * options.description.per_byte, offs.shape[0], data.device)
    layout = plan.layout(COLUMNWISE_SCALE if options.columnwise else SCALE)
    return lambda rows: (layout(rows),)


def group_requantize(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None = None, *, options: Options
) -> SizedComponents:
    """Check rowwise components and return the columnwise ones; ``options`` resolved, without ``rowwise``."""
    op = "group_requantize"
    read = _read_by_requantize(options)
    spec = group_dequantize(data, scale, offs, amax, options=read, op=op)
    groups = data.shape[0] if offs is None else offs.shape[0]
    if offs is None:
        checks.require(not options.rht, op, "rht", "False when `offs` is None", True)
        if options.description.per_byte == 2:
            checks.size_even(op, "data", data, 1, "[G, N, K / 2] with an even N (two elements share a byte)")
    return sized_components(options, spec.shape, groups, data.device, grouped=offs is not None)


def group_requantize_moves(
    data: Tensor, scale: Tensor, offs: Tensor, amax: Tensor | None = None, *, options: Options
) -> Callable[[int], tuple]:
    """Return the layout of ``scale`` of rows in groups, by T; see ``remembered``."""
    return group_dequantize_moves(data, scale, offs, amax, options=_read_by_requantize(options))


def _read_by_requantize(options: Options) -> DequantizeOptions:
    return DequantizeOptions(options.format, False, options.scale_layout, options.block_2d)


# --- the history of delayed scaling -----------------------------------------------------------------------------------

ALGORITHMS = ("max", "most_recent")


def fp8_scale_from_history(
    history: Tensor,
    scale: Tensor,
    *,
    algorithm: str = "max",
    dtype: torch.dtype | None = None,
    power_of_two: bool = False,
    margin: int = 0,
) -> TensorSpec:
    """``[L, G]`` and ``[G]`` -> ``[G]``."""
    op = "fp8_scale_from_history"
    _history(op, history)
    groups = history.shape[1]
    checks.operand(
        op, "scale", scale, (groups,), "[G], as many groups as `history`", (torch.float32,), ("history", history.device)
    )
    checks.require(algorithm in ALGORITHMS, op, "algorithm", f"one of {', '.join(ALGORITHMS)}", repr(algorithm))
    if dtype is not None:
        checks.require(dtype in ELEMENTS, op, "dtype", " or ".join(map(str, ELEMENTS)), dtype, TypeError)
    return TensorSpec((groups,), torch.float32, history.device)


def fp8_update_history(amax: Tensor, history: Tensor) -> None:
    """Check an update of a history ``[L, G]`` with amaxes ``[G]``."""
    op = "fp8_update_history_"
    checks.ndim(op, "amax", amax, 1, "[G]")
    checks.either_dtype(op, "amax", amax, torch.float32)
    _history(op, history)
    checks.apart(op, "history", history)
    checks.size(op, "history", history, 1, amax.shape[0], lambda: f"[L, G] with G = {amax.shape[0]} like `amax`")
    checks.same_device(op, "history", history, "amax", amax.device)


def _history(op: str, history: Tensor) -> None:
    checks.ndim(op, "history", history, 2, "[L, G], the last L amaxes of every group")
    checks.either_dtype(op, "history", history, torch.float32)
    checks.require(history.shape[0] >= 1, op, "history", "[L, G] with L at least 1", history.shape)
