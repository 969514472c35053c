"""From tensors to a launch of a quantisation kernel; the counterpart of ``launch`` for the GEMMs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import backends
from ...meta.quantized import Components, Options
from .. import host
from ..activation.spec import ActivationSpec, spec_of
from ..plans import known, remember
from ..reduce import calls as reductions
from . import calls_fp8, calls_nvfp4, plans
from .spec import MXFP8Spec

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params

VECTOR = 8  # columns that a lane takes


def group_quantize_supports(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    rng: Tensor | None,
    noop: Tensor | None,
    *,
    options: Options,
    out: Components,
) -> str | None:
    """Why ``group_quantize`` below cannot serve a call, or None."""
    reason = host.packages_reason()
    if reason is not None:
        return reason
    if options.dbias and (row_scale is not None or noop is not None):
        return "sums rows as they are and always: not with `row_scale` or `noop`"
    if options.format == "nvfp4":
        reason = calls_nvfp4.supports(x, offs, options)
    elif options.format != "mxfp8":
        reason = calls_fp8.supports(x, offs, options)
    if reason is not None:
        return reason
    if x.numel() == 0:
        return None
    if x.shape[-1] % VECTOR:
        return f"needs K to be a multiple of {VECTOR}, got {x.shape[-1]}"
    pitch = x.stride(-2) * x.element_size()
    stacked = x.dim() == 2 or x.stride(0) == x.stride(1) * x.shape[1]
    if x.stride(-1) != 1 or pitch % host.ALIGNMENT or not stacked or (x.stride(-2) == 0 and x.shape[-2] > 1):
        return f"needs `x` row-major with rows on {host.ALIGNMENT} bytes, got strides {x.stride()}"
    if host.address(x) % host.ALIGNMENT:
        return f"needs `x` aligned to {host.ALIGNMENT} bytes"
    if x.numel() // x.shape[-1] > host.MAX_ROWS:
        return f"takes up to {host.MAX_ROWS} rows, got {x.numel() // x.shape[-1]}"
    for name, t in zip(Components._fields, out):
        if host.address(t) % host.ALIGNMENT:
            return f"needs `{name}` aligned to {host.ALIGNMENT} bytes"
    return None


def group_quantize(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    rng: Tensor | None,
    noop: Tensor | None,
    *,
    options: Options,
    out: Components,
) -> None:
    """Write the components of ``x``; two launches with ``options.dbias``."""
    if options.dbias:
        assert offs is not None
        reductions.grouped_dbias(x, offs, out=out.dbias)
    if options.format == "nvfp4":  # its maxima of no values are zero, and to be written
        calls_nvfp4.run(x, offs, row_scale, rng, noop, options, out)
    elif x.shape[-1] == 0 or (x.numel() == 0 and (offs is None or offs.shape[0] == 0)):
        return
    else:
        plan = _plan_for(x, offs, scale, row_scale, noop, options)
        plan(*_arguments_for(x, offs, scale, row_scale, noop, options, out))


def prepare_group_quantize(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    rng: Tensor | None,
    noop: Tensor | None,
    *,
    options: Options,
    out: Components,
) -> None:
    """Compile and load what ``group_quantize`` with these arguments needs."""
    if options.dbias:
        assert offs is not None
        reductions.prepare_grouped_dbias(x, offs, out=out.dbias)
    if x.numel() == 0:
        return
    if options.format == "nvfp4":
        calls_nvfp4.prepare(x, offs, row_scale, rng, noop, options)
    else:
        _plan_for(x, offs, scale, row_scale, noop, options)


def grouped_activation_quantize_supports(
    x: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    *,
    params: Params,
    options: Options,
    out: Components,
) -> str | None:
    """Why ``grouped_activation_quantize`` below cannot serve a call, or None."""
    spec = spec_of(params)
    if options.format == "nvfp4" or (options.format == "fp8_tensor" and scale is None):
        name = options.format + " without `scale`" * (options.format == "fp8_tensor")
        return f"does not take {name}, whose scales follow from the largest magnitude of a whole group"
    if spec.gated and x.numel() and x.shape[1] // 2 % VECTOR:
        return f"needs I to be a multiple of {VECTOR}, got {x.shape[1] // 2}"
    gate = x.narrow(1, 0, x.shape[1] // 2) if spec.gated else x
    return group_quantize_supports(gate, offs, scale, probs, None, None, options=options, out=out)


def grouped_activation_quantize(
    x: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    *,
    params: Params,
    options: Options,
    out: Components,
) -> None:
    """Write the components of the activation of ``x``, in one launch, of ``fp8_tensor`` after a clear."""
    if x.shape[1]:
        plan = _plan_for(x, offs, scale, probs, None, options, spec_of(params))
        plan(*_arguments_for(x, offs, scale, probs, None, options, out))


def attempt_grouped_activation_quantize(
    x: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    *,
    params: Params,
    options: Options,
    out: Components,
) -> str | None:
    """``grouped_activation_quantize`` if it can serve the call, else why not; one look-up for a call as before."""
    shape, strides, dtypes = x.shape, x.stride(), (x.dtype, probs is None or probs.dtype)
    meant = (params, options, scale is None)
    key = ("grouped_activation_quantize", backends.emulated_arch, x.device, dtypes, meant, shape[1], strides)
    addresses = x.data_ptr()
    for t in out:
        addresses |= t.data_ptr()  # 0 where nothing is written
    launch = known(key, shape[0], addresses)
    if launch is not None:
        launch(*_arguments_for(x, offs, scale, probs, None, options, out))
        return None
    reason = grouped_activation_quantize_supports(x, offs, probs, scale, params=params, options=options, out=out)
    if reason is None:
        grouped_activation_quantize(x, offs, probs, scale, params=params, options=options, out=out)
        if x.numel():
            remember(key, (strides,), _plan_for(x, offs, scale, probs, None, options, spec_of(params)))
    return reason


def prepare_grouped_activation_quantize(
    x: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    *,
    params: Params,
    options: Options,
    out: Components,
) -> None:
    """Compile and load what ``grouped_activation_quantize`` with these arguments needs."""
    if x.numel():
        _plan_for(x, offs, scale, probs, None, options, spec_of(params))


def _plan_for(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    noop: Tensor | None,
    options: Options,
    activation: ActivationSpec | None = None,
) -> Callable:
    """The kernel of a call in MXFP8 or FP8, compiled and loaded."""
    if options.format == "mxfp8":
        return _plan(x, offs, row_scale, noop, options, activation)
    return calls_fp8.plan_for(x, offs, scale, row_scale, noop, options, activation)


def _arguments_for(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    noop: Tensor | None,
    options: Options,
    out: Components,
) -> tuple:
    """What that kernel takes."""
    if options.format == "mxfp8":
        return _arguments(x, offs, row_scale, noop, options, out)
    return calls_fp8.arguments(x, offs, scale, row_scale, noop, options, out)


def _arguments(
    x: Tensor, offs: Tensor | None, row_scale: Tensor | None, noop: Tensor | None, options: Options, out: Components
) -> tuple:
    columns = x.shape[-1]

    def data(t: Tensor) -> Tensor:
        return t if t.dim() == 2 else t.view(-1, columns)

    def scales(t: Tensor) -> Tensor:
        if offs is not None:
            return t
        return t.view(-1) if options.blocked else t.view(-1, t.shape[-1])

    row = (data(out.data), scales(out.scale)) if options.rowwise else (None, None)
    column = (data(out.columnwise_data), scales(out.columnwise_scale)) if options.columnwise else (None, None)
    return data(x), offs, row_scale, plans.flag(noop), *row, *column, x.shape[1] if offs is None else 0


def _plan(
    x: Tensor,
    offs: Tensor | None,
    row_scale: Tensor | None,
    noop: Tensor | None,
    options: Options,
    activation: ActivationSpec | None = None,
) -> Callable:
    arch = backends.device_arch(x.device)
    spec = _spec(x.dtype, offs is not None, host.dtype(row_scale), host.dtype(noop), options, activation)
    op = "group_quantize" if activation is None else "grouped_activation_quantize"
    return plans.fetch((arch, not x.is_cuda, spec), x, lambda: build(arch, spec), op)


@functools.lru_cache(maxsize=256)
def _spec(
    source: torch.dtype,
    grouped: bool,
    row_scale: torch.dtype | None,
    noop: torch.dtype | None,
    options: Options,
    activation: ActivationSpec | None,
) -> MXFP8Spec:
    name = host.name
    return MXFP8Spec(
        source=name(source),
        element=name(options.dtype),
        rowwise=options.rowwise,
        columnwise=options.columnwise,
        scaling=options.scaling,
        blocked=options.blocked,
        grouped=grouped,
        row_scale=name(row_scale),
        noop=name(noop),
        activation=activation,
    )


def build(arch: str, spec: MXFP8Spec) -> Callable:
    """Compile the kernel for ``spec``. Needs no GPU."""
    import cutlass

    from ..compiling import compiled, matrix, strided, vector
    from .activated import ActivateQuantizeMXFP8
    from .mxfp8 import QuantizeMXFP8

    def side(present: bool) -> tuple[Any, Any]:
        if not present:
            return None, None
        scales = vector("uint8", 16) if spec.blocked else matrix("uint8", pitch=1)
        return matrix(spec.element, pitch=VECTOR), scales

    return compiled(
        arch,
        (QuantizeMXFP8 if spec.activation is None else ActivateQuantizeMXFP8)(spec),
        matrix(spec.source),
        vector("int32") if spec.grouped else None,
        strided(spec.row_scale),
        strided(spec.noop),
        *side(spec.rowwise),
        *side(spec.columnwise),
        cutlass.Int32(1),
    )
