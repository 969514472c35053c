"""Peak memory of a call in PyTorch's CPU allocator."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_memory(call: Callable[[], object]) -> int:
    """Bytes held at the highest point of a call that has been made before, over those at its start."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    current = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            highest = max(highest, current)
    return highest
