"""Producers that lap their consumers: what a wait on an mbarrier teaches the waiter."""

import pytest

from cute_emulator import EmulatorError, RaceError

from .ptx import INIT, WAIT, check, only

RING = """
  @%p0 mbarrier.init.shared.b64 [%r2], 1;
  @%p0 mbarrier.init.shared.b64 [%r2+8], 1;
  @%p0 mbarrier.init.shared.b64 [%r2+16], 1;
  @%p0 mbarrier.init.shared.b64 [%r2+24], 1;
  @%p0 fence.mbarrier_init.release.cluster;
  bar.sync 0;
"""


def ring(rounds, stages, wait=True, late=False):
    """Warp 0 hands ``rounds`` records to warp 1 through ``stages`` words; full barriers at 0, empty ones at 16.

    ``wait``: the producer waits until a word is empty; ``late``: the consumer gives it back before it reads it.
    """
    produce = consume = ""
    for n in range(rounds):
        s, parity = n % stages, n // stages & 1
        free = (
            f"E{n}:\n  mbarrier.try_wait.parity.shared.b64 %p1, [%r2+{16 + 8 * s}], {parity ^ 1};\n  @!%p1 bra E{n};\n"
        )
        write = f"  st.shared.b32 [%r2+{64 + 4 * s}], {n};\n  mbarrier.arrive.shared.b64 _, [%r2+{8 * s}];\n"
        produce += (free if wait else "") + write
        full = f"F{n}:\n  mbarrier.try_wait.parity.shared.b64 %p1, [%r2+{8 * s}], {parity};\n  @!%p1 bra F{n};\n"
        read = f"  ld.shared.b32 %r4, [%r2+{64 + 4 * s}];\n"
        give = f"  mbarrier.arrive.shared.b64 _, [%r2+{16 + 8 * s}];\n"
        consume += full + (give + read if late else read + give)
    lane = "  setp.ne.s32 %p3, %r5, 0;\n  @%p3 bra {};\n"
    return (
        RING + "  and.b32 %r5, %r0, 31;\n"
        + only(0, lane.format("A") + produce, "A")
        + only(1, lane.format("B") + consume, "B")
        + "  bar.sync 0;\n"
    )  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("laps", [2, 3, 4, 12, 13])
@pytest.mark.parametrize("bug", [{"wait": False}, {"late": True}], ids=["no wait", "early release"])
def test_a_producer_that_laps_its_consumer(stages, laps, bug):
    rounds = stages * laps
    check(ring(rounds, stages), ring(rounds, stages, **bug), EmulatorError, r"race: warp|, missed: ", warps=2)


def test_a_producer_may_run_ahead_by_all_its_stages():
    check(ring(2, 2, wait=False), ring(3, 2, wait=False), EmulatorError, "race: warp|, missed: ", warps=2)


def test_a_phase_that_a_waiter_knows_of_otherwise():
    """The consumer skips the first wait, ordered by a named barrier, and waits for the second phase."""
    first = only(0, "  @%p0 mbarrier.arrive.shared.b64 _, [%r2];\n", "A") + "  bar.sync 0;\n"
    second = only(0, "  st.shared.b32 [%r2+64], 1;\n  @%p0 mbarrier.arrive.shared.b64 _, [%r2];\n", "B")
    wait = WAIT.replace("%p1, [%r2], 0", "%p1, [%r2], 1")
    read = only(1, wait + "  ld.shared.b32 %r4, [%r2+64];\n", "C")
    unaware = first.replace("bar.sync 0", "mov.u32 %r9, 0")
    check(INIT + first + second + read, INIT + unaware + second + read, RaceError, "race: warp", warps=2)
