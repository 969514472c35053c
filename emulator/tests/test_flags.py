"""Warps that wait for others by spinning on a word of global memory, and what such a word orders."""

import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from cute_emulator import DeadlockError, RaceError, emulate

from . import kernels_flags
from .kernels import STREAM
from .ptx import launch, only


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


def test_a_warp_that_spins_does_not_hold_back_the_end_of_the_previous_launch():
    """Warp 0 waits for that end and raises a flag; warp 1 spins on the flag."""
    wait = "  griddepcontrol.wait;\n  st.release.gpu.global.b32 [%rd0], 1;"
    spin = "AGAIN:\n  ld.acquire.gpu.global.b32 %r3, [%rd0];\n  setp.eq.s32 %p1, %r3, 0;\n  @%p1 bra AGAIN;"
    body = only(0, wait, "A") + only(1, spin, "B")
    for seed in range(4):
        launch(body, torch.zeros(1, dtype=torch.int32), warps=2, overlaps=True, seed=seed)


# ---- what a word of global memory orders ----
SPIN = "{label}:\n  {load} %r5, [%rd1{at}];\n  setp.lt.u32 %p2, %r5, {until};\n  @%p2 bra {label};\n"
FENCE = "  fence.acq_rel.{};\n"


def spin(load, label="SPIN", until=1, at=""):
    return SPIN.format(load=load, label=label, until=until, at=at)


def by_rank(first, second):
    """CTA 0 of the grid executes ``first``, the others ``second``, both in one thread."""
    return (
        f"  @!%p0 bra END;\n  mov.u32 %r3, %ctaid.x;\n  setp.ne.s32 %p3, %r3, 0;\n  @%p3 bra OTHER;\n{first}"
        f"  bra END;\nOTHER:\n{second}END:\n"
    )


def hand_over(write, release, acquire, read):
    """CTA 0 writes, another one reads after its flag."""
    return by_rank(f"{write}{release}", f"{acquire}{read}")


WRITE, READ = "  st.global.b32 [%rd0+8], 7;\n", "  ld.global.b32 %r6, [%rd0+8];\n  st.global.b32 [%rd0], %r6;\n"
RELEASES = {
    "st.release": "  st.release.gpu.global.b32 [%rd1], 1;\n",
    "atom.release": "  atom.add.release.gpu.global.u32 %r7, [%rd1], 1;\n",
    "red.acq_rel": "  red.add.acq_rel.gpu.global.u32 [%rd1], 1;\n",
    "fence, st.relaxed": FENCE.format("gpu") + "  st.relaxed.gpu.global.b32 [%rd1], 1;\n",
    "fence, st.volatile": FENCE.format("sys") + "  st.volatile.global.b32 [%rd1], 1;\n",
    "membar, atom": "  membar.gl;\n  atom.add.global.u32 %r7, [%rd1], 1;\n",
}
ACQUIRES = {
    "ld.acquire": spin("ld.acquire.gpu.global.b32"),
    "ld.relaxed, fence": spin("ld.relaxed.gpu.global.b32") + FENCE.format("gpu"),
    "ld.volatile, fence.sc": spin("ld.volatile.global.b32") + "  fence.sc.gpu;\n",
    "ld.relaxed, fence.acquire": spin("ld.relaxed.gpu.global.b32") + "  fence.acquire.gpu;\n",
}
TOO_LITTLE = {
    "relaxed": ("  st.relaxed.gpu.global.b32 [%rd1], 1;\n", ACQUIRES["ld.acquire"]),
    "weak": (RELEASES["st.release"], spin("ld.relaxed.gpu.global.b32")),
    "released to the CTA": ("  st.release.cta.global.b32 [%rd1], 1;\n", ACQUIRES["ld.acquire"]),
    "released to the cluster": ("  red.add.release.cluster.global.u32 [%rd1], 1;\n", ACQUIRES["ld.acquire"]),
    "acquired from the CTA": (RELEASES["st.release"], spin("ld.acquire.cta.global.b32")),
    "a fence of the CTA": (FENCE.format("cta") + "  st.relaxed.gpu.global.b32 [%rd1], 1;\n", ACQUIRES["ld.acquire"]),
    "a fence of the cluster after": (
        RELEASES["st.release"],
        spin("ld.relaxed.gpu.global.b32") + FENCE.format("cluster"),
    ),
    "a fence after the store": (
        "  st.relaxed.gpu.global.b32 [%rd1], 1;\n" + FENCE.format("gpu"),
        ACQUIRES["ld.acquire"],
    ),
}


def run(body, seed=0, grid=2, **options):
    data, flag = torch.zeros(64, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    return launch(body, data, flag, grid=grid, seed=seed, **options)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("acquire", ACQUIRES)
def test_a_released_word_orders(release, acquire):
    for seed in range(3):
        run(hand_over(WRITE, RELEASES[release], ACQUIRES[acquire], READ), seed)


@pytest.mark.parametrize("case", TOO_LITTLE)
def test_a_word_that_is_not_released_or_not_acquired_orders_nothing(case):
    for seed in range(3):
        with pytest.raises(RaceError, match=r"reads global memory, bytes \[8, 12\) .* not ordered after the write by"):
            run(hand_over(WRITE, *TOO_LITTLE[case], READ), seed)


def test_a_release_to_the_cluster_orders_within_it():
    release, acquire = "  st.release.cluster.global.b32 [%rd1], 1;\n", spin("ld.acquire.cluster.global.b32")
    run(hand_over(WRITE, release, acquire, READ), cluster=2)
    with pytest.raises(RaceError, match="global memory"):
        run(hand_over(WRITE, release, acquire, READ))


def test_an_atomic_continues_a_release_and_a_store_ends_it():
    acquire = spin("ld.acquire.gpu.global.b32", until=2)
    first = WRITE + RELEASES["atom.release"]
    wait = spin("ld.relaxed.gpu.global.b32", "WAIT")
    third = "  setp.ne.s32 %p4, %r3, 1;\n  @%p4 bra THIRD;\n" + wait + "{}  bra END;\nTHIRD:\n" + acquire + READ
    add, store = "  atom.add.relaxed.gpu.global.u32 %r7, [%rd1], 1;\n", "  st.relaxed.gpu.global.b32 [%rd1], 2;\n"
    run(by_rank(first, third.format(add)), grid=3)
    with pytest.raises(RaceError, match="global memory"):
        run(by_rank(first, third.format(store)), grid=3)


def test_what_a_warp_acquired_is_handed_on_by_barriers_and_other_words():
    """CTA 0 releases to 1, whose other warp learns of it by a barrier and releases to 2, which reads what 0 wrote."""
    chain = """
  mov.u32 %r3, %ctaid.x;
  setp.eq.s32 %p3, %r3, 1;
  @%p3 bra MIDDLE;
  @!%p0 bra END;
  setp.eq.s32 %p3, %r3, 2;
  @%p3 bra LAST;
"""
    first = chain + WRITE + RELEASES["st.release"] + "  bra END;\n"
    middle = "MIDDLE:\n  setp.ne.s32 %p5, %r1, 0;\n  @%p5 bra MEET;\n" + spin("ld.acquire.gpu.global.b32") + "MEET:\n{}"
    middle += "  setp.ne.s32 %p5, %r0, 32;\n  @%p5 bra END;\n  st.release.gpu.global.b32 [%rd1+4], 1;\n  bra END;\n"
    last = "LAST:\n" + spin("ld.acquire.gpu.global.b32", "LATER", at="+4") + READ + "END:\n"
    run(first + middle.format("  bar.sync 0;\n") + last, grid=3, warps=2)
    for seed in range(3):
        with pytest.raises(RaceError, match="global memory"):
            run(first + middle.format("") + last, seed, grid=3, warps=2)


def grid_barrier(n, release="release", load="ld.acquire.gpu.global.b32"):
    return (
        f"  bar.sync 0;\n  @!%p0 bra MEET{n};\n  atom.add.{release}.gpu.global.u32 %r7, [%rd1], 1;\n"
        + spin(load, f"SPIN{n}", until=4 * n)
        + f"MEET{n}:\n  bar.sync 0;\n"
    )


SWAP = "ONCE:\n  atom.cas.relaxed.gpu.global.b32 %r5, [%rd1], 1, 2;\n  setp.ne.s32 %p2, %r5, {};\n  @%p2 bra ONCE;\n"


def test_a_compare_and_swap_that_fails_is_a_load():
    run(by_rank("  ld.global.b32 %r6, [%rd1];\n", SWAP.format(0)))
    with pytest.raises(RaceError, match="global memory"):
        run(by_rank("  st.global.b32 [%rd1], 0;\n", SWAP.format(0)))


def test_a_warp_that_spins_on_a_compare_and_swap_waits_for_ever(monkeypatch):
    monkeypatch.setattr("cute_emulator.launch.LIVELOCK_STEPS", 2000)
    with pytest.raises(DeadlockError, match="no barrier or copy made progress"):
        run(by_rank("", SWAP.format(1)))


PEER = """
  @%p0 st.shared.b32 [%r2+64], 1;
{0}
  mov.u32 %r8, %cluster_ctarank;
  xor.b32 %r8, %r8, 1;
  mapa.shared::cluster.u32 %r9, %r2, %r8;
  @%p0 st.shared::cluster.b32 [%r9+64], 2;
{1}
  ld.shared.b32 %r8, [%r2+64];
"""


def test_a_barrier_of_the_grid_orders_writes_to_shared_memory_of_a_peer():
    """Four CTAs in two clusters; each writes to its peer's shared memory between two barriers of the grid."""
    start = "  barrier.cluster.arrive.aligned;\n  barrier.cluster.wait.aligned;\n"
    good = PEER.format(grid_barrier(1), grid_barrier(2)) + start
    for seed in range(3):
        run(good, seed, grid=4, cluster=2, warps=2)
        for bad in (
            PEER.format(grid_barrier(1, release="relaxed"), grid_barrier(2)),
            PEER.format(grid_barrier(1), grid_barrier(2, load="ld.relaxed.gpu.global.b32")),
        ):
            with pytest.raises(RaceError, match="shared memory"):
                run(bad + start, seed, grid=4, cluster=2, warps=2)
