"""From tensors to a launch of an activation kernel; the counterpart of ``launch`` for the GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import backends
from .. import host, plans
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
        plan(x, offs, probs, out)


def grouped_activation_backward(
    dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, dx: Tensor, dprobs: Tensor
) -> None:
    """The gradients in ``x`` and ``probs``, with zero tails."""
    if dy.numel() == 0:
        dprobs.zero_()
        return
    plan = _plan("grouped_activation_backward", spec_of(params), probs, dy, x, dx)
    plan(dy, x, offs, probs, dx, None if probs is None else dprobs)


def attempt_grouped_activation(
    x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, out: Tensor
) -> str | None:
    """``grouped_activation`` if it can serve the call, else why not; one look-up for a call like one before."""
    shape, strides = x.shape, (x.stride(), out.stride())
    dtypes = (x.dtype, probs is None or probs.dtype)
    key = ("grouped_activation", backends.emulated_arch, x.device, dtypes, params, shape[1], strides)
    addresses = x.data_ptr() | out.data_ptr()
    plan = plans.known(key, shape[0], addresses)
    if plan is not None:
        plan(x, offs, probs, out)
        return None
    reason = grouped_activation_supports(x, offs, probs, params=params, out=out)
    if reason is None:
        grouped_activation(x, offs, probs, params=params, out=out)
        if out.numel() and not addresses % host.ALIGNMENT:
            plans.remember(key, strides, _plan("grouped_activation", spec_of(params), probs, x, out))
    return reason


def attempt_grouped_activation_backward(
    dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, dx: Tensor, dprobs: Tensor
) -> str | None:
    """``grouped_activation_backward`` likewise."""
    shape, strides = x.shape, (dy.stride(), x.stride(), dx.stride())
    dtypes = (x.dtype, probs is None or probs.dtype)
    key = ("grouped_activation_backward", backends.emulated_arch, x.device, dtypes, params, shape[1], strides)
    addresses = dy.data_ptr() | x.data_ptr() | dx.data_ptr()
    plan = plans.known(key, shape[0], addresses)
    if plan is not None:
        plan(dy, x, offs, probs, dx, None if probs is None else dprobs)
        return None
    reason = grouped_activation_backward_supports(dy, x, offs, probs, params=params, dx=dx, dprobs=dprobs)
    if reason is None:
        grouped_activation_backward(dy, x, offs, probs, params=params, dx=dx, dprobs=dprobs)
        if dy.numel() and not addresses % host.ALIGNMENT:
            plan = _plan("grouped_activation_backward", spec_of(params), probs, dy, x, dx)
            plans.remember(key, strides, plan)
    return reason


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
        plan = _plans[key] = host.launcher(host.compiled(op, key, first, lambda: build(*key)))
    return plan


def build(
    op: str, arch: str, emulated: bool, spec: ActivationSpec, vector: int, element: str, probs: str | None
) -> Callable:
    """Compile a kernel. Needs no GPU."""
    from .. import compiling
    from ..elements import TYPES
    from .kernel import GroupedActivation, GroupedActivationBackward

    def rows(count: int) -> Any:
        """Accessed by ``count`` elements of a row."""
        width = count * TYPES[element].width // 8
        return compiling.matrix(element, pitch=width, columns=count, align=min(width, host.ALIGNMENT))

    narrow, wide = rows(vector), rows(vector * (2 if spec.interleaved else 1))
    offs, factors = compiling.strided("int32"), compiling.strided(probs)
    if op == "grouped_activation":
        return compiling.compiled(arch, GroupedActivation(spec, vector), wide, offs, factors, narrow)
    dx = rows(vector * (2 if spec.interleaved else 1))
    dprobs = None if probs is None else compiling.vector("float32")
    return compiling.compiled(arch, GroupedActivationBackward(spec, vector), narrow, wide, offs, factors, dx, dprobs)
