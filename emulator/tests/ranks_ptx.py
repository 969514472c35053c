"""Launches of hand-written PTX by several ranks, for tests."""

import torch

from cute_emulator import Ranks, active, emulate

from .ptx import module

DATA, FLAGS = 64, 4


def exchange(body, count=2, warps=1, **options):
    """Every rank runs ``body``, on %rd0 its data and %rd1 its flags, %rd2 the data and %rd3 the flags of the next rank.

    %r10 is the rank, %rd4 a tensor of its own, %rd5 the data and %rd6 the flags of all ranks at multicast addresses.

    Args:
        body: PTX, or that of each launch.
        options: of ``emulate``.
    Returns:
        The tensors of the ranks, the symmetric data and the machine.
    """
    bodies = [body] if isinstance(body, str) else body
    ranks = Ranks(count)
    data, flags = ranks.symmetric(DATA, dtype=torch.int32), ranks.symmetric(FLAGS, dtype=torch.int32)
    own = [torch.full((DATA,), -1, dtype=torch.int32) for _ in range(count)]
    numbers = [torch.tensor([rank], dtype=torch.int32) for rank in range(count)]
    prologue = "  ld.global.b32 %r10, [%rd7];\n"

    def step(rank):
        after = (rank + 1) % count
        tensors = data[rank], flags[rank], data[after], flags[after], own[rank], data.multicast, flags.multicast
        for text in bodies:
            active().launch_ptx(module(prologue + text, 8), [*tensors, numbers[rank]], block=(32 * warps, 1, 1))

    with emulate("sm_90a", **options) as machine:
        ranks.run(step)
    return own, data, machine
