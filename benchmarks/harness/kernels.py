"""Kernels that a call launches on the device, by the profiler."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from harness.timing import L2, Call


class Kernel(NamedTuple):
    """A kernel, copy or fill: its name, how often a call runs it, and microseconds of all its runs."""

    name: str
    count: int
    us: float


def kernels_of(call: Call) -> list[Kernel]:
    """Return the kernels of one call on a cold L2, the longest first."""
    call()
    L2(False).flush()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.device_time)
    made = (Kernel(name, len(times), sum(times)) for name, times in found.items())
    return sorted(made, key=lambda kernel: -kernel.us)
