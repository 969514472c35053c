"""Host-side facts about the device of a call: whether a kernel can be compiled, its size, and how to launch."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Packages that compile and cache kernels, by the name of their module.
_PACKAGES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi", "platformdirs": "platformdirs"}
EMULATED_MULTIPROCESSORS = 4  # few enough that clusters take turns on tiles


@functools.cache
def packages_reason() -> str | None:
    """Return why no kernel can be compiled here, or None."""
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            return f"needs the package {package}"
    return None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device, or a small number for an emulated one."""
    if device.type != "cuda":
        return EMULATED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def clusters(device: torch.device, ctas: int) -> int:
    """Return how many clusters of so many CTAs, each CTA with a multiprocessor of its own, fit on a device."""
    return max(multiprocessors(device) // ctas, 1)


def on_its_device(function: Callable, *last: Any) -> Callable[..., None]:
    """Wrap the compiled ``function`` to run with ``last`` appended, on the device of its first argument, a tensor."""

    def launch(*arguments: Any) -> None:
        first: Tensor = arguments[0]
        # With a CUDA tensor CUDA is initialised, which ``torch.cuda.current_device`` would check first.
        if first.is_cuda and first.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(first.device):
                function(*arguments, *last)
        else:
            function(*arguments, *last)

    return launch
