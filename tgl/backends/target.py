"""The architecture that a tensor's device counts as: its own, an emulated one, or one that kernels are compiled for."""

from __future__ import annotations

import functools

import torch

from .op_recorder import recorder


class CpuTarget:
    """The architecture that CPU tensors are served for, which ``emulated_device`` and ``compile_only`` set.

    Attributes:
        arch: such as ``"sm_100"``; None for the CPU itself.
        compile_only: whether its kernels are compiled and not launched; otherwise an emulator takes their launches.
    """

    arch: str | None = None
    compile_only = False


cpu_target = CpuTarget()


def device_arch(device: torch.device) -> str:
    """Return ``"sm_90"`` and the like for a CUDA device (also an emulated one), the device type for any other."""
    if device.type == "cuda":
        return cuda_arch(device)
    if device.type == "meta" and recorder.device is not None:
        return device_arch(recorder.device)
    return (cpu_target.arch or device.type) if device.type == "cpu" else device.type


@functools.lru_cache(maxsize=64)
def cuda_arch(device: torch.device) -> str:
    """Return the architecture of a CUDA device, or what to show where there is none."""
    if not torch.cuda.is_available():
        return "no such device here"  # fake tensors: explain still reports what it can
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def capturing(device: torch.device) -> bool:
    """Return whether ``device`` is capturing a CUDA graph; False where CUDA was never initialised."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
