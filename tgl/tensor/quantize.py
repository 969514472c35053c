"""``tgl.quantize``: make a GroupedTensor from dense values, differentiably."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..meta import checks
from ..meta.quantized import SOURCES, Options
from ..ops.group_quantize import group_quantize
from ..ops.splits_to_offsets import splits_to_offsets
from . import _autograd, _structure
from .formats import arguments, has
from .grouped_tensor import COMPONENTS, GroupedTensor


def quantize(
    x: Tensor | Sequence[Tensor],
    offs: Tensor | None,
    format: str | Options,
    *,
    m_splits: Tensor | None = None,
    num_groups: int | None = None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    **options: Any,
) -> GroupedTensor:
    """Quantise into a new ``GroupedTensor``; differentiable by the straight-through estimator.

    The gradient of ``x`` is that of the result, times ``row_scale`` if given; ``row_scale`` gets its own gradient. Rows
    past ``offs[-1]`` get zeros.

    Args:
        x: float32, bfloat16 or float16: rows ``[T, K]`` in groups, a stack of matrices ``[G, N, K]``, one matrix
            ``[N, K]``, or a list of matrices: matrices of one shape are stacked; otherwise the result is 1-D, contains
            them one after the other and is for storage (``split()`` returns the matrices).
        offs: int32 ``[G]``, cumulative group ends on the device of ``x``; None for matrices.
        format: ``"mxfp8"``, ``"nvfp4"``, ``"mxfp4"``, ``"fp8_tensor"``, ``"fp8_block"``, or ``"dense"`` for no
            quantisation; or the options of another GroupedTensor (``t.options``), and then no further options.
        m_splits: sizes of the groups, any integer dtype, on the device of ``x``, instead of ``offs``.
        num_groups: number of groups of equal size that T divides into, instead of ``offs``.
        scale: float32 ``[G]``, the scale to use (``"fp8_tensor"``, delayed scaling).
        row_scale: ``[T]``, multiplies the rows first, rounded to the dtype of ``x``.
        rng: int64 ``[2]``, seed and offset: stochastic rounding (``"nvfp4"``).
        options: ``rowwise``, ``columnwise``, ``dtype``, ``scaling``, ``scale_layout``, ``power_of_two``, ``eps``,
            ``block_2d`` and ``rht`` of ``tgl.group_quantize``.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    op = "quantize"
    if isinstance(x, GroupedTensor):
        checks.require(False, op, "x", "a dense tensor", f"a {type(x).__name__}", TypeError)
    if not isinstance(format, (str, Options)):
        checks.require(False, op, "format", "the name of a format, or Options", f"a {type(format).__name__}", TypeError)
    for argument, t in (("offs", offs), ("m_splits", m_splits)):
        if t is not None and not isinstance(t, Tensor):
            checks.require(False, op, argument, "a tensor or None", f"a {type(t).__name__}", TypeError)
    if not isinstance(x, Tensor):
        listed = isinstance(x, (list, tuple))
        if not (listed and x and all(isinstance(m, Tensor) for m in x)):
            empty = listed and not x
            must, found = (
                "a tensor, or a list of at least one matrix",
                f"{'an empty' if empty else 'a'} {type(x).__name__}",
            )
            checks.require(False, op, "x", must, found, ValueError if empty else TypeError)
        shapes = tuple([tuple(m.shape) for m in x])
        given = offs is not None or m_splits is not None or num_groups is not None
        checks.require(not given, op, "offs", "None for a list of matrices", "group ends")
        checks.require(row_scale is None, op, "row_scale", "None for a list of matrices", "a tensor")
        if len(set(shapes)) != 1:
            return _quantize_list(x, shapes, format, scale, rng, options)
        x = torch.stack(tuple(x))
    offs = _offsets(x, offs, m_splits, num_groups)
    resolved = _structure.resolve(op, format, options)
    if resolved.format == "dense":
        parts = _dense(x, offs, scale=scale, row_scale=row_scale, rng=rng)
    else:
        parts = _components(x, offs, scale, row_scale, rng, resolved)
    names, tensors = tuple(parts), tuple(parts.values())
    source: Tensor = x if row_scale is None else _autograd.RowScale.apply(x, row_scale, offs)
    return _autograd.wrap(source, resolved.format, _structure.fields(resolved), None, names, tensors)


def _offsets(x: Tensor, offs: Tensor | None, m_splits: Tensor | None, num_groups: int | None) -> Tensor | None:
    """Return a copy of the group ends, owned by the new tensor."""
    op = "quantize"
    given = [
        name
        for name, value in (("offs", offs), ("m_splits", m_splits), ("num_groups", num_groups))
        if value is not None
    ]
    checks.require(len(given) <= 1, op, "offs", "the only description of the groups", " and ".join(given))
    if m_splits is not None:
        return splits_to_offsets(m_splits)
    if num_groups is not None:
        rows = x.shape[0]
        divides = num_groups > 0 and rows % num_groups == 0
        checks.require(divides, op, "num_groups", f"a divisor of T = {rows}", num_groups)
        return torch.arange(1, num_groups + 1, dtype=torch.int32, device=x.device) * (rows // num_groups)
    return None if offs is None else offs.clone()


def _components(
    x: Tensor, offs: Tensor | None, scale: Tensor | None, row_scale: Tensor | None, rng: Tensor | None, options: Options
) -> dict[str, Tensor]:
    one = offs is None and x.dim() == 2
    with torch.no_grad():
        made = group_quantize(x[None] if one else x, offs, scale, row_scale, rng, **arguments(options))
        parts = {name: t[0] if one else t for name, t in zip(COMPONENTS, made) if has(options, name)}
    return parts if offs is None else {**parts, "offs": offs}


def _dense(x: Tensor, offs: Tensor | None, **tensors: Tensor | None) -> dict[str, Tensor]:
    op = "quantize"
    for name, t in tensors.items():
        checks.require(t is None, op, name, "None for dense values", "a tensor")
    checks.require(x.dtype in SOURCES, op, "x", "float32, bfloat16 or float16", x.dtype, TypeError)
    if offs is not None:
        checks.ndim(op, "x", x, 2, "[T, K] when `offs` is given")
        checks.offsets(op, offs, None, "x", x.device)
    else:
        checks.require(x.dim() in (2, 3), op, "x", "[G, N, K] or [N, K] when `offs` is None", x.shape)
    with torch.no_grad():
        if offs is None:
            return {"rowwise_data": x.clone(memory_format=torch.contiguous_format)}
        return {"rowwise_data": _structure.zero_tail(x, offs), "offs": offs}


def _quantize_list(
    matrices: Sequence[Tensor],
    shapes: tuple[Any, ...],
    format: str | Options,
    scale: Tensor | None,
    rng: Tensor | None,
    options: dict[str, Any],
) -> GroupedTensor:
    op = "quantize"
    checks.require(len(matrices) > 0, op, "x", "a tensor or a list of at least one matrix", "an empty list")
    first = matrices[0]
    for i, m in enumerate(matrices):
        checks.ndim(op, f"x[{i}]", m, 2, "[N, K]")
        checks.same_dtype(op, f"x[{i}]", m, "x[0]", first.dtype)
        checks.same_device(op, f"x[{i}]", m, "x[0]", first.device)
    t = GroupedTensor.empty(shapes, format, source_dtype=first.dtype, device=first.device, **options)
    t.quantize_([m.detach() for m in matrices], scale=scale, rng=rng)
    flat = torch.cat([m.reshape(-1) for m in matrices])
    names = tuple([name for name in COMPONENTS if getattr(t, name) is not None])
    parts = [getattr(t, name) for name in names]
    return _autograd.wrap(flat, t.format, t.static, shapes, names, parts)
