"""Output specs of the GEMMs on quantised operands: every function checks its arguments and returns the result's spec.

Operands are components of ``group_quantize``. Letters as in ``specs``; ``Tp`` is T under the placement of
``placement``, with the unit of the format. FP4 data holds two elements per byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import activations, checks, placement
from .components import COLUMNWISE_SCALE, SCALE, SizedComponents, component_plan, sized_components
from .formats import FORMATS, Format
from .placement import ROW_UNIT, ceil_div
from .quantized import SOURCES, Options, known_data, known_format, known_layout
from .specs import Dim, RowsSpec, TensorSpec, accumulator, grouped_activation, packed_slots, wgrad_buffer, with_out

DIRECTIONS = ("rowwise", "columnwise")
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GEMM_OPERANDS = ("a", "a_scale", "b", "b_scale", "offs", "a_amax", "b_amax", "bias", "bias_scale")


def _format(op: str, name: str, scale_layout: str) -> Format:
    form = known_format(op, name)
    if scale_layout != "compact":
        known_layout(op, form, scale_layout)
    return form


def _data(op: str, argument: str, t: Tensor, form: Format, dims: int, letters: str) -> None:
    if t.dtype not in form.data_dtypes:
        known_data(op, argument, form, t.dtype)
    checks.ndim(op, argument, t, dims, letters)
    checks.contiguous(op, argument, t)


class _ScaleRequirements(NamedTuple):
    """Requirements of scales: format, shape (also in letters), and contiguous unless ``anyhow``."""

    form: Format
    shape: tuple
    letters: str
    anyhow: bool = False


def _scale(op: str, argument: str, t: Tensor, must: _ScaleRequirements, reference: str, device: torch.device) -> None:
    """Check that ``t`` meets the requirements of scales, on the device of ``reference``."""
    form, expected, letters, anyhow = must
    if t.dtype != form.scale_dtype:
        checks.require(False, op, argument, f"{form.scale_dtype} for {form.name}", t.dtype, TypeError)
    checks.shape(op, argument, t, expected, letters)
    checks.same_device(op, argument, t, reference, device)
    if not anyhow:
        checks.contiguous(op, argument, t)


def _amax(op: str, argument: str, t: Tensor | None, form: Format, groups: Dim, device: torch.device) -> None:
    if not form.decodes_with_amax:
        checks.require(t is None, op, argument, f"None for {form.name}", "a tensor")
        return
    if t is None:
        checks.require(False, op, argument, f"given for {form.name}", None)
        return
    if t.dtype != torch.float32:
        checks.require(False, op, argument, "torch.float32", t.dtype, TypeError)
    checks.shape(op, argument, t, (groups,), "[G]")
    checks.same_device(op, argument, t, "a", device)
    checks.contiguous(op, argument, t)


def _letters(form: Format, compact: str, rows: str, scale_layout: str) -> str:
    if form.block == 0:
        return "[G] (one per group)"
    if scale_layout == "blocked":
        return f"[bytes of blocked scales, {rows}]"
    return f"{compact} (compact)"


def _rows_scale(form: Format, scale_layout: str, rows: Dim, depth: Dim, groups: Dim) -> tuple[Dim, ...]:
    """Return the shape of the rowwise scales of ``[rows, depth]`` tokens."""
    if form.block == 0:
        return (groups,)
    columns = ceil_div(depth, form.block)
    if scale_layout == "compact":
        return (rows, columns)
    return (placement.blocked_size(placement.padded_rows(rows, groups, ROW_UNIT), columns),)


def _matrix_scale(form: Format, scale_layout: str, groups: Dim, width: Dim, depth: Dim, across: bool) -> tuple:
    """Return the scale shape of G matrices with blocks along ``depth``; ``across``: stored with ``depth`` first."""
    if form.block == 0:
        return (groups,)
    columns = ceil_div(depth, form.block)
    if form.square_scales:
        return (groups, ceil_div(width, form.block), columns)
    if scale_layout == "blocked":
        return (groups, placement.blocked_size(width, columns))
    return (groups, columns, width) if across else (groups, width, columns)


def grouped_activation_quantize(
    x: Tensor,
    offs: Tensor,
    probs: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    kind: str,
    options: Options,
) -> SizedComponents:
    """``[T, 2 I]`` (gated) or ``[T, I]`` to the components of ``[T, I]``; ``options`` resolved."""
    op = "grouped_activation_quantize"
    shape, dtype, *_ = grouped_activation(x, offs, probs, kind=kind)
    checks.require(dtype in SOURCES, op, "x", "float32, bfloat16 or float16", dtype, TypeError)
    return _activated(op, "x", x, shape, offs.shape[0], scale, options)


def _activated(
    op: str, argument: str, source: Tensor, shape: tuple[Dim, ...], groups: Dim, scale: Tensor | None, options: Options
) -> SizedComponents:
    """Check the quantisation of an activation of ``shape``; ``source`` is the argument that determines its width."""
    form = options.description
    if form.per_byte == 2 and (even := shape[1] % 2 == 0) is not True:
        checks.require(even, op, argument, "such that I is even (two elements share a byte)", source.shape)
    if scale is not None:
        checks.require("scale" in form.options, op, "scale", f"None for {form.name}", "a tensor")
        checks.operand(op, "scale", scale, (groups,), "[G]", (torch.float32,), (argument, source.device))
        checks.contiguous(op, "scale", scale)
    return sized_components(options, shape, groups, source.device, grouped=True)


def grouped_gemm_scaled(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    *,
    format: str,
    b_direction: str = "rowwise",
    scale_layout: str = "compact",
    out_dtype: torch.dtype | None = None,
    op: str = "grouped_gemm_scaled",
) -> TensorSpec:
    """Rowwise tokens ``[T, K]`` times weights ``[G, N, K]`` (rowwise) or ``[G, K, N]`` (columnwise) -> ``[T, N]``."""
    form = _format(op, format, scale_layout)
    known = f"one of {', '.join(DIRECTIONS)}"
    checks.require(b_direction in DIRECTIONS, op, "b_direction", known, repr(b_direction))
    pack = "" if form.per_byte == 1 else "/2"
    _data(op, "a", a, form, 2, f"[T, K{pack}]")
    rows, depth = a.shape[0], a.shape[1] * form.per_byte
    across = b_direction == "columnwise" and not form.transposed_columnwise
    b_letters = f"[G, K{pack}, N]" if across else f"[G, N, K{pack}]"
    _data(op, "b", b, form, 3, b_letters)
    checks.same_device(op, "b", b, "a", a.device)
    checks.size(op, "b", b, 1 if across else 2, a.shape[1], lambda: f"{b_letters} with K{pack} = {a.shape[1]} like `a`")
    groups, width = b.shape[0], b.shape[2 if across else 1]
    checks.offsets(op, offs, groups, "a", a.device)
    block = form.block
    letters = _letters(form, f"[T, ceil(K/{block})]", "each group from a multiple of 128 rows", scale_layout)
    expected, anyhow = _rows_scale(form, scale_layout, rows, depth, groups), form.scale_by_columns
    _scale(op, "a_scale", a_scale, _ScaleRequirements(form, expected, letters, anyhow), "a", a.device)
    if form.square_scales:
        letters = f"[G, ceil(N/{block}), ceil(K/{block})]"
    else:
        compact = f"[G, ceil(K/{block}), N]" if across else f"[G, N, ceil(K/{block})]"
        letters = _letters(form, compact, "per matrix", scale_layout)
    expected = _matrix_scale(form, scale_layout, groups, width, depth, across)
    _scale(op, "b_scale", b_scale, _ScaleRequirements(form, expected, letters), "a", a.device)
    _amax(op, "a_amax", a_amax, form, groups, a.device)
    _amax(op, "b_amax", b_amax, form, groups, a.device)
    dtype = _out_dtype(op, "out_dtype", out_dtype)
    if bias is not None:
        checks.operand(op, "bias", bias, (groups, width), "[G, N]", OUT_DTYPES, ("a", a.device))
    if bias_scale is not None:
        checks.require(bias is not None, op, "bias_scale", "None when there is no `bias`", "a tensor")
        checks.operand(op, "bias_scale", bias_scale, (rows,), "[T]", OUT_DTYPES, ("a", a.device))
    return RowsSpec((rows, width), dtype, a.device)


def grouped_gemm_scaled_moves(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, *_: Any, **names: Any
) -> Callable[[int], tuple]:
    """Return the layout of ``a_scale`` by T, for every op with a ``grouped_gemm_scaled``; see ``remembered``."""
    options = names.get("options") or Options(names["format"], scale_layout=names["scale_layout"])
    made_with = Options(options.format, columnwise=False, dtype=a.dtype, scale_layout=options.scale_layout)
    depth = a.shape[1] * options.description.per_byte
    layout = component_plan(made_with, depth, offs.shape[0], a.device).layout(SCALE)
    return lambda rows: (layout(rows),)


def grouped_gemm_scaled_activation_quantize(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    b_direction: str,
    kind: str,
    options: Options,
    out_dtype: torch.dtype | None,
) -> tuple[TensorSpec, SizedComponents]:
    """``h [T, 2 I]`` (gated) or ``[T, I]``, and the components of ``[T, I]``.

    ``options`` are resolved; their format and layout of scales are those of the operands too.
    """
    op = "grouped_gemm_scaled_activation_quantize"
    activation = activations.named(kind, op=op)
    names = {"format": options.format, "scale_layout": options.scale_layout, "b_direction": b_direction}
    operands = (a, a_scale, b, b_scale, offs, a_amax, b_amax, bias)
    h = grouped_gemm_scaled(*operands, **names, out_dtype=out_dtype, op=op)  # type: ignore[arg-type]
    rows, width = h.shape
    if activation.gated:
        if (even := width % 2 == 0) is not True:
            checks.require(even, op, "b", "such that N = 2 I is even", b.shape)
        width = width // 2
    if probs is not None:
        checks.operand(op, "probs", probs, (rows,), "[T]", (h.dtype, accumulator(h.dtype)), ("a", a.device))
    return h, _activated(op, "b", b, (rows, width), offs.shape[0], scale, options)


def _out_dtype(op: str, argument: str, requested: torch.dtype | None) -> torch.dtype:
    if requested is None:
        return torch.bfloat16
    checks.require(requested in OUT_DTYPES, op, argument, "float32, bfloat16 or float16", requested, TypeError)
    return requested


def _buffer_dtype(op: str, argument: str, operand: torch.dtype, requested: torch.dtype) -> None:
    _out_dtype(op, argument, requested)


grouped_gemm_scaled_out = with_out(grouped_gemm_scaled, "[T, N]", _buffer_dtype)


def most_tokens(data: Tensor, groups: Dim, format: str) -> Dim:
    """Return T for columnwise data; for padded transposed data, which does not determine T, the largest T."""
    form = FORMATS[format]
    if not form.transposed_columnwise:
        return data.shape[0]
    tokens = data.shape[1] * form.per_byte - form.unit_data * (groups - 1)
    if isinstance(tokens, torch.SymInt) and isinstance(groups, int) and groups > 0:
        return tokens  # never negative for valid data, which the symbolic solver cannot tell
    return torch.sym_max(tokens, 0)


class _Columnwise(NamedTuple):
    """An operand ``[T, F]`` of the wgrad: its name, its components, and the letter of F."""

    name: str
    data: Tensor
    scale: Tensor
    letter: str


def _tokens(op: str, operand: _Columnwise, form: Format, scale_layout: str, groups: Dim) -> Dim:
    """Check one operand of the wgrad and return F."""
    name, data, scale, letter = operand
    if form.transposed_columnwise:
        pack = "" if form.per_byte == 1 else "/2"
        _data(op, name, data, form, 2, f"[{letter}, Tp{pack}]")
        features, places = data.shape[0], data.shape[1] * form.per_byte
        if (whole := places % form.unit_data == 0) is not True:
            checks.require(whole, op, name, f"[{letter}, Tp{pack}], Tp a multiple of {form.unit_data}", data.shape)
        if (room := places >= form.unit_data * (groups - 1)) is not True:
            must = f"[{letter}, Tp{pack}], Tp at least {form.unit_data} (G - 1)"
            checks.require(room, op, name, must, data.shape)
    else:
        _data(op, name, data, form, 2, f"[T, {letter}]")
        features = data.shape[1]
    if form.block == 0:
        expected: tuple[Dim, ...] = (groups,)
    else:
        # The largest T fills the same units as the actual T, so its scales have the same size.
        count = placement.padded_rows(most_tokens(data, groups, form.name), groups, form.unit_scale) // form.block
        if scale_layout == "blocked":
            expected = (placement.blocked_size(features, count),)
        elif form.transposed_scale:
            expected = (features, count)
        else:
            expected = (count, features)
    compact = f"[{letter}, Tp/{form.block}]" if form.transposed_scale else f"[Tp/{form.block}, {letter}]"
    letters = _letters(form, compact, f"{letter} rows", scale_layout)
    _scale(op, f"{name}_scale", scale, _ScaleRequirements(form, expected, letters), name, data.device)
    return features


def grouped_gemm_scaled_wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    *,
    format: str,
    scale_layout: str = "compact",
    out_dtype: torch.dtype | None = None,
    alignment: int | None = None,
) -> TensorSpec:
    """Columnwise tokens ``[T, M]`` and ``[T, N]`` -> ``[G, M, N]``; with an ``alignment``, see ``packed_slots``."""
    op = "grouped_gemm_scaled_wgrad"
    operands = _WgradOperands(a, a_scale, b, b_scale, offs, a_amax, b_amax)
    shape = _wgrad(op, operands, format, scale_layout)
    dtype = _out_dtype(op, "out_dtype", out_dtype)
    if alignment is not None:
        return packed_slots(op, shape[0], shape[1:], dtype, a.device, alignment)
    return TensorSpec(shape, dtype, a.device)


class _WgradOperands(NamedTuple):
    """The columnwise operands of a wgrad."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    offs: Tensor
    a_amax: Tensor | None
    b_amax: Tensor | None


def _wgrad(op: str, operands: _WgradOperands, format: str, scale_layout: str) -> tuple[Dim, Dim, Dim]:
    """Check the operands and return G, M and N."""
    a, a_scale, b, b_scale, offs, a_amax, b_amax = operands
    form = _format(op, format, scale_layout)
    checks.offsets(op, offs, None, "a", a.device)
    groups = offs.shape[0]
    m = _tokens(op, _Columnwise("a", a, a_scale, "M"), form, scale_layout, groups)
    checks.same_device(op, "b", b, "a", a.device)
    n = _tokens(op, _Columnwise("b", b, b_scale, "N"), form, scale_layout, groups)
    tokens = 1 if form.transposed_columnwise else 0
    letter = "Tp" if form.transposed_columnwise else "T"
    pack = "" if form.per_byte == 1 else "/2"
    checks.size(op, "b", b, tokens, a.shape[tokens], lambda: f"of {letter}{pack} = {a.shape[tokens]} like `a`")
    _amax(op, "a_amax", a_amax, form, groups, a.device)
    _amax(op, "b_amax", b_amax, form, groups, a.device)
    return groups, m, n


def grouped_gemm_scaled_wgrad_moves(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor, *_: Any, format: str, **names: Any
) -> Callable[[int], tuple | None]:
    """Return the layouts of both scales by T, or by the second size of transposed data; see ``remembered``.

    They are None for data whose size belongs to no T.
    """
    form, groups = FORMATS[format], offs.shape[0]
    made_with = Options(format, rowwise=False, dtype=a.dtype, scale_layout=names["scale_layout"])
    unit, features = form.unit_data, 0 if form.transposed_columnwise else 1
    plans = (component_plan(made_with, t.shape[features], groups, a.device) for t in (a, b))
    of_a, of_b = (plan.layout(COLUMNWISE_SCALE) for plan in plans)
    least = unit * (groups - 1)

    def moves(size: int) -> tuple | None:
        rows = size
        if form.transposed_columnwise:
            rows = size * form.per_byte - least
            if rows < 0 or (rows + least) % unit:
                return None
        return of_a(rows), of_b(rows)

    return moves


grouped_gemm_scaled_wgrad_out = with_out(grouped_gemm_scaled_wgrad, "[G, M, N]", _buffer_dtype)


def grouped_gemm_scaled_wgrad_accumulate_(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    main_grad: Tensor,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    format: str,
    scale_layout: str = "compact",
    overwrite: bool = False,
) -> None:
    """Check the accumulating form: ``main_grad`` is ``[G, M, N]``."""
    op = "grouped_gemm_scaled_wgrad_accumulate_"
    operands = _WgradOperands(a, a_scale, b, b_scale, offs, a_amax, b_amax)
    shape = _wgrad(op, operands, format, scale_layout)
    wgrad_buffer(op, "main_grad", main_grad, shape, slots, a.device)
    checks.either_dtype(op, "main_grad", main_grad, *OUT_DTYPES)
