"""Launches that begin while the one in front of them ends, where there are few choices (programmatic dependent launch).

On an H200 a launch costs 2 to 3 us that no kernel uses, of which overlap takes a part: 2 to 4 us of a block on one
token. With thousands of rows blocks of the next launch stand in the way of the one at work, for 2 to 3 % more time. So
whether a launch may begin early is a fact of each launch, not of a kernel: the host says so where a call has at most
``FEW_CHOICES`` choices, by a shape, and the bits are those of a launch that begins behind the end.

That nobody reads too early or overwrites what is still read follows from three rules of all kernels that take part:

1. A thread waits, ``instructions.wait``, before its first access to global memory. Behind that wait the launch in front
   has ended and what it wrote is visible, so the kernel meets the memory that it would have met behind that end.
2. A thread lets the next launch begin, ``instructions.launch_dependents``, behind its own wait. So when a launch
   begins, all launches have ended but itself and the one in front of it.
3. A thread of every launch waits, so launches end in order, and the wait for one is a wait for all before it.

A launch without the attribute begins when all launches before it have ended. A captured graph keeps the attribute as a
kind of edge, so that replays follow the same rules.
"""

from __future__ import annotations

FEW_CHOICES = 64  # from 16 tokens of 8 choices on nothing was won


def overlaps(choices: int) -> bool:
    """Whether a launch for so many choices may begin while the one in front of it ends."""
    return choices <= FEW_CHOICES
