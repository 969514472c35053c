"""Output spec of ``grouped_gemm_packed``, and how its packed matrices are decoded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .formats import Format
from .quantized import SOURCES, DequantizeOptions, known_format
from .scaled import _amax, _data, _matrix_scale, _scale, _ScaleRequirements
from .specs import RowsSpec, TensorSpec, accumulator

OP = "grouped_gemm_packed"
BYTES = 1 << 28
"""Limit of the memory for decoded matrices where no kernel decodes them itself; one matrix may be larger."""


class Packed(NamedTuple):
    """Matrices ``[G, N, K]`` as the rowwise components of ``group_quantize``, with compact scales.

    Attributes:
        data: elements.
        scale: their scales.
        amax: of each matrix, where values depend on it.
    """

    data: Tensor
    scale: Tensor
    amax: Tensor | None

    def part(self, first: int, last: int) -> Packed:
        """Return matrices ``first`` to ``last``, exclusive."""
        amax = None if self.amax is None else self.amax[first:last]
        return Packed(self.data[first:last], self.scale[first:last], amax)


class PackedCall(NamedTuple):
    """The tensors of a call of ``grouped_gemm_packed``; an absent one is None."""

    a: Tensor
    b: Tensor
    b_scale: Tensor
    offs: Tensor
    b_amax: Tensor | None = None
    bias: Tensor | None = None
    bias_scale: Tensor | None = None

    @property
    def matrices(self) -> Packed:
        """The packed matrices."""
        return Packed(self.b, self.b_scale, self.b_amax)


def decoding(form: Format) -> DequantizeOptions:
    """Return the options of ``group_dequantize`` for packed matrices; formats with square scales use square blocks."""
    return DequantizeOptions(form.name, block_2d=form.square_scales)


def decoded_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that matrices are decoded to for rows of ``dtype``: the same, or float32 for float64."""
    return dtype if dtype in SOURCES else torch.float32


def at_a_time(groups: int, rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return how many of ``groups`` matrices fit ``BYTES`` when decoded for rows of ``dtype``; at least one."""
    return min(max(BYTES // max(rows * columns * decoded_dtype(dtype).itemsize, 1), 1), max(groups, 1))


def grouped_gemm_packed(
    a: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    b_amax: Tensor | None = None,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    *,
    format: str,
    over_rows: bool = False,
    out_dtype: torch.dtype | None = None,
) -> TensorSpec:
    """``[T, K]`` times the transposes of packed ``[G, N, K]`` -> ``[T, N]``, or ``[T, N]`` times them -> ``[T, K]``."""
    form = known_format(OP, format)
    contracted, kept = ("N", "K") if over_rows else ("K", "N")
    checks.ndim(OP, "a", a, 2, f"[T, {contracted}]")
    checks.floating(OP, "a", a)
    (rows, depth), dtype, device = a.shape, a.dtype, a.device
    pack = "" if form.per_byte == 1 else f"/{form.per_byte}"
    letters = f"[G, N, K{pack}]"
    _data(OP, "b", b, form, 3, letters)
    checks.same_device(OP, "b", b, "a", device)
    groups, height, width = b.shape[0], b.shape[1], b.shape[2] * form.per_byte
    inner, outer = (height, width) if over_rows else (width, height)
    if (same := inner == depth) is not True:
        checks.require(same, OP, "b", f"{letters} with {contracted} = {depth} like `a`", b.shape)
    checks.offsets(OP, offs, groups, "a", device)
    expected = _matrix_scale(form, "compact", groups, height, width, False)
    must = _ScaleRequirements(form, expected, _scale_letters(form))
    _scale(OP, "b_scale", b_scale, must, "a", device)
    _amax(OP, "b_amax", b_amax, form, groups, device)
    if bias is not None:
        checks.operand(OP, "bias", bias, (groups, outer), f"[G, {kept}]", (dtype, accumulator(dtype)), ("a", device))
    if bias_scale is not None:
        checks.require(bias is not None, OP, "bias_scale", "None when there is no `bias`", "a tensor")
        checks.operand(OP, "bias_scale", bias_scale, (rows,), "[T]", (dtype, accumulator(dtype)), ("a", device))
    return RowsSpec((rows, outer), checks.out_dtype(OP, "out_dtype", dtype, out_dtype), device)


def _scale_letters(form: Format) -> str:
    if form.block == 0:
        return "[G] (one per group)"
    down = f"ceil(N/{form.block})" if form.square_scales else "N"
    return f"[G, {down}, ceil(K/{form.block})] (compact)"
