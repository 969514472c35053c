"""What every launch needs on the host: reasons and names for its key, a compiled kernel, and the right device."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .. import backends
from . import cache

GPU_ARCH = {"sm_90": "sm_90a", "sm_100": "sm_100a"}
ALIGNMENT = 16  # bytes, of a 128-bit access and of what a tensor map describes
MAX_ROWS = 1 << 30  # the size of a ragged mode


@functools.cache
def packages_reason() -> str | None:
    """Why no kernel can be compiled here, or None."""
    for module, package in (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(module) is None:
            return f"needs the package {package}"
    return None


def address(t: Tensor) -> int:
    """Where ``t`` lies; 0 for a tensor without memory, about which ``explain`` may be asked."""
    return 0 if isinstance(t, FakeTensor) else t.data_ptr()


def dtype(t: Tensor | None) -> torch.dtype | None:
    """Its dtype; None for None."""
    return None if t is None else t.dtype


def name(value: Tensor | torch.dtype | None) -> Any:
    """The dtype as ``torch`` names it, for a key; None for None."""
    if value is None:
        return None
    return str(value.dtype if isinstance(value, Tensor) else value).removeprefix("torch.")


def compiled(op: str, key: Hashable, first: Tensor, build: Callable[[], Callable]) -> Callable:
    """The kernel for ``key``, to run on the device of ``first``: for a GPU from the cache on disk, else built.

    Raises:
        GraphCaptureError: during CUDA graph capture.
    """
    if not first.is_cuda:
        return build()  # an emulator needs the PTX of what it runs, which an object file on disk does not hold
    if torch.cuda.is_current_stream_capturing():
        raise backends.GraphCaptureError(
            f"tgl::{op}: the kernel for this call is not compiled yet, which CUDA graph capture forbids; "
            f"call tgl.warmup({op!r}, ...) with such arguments, or the op itself, before the capture"
        )
    return cache.fetch(key, build)


def launcher(function: Callable, *last: Any) -> Callable[..., None]:
    """Calls the compiled ``function``, with ``last`` behind the arguments, on the device of the first, a tensor."""

    def launch(*arguments: Any) -> None:
        first: Tensor = arguments[0]
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                function(*arguments, *last)
        else:
            function(*arguments, *last)

    return launch
