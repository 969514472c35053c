"""The activation on its own, and its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.memory import address
from ..activation.activation_spec import ActivationSpec, spec_of
from ..runtime import device
from ..runtime.launcher import Call, Launcher, warm
from ..runtime.names import name
from ..runtime.requirements import ALIGNMENT, MAX_ROWS

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ActivationKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    spec: ActivationSpec
    vector: int  # columns of the output per access of a lane
    element: str
    probs: str | None


class ActivationCall(NamedTuple):
    """Arguments of ``grouped_activation``."""

    x: Tensor
    offs: Tensor
    probs: Tensor | None
    params: Params
    out: Tensor


class ActivationBackwardCall(NamedTuple):
    """Arguments of ``grouped_activation_backward``."""

    dy: Tensor
    x: Tensor
    offs: Tensor
    probs: Tensor | None
    params: Params
    dx: Tensor
    dprobs: Tensor


class ElementwiseLauncher(Launcher[Call]):
    """Launcher of an elementwise kernel, forward or backward."""

    inputs: tuple[str, ...]
    output: str

    def reject_reason(self, c: Any) -> backends.Reason:
        """Return why the kernel does not take the dtypes or layouts, or None."""
        reason = device.packages_reason()
        if reason is not None:
            return reason
        for field in self.inputs:
            t = getattr(c, field)
            if t.dtype not in DTYPES:
                return f"takes float32, bfloat16 and float16, got {t.dtype}"
            if t.numel() and t.stride(1) != 1:
                return f"needs `{field}` row-major, got strides {t.stride()}"
            if t.shape[0] > MAX_ROWS:
                return f"takes up to {MAX_ROWS} rows, got {t.shape[0]}"
        x, pair = c.x, 2 * c.x.element_size()
        if spec_of(c.params).interleaved and (x.stride(0) % 2 or address(x) % pair):
            return f"needs interleaved `x` with rows on {pair} bytes, got strides {x.stride()}"
        return None

    def plan_key(self, c: Any) -> tuple | None:
        """Return the plan key, which does not depend on the number of rows."""
        addresses, strides = 0, []
        for field in (*self.inputs, self.output):
            t = getattr(c, field)
            addresses |= t.data_ptr()
            strides.append(t.stride())
            if 0 in strides[-1]:
                return None
        if not warm(c.x.shape[0], addresses):
            return None
        return c.x.dtype, c.probs is None or c.probs.dtype, c.params, c.x.shape[1], *strides

    def key(self, c: Any, arch: str) -> ActivationKey:
        """Return the key of the kernel; the width of accesses follows from the alignment of the tensors."""
        spec, matrices = spec_of(c.params), [getattr(c, field) for field in (*self.inputs, self.output)]
        return ActivationKey(arch, not c.x.is_cuda, spec, vector_of(spec, *matrices), name(c.x), name(c.probs))


class ActivationLauncher(ElementwiseLauncher[ActivationCall]):
    """``out = probs A(g) L(u)``, with a zero tail."""

    op = "grouped_activation"
    call = ActivationCall
    inputs, output = ("x",), "out"

    def batch_invariant(self, c: ActivationCall) -> bool:
        """Return True: every element depends on itself alone."""
        return True

    def is_empty(self, c: ActivationCall) -> bool:
        """Return whether there are no results."""
        return c.out.numel() == 0

    def build(self, key: ActivationKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        from ..activation.kernel import ActivationKernel as Kernel
        from ..runtime.compiling import compiled, strided

        narrow, wide = rows_of(key)
        return compiled(key.arch, Kernel(key.spec, key.vector), wide, strided("int32"), strided(key.probs), narrow)

    def arguments(self, c: ActivationCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.x, c.offs, c.probs, c.out


class ActivationBackwardLauncher(ElementwiseLauncher[ActivationBackwardCall]):
    """The gradients of ``x`` and ``probs``, with zero tails."""

    op = "grouped_activation_backward"
    call = ActivationBackwardCall
    inputs, output = ("dy", "x"), "dx"

    def is_empty(self, c: ActivationBackwardCall) -> bool:
        """Return whether there are no gradients."""
        return c.dy.numel() == 0

    def zero_outputs(self, c: ActivationBackwardCall) -> None:
        """Write zeros, the sums over no columns."""
        c.dprobs.zero_()

    def build(self, key: ActivationKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        from ..activation.kernel import ActivationBackwardKernel as Kernel
        from ..runtime.compiling import compiled, strided, vector

        (narrow, wide), (_, dx) = rows_of(key), rows_of(key)
        dprobs = None if key.probs is None else vector("float32")
        offs, factors = strided("int32"), strided(key.probs)
        return compiled(key.arch, Kernel(key.spec, key.vector), narrow, wide, offs, factors, dx, dprobs)

    def arguments(self, c: ActivationBackwardCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.dy, c.x, c.offs, c.probs, c.dx, None if c.probs is None else c.dprobs


def vector_of(spec: ActivationSpec, *matrices: Tensor) -> int:
    """Return the columns of the output per access of a lane: 16 bytes if the layout of every matrix allows it."""
    vector = ALIGNMENT // matrices[0].element_size() // (2 if spec.interleaved else 1)
    low = columns = min(t.shape[1] for t in matrices)
    for t in matrices:
        pair = 2 if spec.interleaved and t.shape[1] != columns else 1  # elements of ``t`` per column of the output
        low |= t.stride(0) // pair | address(t) // (pair * t.element_size())
    while low % vector:
        vector //= 2
    return vector


def rows_of(key: ActivationKey) -> tuple[Any, Any]:
    """Return stand-ins for matrices of the output's columns and of the input's, with the accesses of a lane."""
    from ..runtime.compiling import matrix
    from ..runtime.elements import TYPES

    def rows(count: int) -> Any:
        width = count * TYPES[key.element].width // 8
        return matrix(key.element, pitch=width, columns=count, align=min(width, ALIGNMENT))

    return rows(key.vector), rows(key.vector * (2 if key.spec.interleaved else 1))


GROUPED_ACTIVATION = ActivationLauncher()
GROUPED_ACTIVATION_BACKWARD = ActivationBackwardLauncher()
LAUNCHERS = (GROUPED_ACTIVATION, GROUPED_ACTIVATION_BACKWARD)
