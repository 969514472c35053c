"""From tensors to a launch of a quantisation kernel; the counterpart of ``launch`` for the GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import backends
from ...meta.quantized import Components, Options
from .. import cache, launch
from ..activation.spec import ActivationSpec, spec_of
from ..reduce import calls as reductions
from .spec import MXFP8Spec

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params

MAX_ROWS = 1 << 30
VECTOR = 8  # columns that a lane takes
ALIGNMENT = 16

_plans: dict[tuple, Callable] = {}


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
    reason = launch._packages_reason()
    if reason is not None:
        return reason
    if options.format != "mxfp8":
        return f"takes mxfp8, got {options.format}"
    if options.dbias and (row_scale is not None or noop is not None):
        return "sums rows as they are and always: not with `row_scale` or `noop`"
    if x.numel() == 0:
        return None
    if x.shape[-1] % VECTOR:
        return f"needs K to be a multiple of {VECTOR}, got {x.shape[-1]}"
    pitch = x.stride(-2) * x.element_size()
    stacked = x.dim() == 2 or x.stride(0) == x.stride(1) * x.shape[1]
    if x.stride(-1) != 1 or pitch % ALIGNMENT or not stacked or (x.stride(-2) == 0 and x.shape[-2] > 1):
        return f"needs `x` row-major with rows on {ALIGNMENT} bytes, got strides {x.stride()}"
    if launch._address(x) % ALIGNMENT:
        return f"needs `x` aligned to {ALIGNMENT} bytes"
    if x.numel() // x.shape[-1] > MAX_ROWS:
        return f"takes up to {MAX_ROWS} rows, got {x.numel() // x.shape[-1]}"
    for name, t in zip(Components._fields, out):
        if launch._address(t) % ALIGNMENT:
            return f"needs `{name}` aligned to {ALIGNMENT} bytes"
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
    if x.shape[-1] == 0 or (offs is None and x.numel() == 0):
        return
    _call(_plan(x, offs, row_scale, noop, options), *_arguments(x, offs, row_scale, noop, options, out))


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
    if x.numel():
        _plan(x, offs, row_scale, noop, options)


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
    if options.format == "mxfp8" and spec.gated and x.numel() and x.shape[1] // 2 % VECTOR:
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
    """Write the components of the activation of ``x``, in one launch."""
    spec = spec_of(params)
    if x.shape[1]:
        _call(_plan(x, offs, probs, None, options, spec), *_arguments(x, offs, probs, None, options, out))


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
    spec = spec_of(params)
    if x.numel():
        _plan(x, offs, probs, None, options, spec)


def _arguments(
    x: Tensor, offs: Tensor | None, row_scale: Tensor | None, noop: Tensor | None, options: Options, out: Components
) -> tuple:
    columns = x.shape[-1]

    def data(t: Tensor) -> Tensor:
        return t if t.dim() == 2 else t.view(-1, columns)

    def scales(t: Tensor) -> Tensor:
        return t.view(-1) if options.blocked else t if t.dim() == 2 else t.view(-1, t.shape[-1])

    row = (data(out.data), scales(out.scale)) if options.rowwise else (None, None)
    column = (data(out.columnwise_data), scales(out.columnwise_scale)) if options.columnwise else (None, None)
    flag = None if noop is None else (noop.view(torch.uint8) if noop.dtype == torch.bool else noop).view(1)
    return data(x), offs, row_scale, flag, *row, *column, x.shape[1] if offs is None else 0


def _call(plan: Callable, x: Tensor, *rest: Any) -> None:
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            plan(x, *rest)
    else:
        plan(x, *rest)


def _plan(
    x: Tensor,
    offs: Tensor | None,
    row_scale: Tensor | None,
    noop: Tensor | None,
    options: Options,
    activation: ActivationSpec | None = None,
) -> Callable:
    arch, name = backends.device_arch(x.device), launch._name
    assert options.dtype is not None
    spec = MXFP8Spec(
        source=name(x.dtype),
        element=name(options.dtype),
        rowwise=options.rowwise,
        columnwise=options.columnwise,
        scaling=options.scaling,
        blocked=options.blocked,
        grouped=offs is not None,
        row_scale=name(row_scale),
        noop=name(noop),
        activation=activation,
    )
    key = (arch, not x.is_cuda, spec)
    plan = _plans.get(key)
    if plan is None:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            op = "group_quantize" if activation is None else "grouped_activation_quantize"
            raise backends.GraphCaptureError(
                f"tgl::{op}: the kernel for this call is not compiled yet, which CUDA graph capture forbids; "
                f"call tgl.warmup({op!r}, ...) with such arguments, or the op itself, before the capture"
            )
        plan = build(arch, spec) if not x.is_cuda else cache.fetch(key, lambda: build(arch, spec))
        _plans[key] = plan
    return plan


def build(arch: str, spec: MXFP8Spec) -> Callable:
    """Compile the kernel for ``spec``. Needs no GPU."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from .activated import ActivateQuantizeMXFP8
    from .lanes import TYPES
    from .mxfp8 import QuantizeMXFP8

    types = {name: getattr(cutlass, kind) for name, kind in TYPES.items()} | {"bool": cutlass.Uint8}

    def matrix(element: Any, pitch: int = ALIGNMENT) -> Any:
        """Rows on ``pitch`` bytes."""
        strides = (cute.sym_int64(divisibility=pitch * 8 // element.width), 1)
        return make_fake_tensor(element, (cute.sym_int32(), cute.sym_int32()), strides, assumed_align=ALIGNMENT)

    def vector(element: Any, align: int) -> Any:
        return make_fake_tensor(element, (cute.sym_int32(),), (1,), assumed_align=align)

    def scales() -> Any:
        if spec.blocked:
            return vector(cutlass.Uint8, ALIGNMENT)
        return make_fake_tensor(
            cutlass.Uint8, (cute.sym_int32(), cute.sym_int32()), (cute.sym_int64(), 1), assumed_align=ALIGNMENT
        )

    def strided(name: str | None) -> Any:
        if name is None:
            return None
        return make_fake_tensor(types[name], (cute.sym_int32(),), (cute.sym_int64(),))

    row = (matrix(types[spec.element], VECTOR), scales()) if spec.rowwise else (None, None)
    column = (matrix(types[spec.element], VECTOR), scales()) if spec.columnwise else (None, None)
    return cute.compile[cute.GPUArch(launch.GPU_ARCH[arch]), cute.EnableTVMFFI(True)](
        (QuantizeMXFP8 if spec.activation is None else ActivateQuantizeMXFP8)(spec),
        matrix(types[spec.source]),
        vector(cutlass.Int32, 4) if spec.grouped else None,
        strided(spec.row_scale),
        strided(spec.noop),
        *row,
        *column,
        cutlass.Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
