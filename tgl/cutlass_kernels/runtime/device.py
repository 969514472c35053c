"""What the host knows of the device of a call: whether a kernel can be compiled, how large it is, how to launch."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What a kernel is compiled by and kept with, by the name of its module.
_PACKAGES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi", "platformdirs": "platformdirs"}
EMULATED_MULTIPROCESSORS = 4  # few enough that clusters take turns on tiles


@functools.cache
def packages_reason() -> str | None:
    """Why no kernel can be compiled here, or None."""
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            return f"needs the package {package}"
    return None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has; an emulated one a few."""
    if device.type != "cuda":
        return EMULATED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def clusters(device: torch.device, ctas: int) -> int:
    """How many clusters of as many CTAs, each with a multiprocessor of its own, a device has room for."""
    return max(multiprocessors(device) // ctas, 1)


def on_its_device(function: Callable, *last: Any) -> Callable[..., None]:
    """Calls the compiled ``function``, with ``last`` behind the arguments, on the device of the first, a tensor."""

    def launch(*arguments: Any) -> None:
        first: Tensor = arguments[0]
        # Where there is a CUDA tensor, CUDA is initialised, which ``torch.cuda.current_device`` asks first.
        if first.is_cuda and first.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(first.device):
                function(*arguments, *last)
        else:
            function(*arguments, *last)

    return launch
