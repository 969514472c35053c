"""From tensors to a launch of an activation kernel; the counterpart of ``launch`` for the GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import backends
from .. import host
from .spec import ActivationSpec, spec_of

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_plans: dict[tuple, Callable] = {}


def grouped_activation_supports(
    x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, out: Tensor
) -> str | None:
    """Why ``grouped_activation`` below cannot serve a call, or None."""
    return host.packages_reason() or _reason(spec_of(params), x=x)


def grouped_activation_backward_supports(
    dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, dx: Tensor, dprobs: Tensor
) -> str | None:
    """Why ``grouped_activation_backward`` below cannot serve a call, or None."""
    return host.packages_reason() or _reason(spec_of(params), x=x, dy=dy)


def _reason(spec: ActivationSpec, **inputs: Tensor) -> str | None:
    for name, t in inputs.items():
        if t.dtype not in DTYPES:
            return f"takes float32, bfloat16 and float16, got {t.dtype}"
        if t.numel() and t.stride(1) != 1:
            return f"needs `{name}` row-major, got strides {t.stride()}"
        if t.shape[0] > host.MAX_ROWS:
            return f"takes up to {host.MAX_ROWS} rows, got {t.shape[0]}"
    x = inputs["x"]
    if spec.interleaved and (x.stride(0) % 2 or host.address(x) % (2 * x.element_size())):
        return f"needs interleaved `x` with rows on {2 * x.element_size()} bytes, got strides {x.stride()}"
    return None


def grouped_activation(x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, out: Tensor) -> None:
    """``out = probs A(g) L(u)`` and a zero tail."""
    if out.numel():
        plan = _plan("grouped_activation", spec_of(params), probs, x, out)
        host.call(plan, x, offs, probs, out)


def grouped_activation_backward(
    dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, dx: Tensor, dprobs: Tensor
) -> None:
    """The gradients in ``x`` and ``probs``, with zero tails."""
    if dy.numel() == 0:
        dprobs.zero_()
        return
    plan = _plan("grouped_activation_backward", spec_of(params), probs, dy, x, dx)
    host.call(plan, dy, x, offs, probs, dx, None if probs is None else dprobs)


def prepare_grouped_activation(x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, out: Tensor) -> None:
    """Compile and load what ``grouped_activation`` with these arguments needs."""
    if out.numel():
        _plan("grouped_activation", spec_of(params), probs, x, out)


def prepare_grouped_activation_backward(
    dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, dx: Tensor, dprobs: Tensor
) -> None:
    """Compile and load what ``grouped_activation_backward`` with these arguments needs."""
    if dy.numel():
        _plan("grouped_activation_backward", spec_of(params), probs, dy, x, dx)


def _vector(spec: ActivationSpec, columns: int, *matrices: Tensor) -> int:
    """Columns of the output that a lane takes at once: its accesses are 16 bytes wide, where all matrices allow it."""
    vector = host.ALIGNMENT // matrices[0].element_size() // (2 if spec.interleaved else 1)
    low = columns
    for t in matrices:
        pair = 2 if spec.interleaved and t.shape[1] != columns else 1  # elements of t per column of the output
        low |= t.stride(0) // pair | host.address(t) // (pair * t.element_size())
    while low % vector:
        vector //= 2
    return vector


def _plan(op: str, spec: ActivationSpec, probs: Tensor | None, *matrices: Tensor) -> Callable:
    first = matrices[0]
    columns = min(t.shape[1] for t in matrices)
    vector = _vector(spec, columns, *matrices)
    dtypes = (host.name(first.dtype), host.name(probs))
    key = (op, backends.device_arch(first.device), not first.is_cuda, spec, vector, *dtypes)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = host.compiled(op, key, first, lambda: build(*key))
    return plan


def build(
    op: str, arch: str, emulated: bool, spec: ActivationSpec, vector: int, element: str, probs: str | None
) -> Callable:
    """Compile a kernel. Needs no GPU."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from .kernel import GroupedActivation, GroupedActivationBackward

    types = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
    dtype = types[element]

    def matrix(count: int) -> Any:
        """Accessed by ``count`` elements of a row."""
        columns, pitch = cute.sym_int32(divisibility=count), cute.sym_int64(divisibility=count)
        align = min(count * dtype.width // 8, host.ALIGNMENT)
        return make_fake_tensor(dtype, (cute.sym_int32(), columns), (pitch, 1), assumed_align=align)

    def vector_of(element: Any, stride: Any) -> Any:
        return make_fake_tensor(element, (cute.sym_int32(),), (stride,))

    narrow, wide = matrix(vector), matrix(vector * (2 if spec.interleaved else 1))
    offs = vector_of(cutlass.Int32, cute.sym_int64())
    factors = None if probs is None else vector_of(types[probs], cute.sym_int64())
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compile_ = cute.compile[cute.GPUArch(host.GPU_ARCH[arch]), cute.EnableTVMFFI(True)]
    if op == "grouped_activation":
        return compile_(GroupedActivation(spec, vector), wide, offs, factors, narrow, stream)
    dx = matrix(vector * (2 if spec.interleaved else 1))
    dprobs = None if probs is None else vector_of(cutlass.Float32, 1)
    return compile_(GroupedActivationBackward(spec, vector), narrow, wide, offs, factors, dx, dprobs, stream)
