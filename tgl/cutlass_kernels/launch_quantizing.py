"""From tensors to a launch of a scaled GEMM whose activation leaves quantised; the counterpart of ``launch_scaled``.

``operands`` are those of the op in their order: ``a, a_scale, b, b_scale, offs, a_amax, b_amax, bias, probs, scale``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import backends
from ..meta.quantized import Components, Options
from . import host, launch_scaled, plans
from .activation.spec import spec_of
from .config import VARLEN_M, GemmConfig
from .epilogue.spec import EpilogueSpec
from .gemm.scaling import ATOM_ROWS, MXFP8
from .host import ALIGNMENT
from .plans import Plan, power_of_two
from .quantize.spec import MXFP8Spec
from .requirements import address_reason

if TYPE_CHECKING:
    from ..ops.grouped_activation import Params


class QuantizingPlanKey(NamedTuple):
    """What a compiled kernel depends on."""

    arch: str
    emulated: bool
    a_element: str
    b_element: str
    b_rows_first: bool
    spec: EpilogueSpec
    config: GemmConfig


OP = "grouped_gemm_scaled_activation_quantize"
_NO_EPILOGUE = {
    "nvfp4": "the scales of nvfp4 follow from the largest magnitude of a whole group, which no tile of it knows",
    "fp8_tensor": "the scale of fp8_tensor is one of a whole group, whose largest magnitude no tile of it knows",
}


def supports(*operands: Any, params: Params, options: Options, h: Tensor, out: Components, **_: Any) -> str | None:
    """Why ``grouped_gemm_scaled_activation_quantize`` below cannot serve a call, or None."""
    if options.format != "mxfp8":
        return _NO_EPILOGUE.get(options.format, f"takes mxfp8, got {options.format}")
    layout = options.scale_layout
    reason = launch_scaled.supports(*operands, format="mxfp8", scale_layout=layout, out=h)
    if reason is not None:
        return reason
    if h.dtype == torch.float32:
        return f"writes bfloat16 or float16, not {h.dtype}"
    columns = h.shape[1] // 2 if params.gated else h.shape[1]
    if columns % ALIGNMENT:
        return f"needs I to be a multiple of {ALIGNMENT}, got {columns}"
    if params.gated and not params.interleaved and columns % ATOM_ROWS:
        return f"needs I to be a multiple of {ATOM_ROWS} unless halves alternate, since scales come so, got {columns}"
    for name, t in zip(Components._fields, out):
        reason = address_reason(name, t)
        if reason is not None:
            return reason
    return None


def grouped_gemm_scaled_activation_quantize(
    *operands: Any, b_direction: str, params: Params, options: Options, h: Tensor, out: Components
) -> None:
    """``h``, and the components of its activation, in one launch."""
    if h.numel() == 0 or operands[2].shape[0] == 0:
        for t in (h, *out):
            t.zero_()
        return
    plan = _plan(operands, b_direction, params, options, h)
    plan.run(*operands[:5], h, *operands[7:9], *_components(options, out))


def attempt_grouped_gemm_scaled_activation_quantize(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None,
    b_amax: Tensor | None,
    bias: Tensor | None,
    probs: Tensor | None,
    scale: Tensor | None,
    *,
    b_direction: str,
    params: Params,
    options: Options,
    h: Tensor,
    out: Components,
) -> str | None:
    """The same if it can serve the call, else why not; one look-up for a call like one before."""
    rows, shape, strides = a.shape[0], b.shape, (a.stride(), b.stride(), h.stride())
    dtypes = (a.dtype, b.dtype, h.dtype, bias is None or bias.dtype, probs is None or probs.dtype)
    meant, size = (b_direction, params, options), plans.rows_class(rows, shape[0])
    key = (OP, backends.emulated_arch, a.device, dtypes, meant, shape, strides, size)
    addresses = a.data_ptr() | a_scale.data_ptr() | b.data_ptr() | b_scale.data_ptr() | h.data_ptr()
    for t in out:
        addresses |= t.data_ptr()  # 0 where nothing is written
    plan = plans.known(key, rows, addresses)
    if plan is not None:
        plan.run(a, a_scale, b, b_scale, offs, h, bias, probs, *_components(options, out))
        return None
    operands = (a, a_scale, b, b_scale, offs, a_amax, b_amax, bias, probs, scale)
    reason = supports(*operands, params=params, options=options, h=h, out=out)
    if reason is None:
        named: dict[str, Any] = {"b_direction": b_direction, "params": params, "options": options}
        grouped_gemm_scaled_activation_quantize(*operands, **named, h=h, out=out)
        if h.numel() and shape[0]:
            plans.remember(key, strides, _plan(operands, **named, h=h))
    return reason


def prepare_grouped_gemm_scaled_activation_quantize(
    *operands: Any, b_direction: str, params: Params, options: Options, h: Tensor, out: Components
) -> None:
    """Compile and load what the same call without ``prepare_`` needs, by a launch on a scratch problem."""
    a, _, b, b_scale, _, _, _, bias, probs, _ = operands
    if h.numel() == 0 or b.shape[0] == 0:
        return
    plan = _plan(operands, b_direction, params, options, h)
    side = ATOM_ROWS
    width = 2 * side if params.gated else side
    x, x_scale, _ = launch_scaled.scratch_square(a, None, "mxfp8", options.scale_layout, False, False)
    w = b.new_zeros((1, width, side) if b_direction == "rowwise" else (1, side, width))
    codes, blocks = torch.zeros(side, side, dtype=options.dtype, device=a.device), x_scale.new_zeros(4 * side)
    plan.run(
        *(x, x_scale, w, b_scale.new_zeros(1, 4 * width), torch.zeros(1, dtype=torch.int32, device=a.device)),
        torch.zeros(side, width, dtype=h.dtype, device=a.device),
        None if bias is None else bias.new_zeros(1, width),
        None if probs is None else probs.new_zeros(side),
        *_components(options, out._replace(data=codes, scale=blocks, columnwise_data=codes, columnwise_scale=blocks)),
    )


def _components(options: Options, out: Components) -> tuple[Tensor | None, ...]:
    row = (out.data, out.scale) if options.rowwise else (None, None)
    column = (out.columnwise_data, out.columnwise_scale) if options.columnwise else (None, None)
    return *row, *column


def choose(arch: str, params: Params, columns: int, depth: int, rows: int) -> GemmConfig:
    """The tiling of ``launch_scaled``; halves side by side need a whole atom of scales each."""
    tiling = launch_scaled.choose(arch, VARLEN_M, MXFP8, columns, depth, rows)
    return replace(tiling, tile_n=2 * ATOM_ROWS) if params.gated and not params.interleaved else tiling


def _plan(operands: tuple, b_direction: str, params: Params, options: Options, h: Tensor) -> Plan:
    a, _, b, *_, bias, probs, _ = operands
    arch = backends.device_arch(a.device)
    rows = power_of_two(a.shape[0] // b.shape[0])
    tiling = choose(arch, params, h.shape[1], a.shape[1], rows)
    name = host.name
    quantized = MXFP8Spec(
        source=name(h),
        element=name(options.dtype),
        rowwise=options.rowwise,
        columnwise=options.columnwise,
        scaling=options.scaling,
        blocked=True,
        grouped=True,
    )
    spec = EpilogueSpec(
        name(h), name(bias), tail=True, activation=spec_of(params), probs=name(probs), quantized=quantized
    )
    key = QuantizingPlanKey(arch, not a.is_cuda, name(a), name(b), b_direction == "rowwise", spec, tiling)
    return plans.fetch(OP, key, a, build)


def build(key: QuantizingPlanKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass

    from .compiling import compiled, matrix, strided, vector
    from .elements import TYPES
    from .gemm.sm100.scaled import QuantizingGroupedGemm

    spec, quantized = key.spec, key.spec.quantized
    assert quantized is not None

    def direction(present: bool) -> tuple:
        return (matrix(quantized.element), vector("uint8", ALIGNMENT)) if present else (None, None)

    a, b, codes = (TYPES[name] for name in (key.a_element, key.b_element, quantized.element))
    return compiled(
        key.arch,
        QuantizingGroupedGemm(key.config, spec, a, b, codes, MXFP8, key.b_rows_first),
        matrix(key.a_element),
        vector("uint8", ALIGNMENT),
        matrix(key.b_element, 3),
        matrix("uint8"),
        strided("int32"),
        matrix(spec.out),
        strided(spec.bias, 2),
        strided(spec.probs),
        *direction(quantized.rowwise),
        *direction(quantized.columnwise),
        cutlass.Int32(1),
    )
