"""The model of time on kernels whose cycles can be counted by hand, from the costs of a chip."""

import pytest
import torch

from cute_emulator import DeadlockError, UnsupportedError, emulate
from cute_emulator.clocked import costs_of
from cute_emulator.clocked import launch as clocked_launch
from cute_emulator.codegen import Generator
from cute_emulator.parser import parse_module

from .ptx import INIT, LOAD, WAIT, launch, module, only

COSTS = costs_of("sm_90")
ADD = 4  # cycles until a sum can be read
START = 1024  # of dynamic shared memory


def cycles(body, *tensors, **options):
    return launch(body, *tensors, timing="clocked", detect_races=False, **options).cycles


def added(n, apart=False):
    """``n`` sums, each of the one before, or ``apart`` from each other."""
    return "".join(f"  add.u32 %r{10 + i % 40 if apart else 3}, %r{0 if apart else 3}, 1;\n" for i in range(n))


def test_sums_that_wait_for_each_other_take_their_latency():
    assert cycles(added(30)).total - cycles(added(10)).total == 20 * ADD


def test_sums_apart_take_an_issue_slot():
    assert cycles(added(30, apart=True)).total - cycles(added(10, apart=True)).total == 20


@pytest.mark.parametrize("warps, more", [(2, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_every_fourth_warp_issues_by_the_same_port(warps, more):
    def longer(n):
        return cycles(added(30, apart=True), warps=n).total - cycles(added(10, apart=True), warps=n).total

    assert longer(warps) - longer(1) == 20 * more


def test_a_barrier_lets_a_warp_go_on_when_the_last_has_come():
    def run(n):
        found = cycles(only(1, added(n), "A") + "  bar.sync 0;\n", warps=2)
        return found.total, found.warps[(0, 0, 0), 0].waits["bar.sync 0"]

    (total, waited), (longer, more) = run(20), run(50)
    assert longer - total == more - waited == 30 * ADD
    assert waited > 20 * ADD


def test_a_load_takes_its_latency_and_its_bytes():
    def run(size):
        source = torch.arange(size, dtype=torch.uint8)
        found = cycles(INIT + LOAD.format(expect=size, size=size) + WAIT, source)
        return found.total, found.warps[(0, 0, 0), 0].waits[f"mbarrier {START:#x}"]

    (total, waited), (longer, more) = run(1024), run(4096)
    assert longer - total == more - waited == 3072 / COSTS.l2
    assert waited == pytest.approx(COSTS.load + 1024 / COSTS.l2 + COSTS.wake, abs=30)  # less what it issued meanwhile


@pytest.mark.parametrize("apart, times", [(0, 1), (4096, 2)])
def test_data_that_two_multiprocessors_request_is_sent_once(apart, times):
    source = torch.zeros(8192, dtype=torch.uint8)
    own = f"  mov.u32 %r3, %ctaid.x;\n  mul.wide.u32 %rd1, %r3, {apart};\n  add.u64 %rd0, %rd0, %rd1;\n"
    load = own + INIT + LOAD.format(expect=4096, size=4096) + WAIT
    assert cycles(load, source, grid=2).total - cycles(load, source).total == (times - 1) * 4096 / COSTS.l2


def test_other_timings_have_no_clocks():
    (kernel,) = parse_module(module(INIT + added(3))).kernels.values()
    assert launch(INIT).cycles is None
    assert "spend" not in Generator(kernel).source()
    assert "spend" in Generator(kernel, clocked=True).source()


COPY = """
  mul.wide.u32 %rd2, %r0, 16;
  add.u64 %rd2, %rd0, %rd2;
  shl.b32 %r4, %r0, 4;
  add.s32 %r4, %r4, %r2;
"""


def copies(n, end):
    """``n`` times 512 bytes by the lanes of a warp, and what waits for them."""
    return (
        COPY + "".join(f"  cp.async.cg.shared.global [%r4+{512 * i}], [%rd2+{512 * i}], 16;\n" for i in range(n)) + end
    )


@pytest.mark.parametrize("end", ["cp.async.wait_all", "cp.async.commit_group;\n  cp.async.wait_group 0"])
def test_copies_by_lanes_take_their_latency_and_their_bytes(end):
    def run(n):
        found = cycles(copies(n, f"  {end};\n"), torch.zeros(8192, dtype=torch.uint8))
        return found.total, found.warps[(0, 0, 0), 0].waits["cp.async.wait_group"]

    (total, waited), (longer, more) = run(2), run(8)
    issued = 6  # the others
    assert longer - total == 6 * 512 / COSTS.l2
    assert longer - total == more - waited + issued
    assert waited == pytest.approx(COSTS.copy + 1024 / COSTS.l2, abs=30)


def test_a_wait_for_older_copies_does_not_wait_for_later_ones():
    def run(left):
        body = copies(1, "  cp.async.commit_group;\n") + copies(8, "  cp.async.commit_group;\n")
        return cycles(body + f"  cp.async.wait_group {left};\n", torch.zeros(8192, dtype=torch.uint8)).total

    assert run(0) - run(1) == pytest.approx(8 * 512 / COSTS.l2, abs=20)


def test_copies_by_lanes_arrive_when_they_are_done():
    init = "  @%p0 mbarrier.init.shared.b64 [%r2+8128], 32;\n  bar.sync 0;\n"
    arrive = "  cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+8128];\n"
    wait = "AGAIN:\n  mbarrier.try_wait.parity.shared.b64 %p1, [%r2+8128], 0;\n  @!%p1 bra AGAIN;\n"

    def run(n):
        found = cycles(init + copies(n, arrive + wait), torch.zeros(8192, dtype=torch.uint8))
        return found.total, found.warps[(0, 0, 0), 0].waits[f"mbarrier {START + 8128:#x}"]

    (total, waited), (longer, _) = run(2), run(8)
    assert longer - total == 6 * 512 / COSTS.l2
    assert waited == pytest.approx(COSTS.copy + 1024 / COSTS.l2 + COSTS.wake, abs=30)


def test_instructions_without_a_cost_are_refused():
    mma = (
        "  mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f0, %f1, %f2, %f3}, {%r3, %r4, %r5, %r6}, {%r7, %r8}, "
    )
    with pytest.raises(UnsupportedError, match=r"mma\.sync.*'clocked'"):
        cycles(mma + "{%f0, %f1, %f2, %f3};\n")


def test_a_wait_for_memory_that_is_never_written_ends(monkeypatch):
    monkeypatch.setattr(clocked_launch, "LIVELOCK_STEPS", 100)
    poll = "AGAIN:\n  ld.acquire.gpu.global.b32 %r3, [%rd0];\n  setp.eq.s32 %p1, %r3, 0;\n  @%p1 bra AGAIN;\n"
    with pytest.raises(DeadlockError, match="livelock"):
        cycles(poll, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(DeadlockError, match="every warp is blocked"):
        cycles(INIT + WAIT)


def test_a_chip_without_costs_is_refused():
    with pytest.raises(ValueError, match="sm_90, sm_100, not of sm_120"), emulate("sm_120", timing="clocked"):
        pass
