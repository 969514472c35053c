"""Warps that wait for others by spinning on a word of global memory, and what such a word orders."""

import pytest
import torch

from cute_emulator import emulate

cute = pytest.importorskip("cutlass.cute")
kernels_flags = pytest.importorskip("tests.kernels_flags")
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from .kernels import STREAM  # noqa: E402
from .ptx import launch, only  # noqa: E402


def publish(seeds, **options):
    """Run ``Publish`` under several schedules; the results."""
    shelf, flag, dst = (torch.zeros(n, dtype=torch.int32) for n in (4, 1, 4))
    args = [from_dlpack(t, assumed_align=16) for t in (shelf, flag, dst)]
    with emulate("sm_90a") as machine:
        function = cute.compile(kernels_flags.Publish(**options), *args, STREAM)
        for machine.seed in seeds:
            for tensor in (shelf, flag, dst):
                tensor.zero_()
            function(*args, STREAM)
            yield dst.tolist()


def test_a_warp_that_spins_does_not_hold_back_the_copy_that_it_waits_for():
    for result in publish(range(30)):
        assert result == [10, 11, 12, 13]


def test_a_warp_that_spins_does_not_hold_back_the_end_of_the_launch_in_front():
    """Warp 0 waits for that end and raises a flag; warp 1 spins on the flag."""
    wait = "  griddepcontrol.wait;\n  st.release.gpu.global.b32 [%rd0], 1;"
    spin = "AGAIN:\n  ld.acquire.gpu.global.b32 %r3, [%rd0];\n  setp.eq.s32 %p1, %r3, 0;\n  @%p1 bra AGAIN;"
    body = only(0, wait, "A") + only(1, spin, "B")
    for seed in range(4):
        launch(body, torch.zeros(1, dtype=torch.int32), warps=2, overlaps=True, seed=seed)
