"""Overlap of consecutive launches for small M (programmatic dependent launch).

On an H200 a launch costs 2 to 3 us in which no kernel runs; overlap hides a part of it: 2 to 4 us of a block on one
token. With thousands of rows, blocks of the next launch occupy room that the running one needs, for 2 to 3 % more time.
So whether a launch may begin early is a property of the launch, not of the kernel: the host enables it where a call has
at most ``FEW_CHOICES`` top-k slots, which is known from a shape. Results are the same to the bit.

Three rules, which all participating kernels follow, keep reads from coming too early and writes from coming too soon:

1. A thread waits (``instructions.wait``) before its first access to global memory. After that wait the previous launch
   has ended and its writes are visible.
2. A thread lets the next launch begin (``instructions.launch_dependents``) after its own wait. So when a launch begins,
   all others have ended except the one right before it.
3. A thread of every launch waits, so launches end in order, and waiting for one is waiting for all before it.

A launch without the attribute begins when all launches before it have ended. A captured graph keeps the attribute as a
kind of edge, so replays follow the same rules.
"""

from __future__ import annotations

FEW_CHOICES = 64  # no gain was measured from 16 tokens with top-8 on


def overlaps(choices: int) -> bool:
    """Return whether a launch for so many top-k slots may begin while the previous one ends."""
    return choices <= FEW_CHOICES
