"""Every checker: a kernel with the bug raises, the same kernel without it does not."""

import pytest
import torch

from cute_emulator import (
    DeadlockError,
    EmulatorError,
    MemoryAccessError,
    RaceError,
    SyncError,
    UnsupportedError,
    emulate,
)

from .ptx import INIT, LOAD, WAIT, check, launch, module, only


# ---- shared memory ----
@pytest.mark.parametrize("width", ["b32", "v2.b32", "v4.b32"])
def test_read_not_ordered_after_a_write(width):
    regs = {"b32": "%r10", "v2.b32": "{%r10, %r11}", "v4.b32": "{%r10, %r11, %r12, %r13}"}[width]
    write = only(0, f"  st.shared.{width} [%r2+64], {regs};", "W")
    read = only(1, f"  ld.shared.{width} {regs}, [%r2+64];", "R")
    check(write + "  bar.sync 0;\n" + read, write + read, RaceError, "race: warp", warps=2)


def test_read_of_each_lanes_own_word():
    body = "  shl.b32 %r3, %r0, 2;\n  and.b32 %r3, %r3, 127;\n  add.s32 %r3, %r3, %r2;\n"
    write, read = only(0, "  st.shared.b32 [%r3+64], %r0;", "W"), only(1, "  ld.shared.b32 %r4, [%r3+64];", "R")
    check(body + write + "  bar.sync 0;\n" + read, body + write + read, RaceError, "not ordered after the", warps=2)


def test_write_not_ordered_after_a_read():
    write, read = only(0, "  st.shared.b32 [%r2+64], %r0;", "W"), only(1, "  ld.shared.b32 %r4, [%r2+64];", "R")
    start = only(0, "  st.shared.b32 [%r2+64], %r0;", "S") + "  bar.sync 0;\n"
    check(start + read + "  bar.sync 0;\n" + write, start + read + write, RaceError, "race: warp", warps=2)


def test_two_words_are_not_one():
    body = only(0, "  st.shared.b32 [%r2+64], %r0;", "A") + only(1, "  st.shared.b32 [%r2+68], %r0;", "B")
    launch(body, warps=2)


def test_barrier_arrive_orders_the_waiter_only():
    produce = only(0, "  st.shared.b32 [%r2+64], %r0;\n  bar.arrive 1, 64;", "A")
    consume = only(1, "  bar.sync 1, 64;\n  ld.shared.b32 %r4, [%r2+64];", "B")
    after = only(0, "  st.shared.b32 [%r2+64], %r0;", "C")
    check(produce + consume, produce + consume + after, RaceError, "race: warp", warps=2)


def test_report_names_both_lines():
    body = only(0, "  st.shared.b32 [%r2+64], %r0;", "W") + only(1, "  ld.shared.b32 %r4, [%r2+64];", "R")
    text = module(body)
    lines = [i for i, x in enumerate(text.split("\n"), 1) if "[%r2+64]" in x]
    with emulate("sm_90a") as machine, pytest.raises(RaceError) as e:
        machine.launch_ptx(text, (), block=(64, 1, 1), smem=1024)
    for line in lines:
        assert f"PTX line {line}" in str(e.value)
    assert "shared memory of CTA (0, 0, 0) [0x440, 0x444)" in str(e.value)


def test_no_detection_on_request():
    body = only(0, "  st.shared.b32 [%r2+64], %r0;", "W") + only(1, "  ld.shared.b32 %r4, [%r2+64];", "R")
    launch(body, warps=2, detect_races=False)


def test_synchronising_accesses_are_not_races():
    flag = only(0, "  st.shared.b32 [%r2+64], 7;\n  st.release.cta.shared.b32 [%r2+128], 1;", "A")
    spin = "SPIN:\n  ld.acquire.cta.shared.b32 %r5, [%r2+128];\n  setp.ne.s32 %p2, %r5, 1;\n  @%p2 bra SPIN;\n"
    clear = only(0, "  st.shared.b32 [%r2+128], 0;", "Z") + "  bar.sync 0;\n"
    read = "  ld.shared.b32 %r4, [%r2+64];"
    check(clear + flag + only(1, spin + read, "B"), clear + flag + only(1, read, "B"), RaceError, "race: ", warps=2)


def test_uninitialised_shared_memory_is_poison_and_a_warning():
    out = torch.zeros(32, dtype=torch.int32)
    body = "  ld.shared.b32 %r4, [%r2+64];\n  mul.wide.s32 %rd1, %r0, 4;\n  add.s64 %rd1, %rd0, %rd1;\n"
    body += "  st.global.b32 [%rd1], %r4;"
    record = launch(body, out)
    assert (out == -1).all()
    assert any("uninitialised shared memory" in w for w in record.warnings)


# ---- lanes of a warp ----
@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.idx.b32 %r4, %r0, 0, 31, -1;",
        "elect.sync _|%p3, -1;",
        "vote.sync.ballot.b32 %r4, %p1, -1;",
        "redux.sync.add.s32 %r4, %r0, -1;",
        "bar.warp.sync -1;",
    ],
)
def test_collective_of_lanes_that_have_branched_away(instruction):
    apart = "  setp.gt.u32 %p1, %r0, 7;\n  @%p1 bra AFTER;\n{inside}\nAFTER:\n{outside}\n"
    mine = instruction.replace("-1;", "255;")
    check(
        apart.format(inside="  " + mine, outside="  " + instruction),
        apart.format(inside="  " + instruction, outside=""),
        SyncError,
        "branched away",
    )


# ---- mbarriers ----
def test_use_before_the_initialisation_is_known():
    init = "  @%p0 mbarrier.init.shared.b64 [%r2], 2;\n"
    use = only(0, "  @%p0 mbarrier.arrive.shared.b64 _, [%r2];", "A") + only(
        1, "  elect.sync _|%p3, -1;\n  @%p3 mbarrier.arrive.shared.b64 _, [%r2];", "B"
    )
    for seed in range(4):
        launch(init + "  bar.sync 0;\n" + use, warps=2, seed=seed)
        with pytest.raises(EmulatorError, match=r"not ordered after its mbarrier.init|not an initialised mbarrier"):
            launch(init + use, warps=2, seed=seed)


def test_initialisation_not_fenced_for_the_asynchronous_proxy():
    src = torch.zeros(64, dtype=torch.uint8)
    rest = LOAD.format(expect=64, size=64) + WAIT
    check(
        INIT + rest,
        INIT.replace("fence.mbarrier_init.release.cluster", "mov.u32 %r9, 0") + rest,
        SyncError,
        "not followed by fence.mbarrier_init",
        src,
    )


def test_more_arrivals_than_expected():
    arrive = "  @%p0 mbarrier.arrive.shared.b64 _, [%r2], {};\n"
    check(INIT + arrive.format(1), INIT + arrive.format(2), SyncError, "2 arrivals with only 1 of 1 pending")


@pytest.mark.parametrize("expect, error", [(32, SyncError), (128, DeadlockError)])
def test_wrong_transaction_bytes(expect, error):
    src = torch.zeros(64, dtype=torch.uint8)
    good, bad = (INIT + LOAD.format(expect=n, size=64) + WAIT for n in (64, expect))
    check(good, bad, error, "more bytes completed than expected|deadlock", src)


def test_deadlock_lists_who_waits_on_what():
    with pytest.raises(DeadlockError) as e:
        launch(INIT + WAIT + only(1, "  bar.sync 3, 64;", "B"), warps=2)
    assert "warp 0 of CTA (0, 0, 0)" in str(e.value)
    assert "1 of 1 arrivals pending" in str(e.value)


def test_wait_skipped_by_a_wrong_parity():
    src = torch.arange(64, dtype=torch.uint8)
    start, read = INIT + LOAD.format(expect=64, size=64), "  ld.shared.b32 %r4, [%r2+256];\n"
    wrong = start + WAIT.replace("%p1, [%r2], 0", "%p1, [%r2], 1") + read
    check(start + WAIT + read, wrong, EmulatorError, "race|deadlock", src)


# ---- proxies and bulk copies ----
STORE = """
  @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2+256], 64;
  @%p0 cp.async.bulk.commit_group;
"""
FILL = "  and.b32 %r3, %r0, 15;\n  shl.b32 %r3, %r3, 2;\n  add.s32 %r3, %r3, %r2;\n  st.shared.b32 [%r3+256], 5;\n"
FENCE = "  fence.proxy.async.shared::cta;\n  bar.sync 0;\n"
DONE = "  @%p0 cp.async.bulk.wait_group.read 0;\n"


def test_missing_proxy_fence():
    out = torch.zeros(16, dtype=torch.int32)
    check(
        FILL + FENCE + STORE + DONE,
        FILL + "  bar.sync 0;\n" + STORE + DONE,
        MemoryAccessError,
        "without fence.proxy.async",
        out,
    )
    launch(FILL + FENCE + STORE + DONE, out)
    assert (out == 5).all()


def test_missing_proxy_fence_as_a_warning():
    """A missing proxy fence only adds to the report."""
    out, copied = torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    copy = (
        "  mul.wide.u32 %rd2, %r0, 4;\n  add.u64 %rd2, %rd1, %rd2;\n  shl.b32 %r4, %r0, 2;\n  add.s32 %r4, %r4, %r2;\n"
    )
    copy += "  setp.lt.u32 %p3, %r0, 16;\n  @%p3 cp.async.ca.shared.global [%r4+256], [%rd2], 4;\n"
    copy += "  cp.async.wait_all;\n"
    source = torch.full((16,), 5, dtype=torch.int32)
    for fill, tensors in ((FILL, (out,)), (copy, (copied, source))):
        record = launch(fill + "  bar.sync 0;\n" + STORE + DONE, *tensors, strict_proxies=False)
        assert (tensors[0] == 5).all()
        assert any("without fence.proxy.async" in warning for warning in record.warnings)
        assert not launch(fill + FENCE + STORE + DONE, *tensors, strict_proxies=False).warnings
        with pytest.raises(MemoryAccessError, match=r"without fence.proxy.async \(emulate\(strict_proxies=False\)"):
            launch(fill + "  bar.sync 0;\n" + STORE + DONE, *tensors)


def test_fence_by_the_reader_after_a_barrier():
    out = torch.zeros(16, dtype=torch.int32)
    launch(only(1, FILL, "F") + "  bar.sync 0;\n  fence.proxy.async.shared::cta;\n" + STORE + DONE, out, warps=2)
    assert (out == 5).all()


def test_store_of_memory_never_written():
    out = torch.zeros(16, dtype=torch.int32)
    check(FILL + FENCE + STORE + DONE, FENCE + STORE + DONE, MemoryAccessError, "never written", out)


def test_overwriting_the_source_of_a_bulk_store():
    out = torch.zeros(16, dtype=torch.int32)
    start, again = FILL + FENCE + STORE, "  bar.sync 0;\n" + FILL
    for seed in range(4):
        launch(start + DONE + again, out, seed=seed)
        with pytest.raises(EmulatorError, match=r"race|without fence.proxy.async"):
            launch(start + again + DONE, out, seed=seed)


def test_exit_before_the_bulk_store_has_read():
    out = torch.zeros(16, dtype=torch.int32)
    assert not launch(FILL + FENCE + STORE + DONE, out).warnings
    record = launch(FILL + FENCE + STORE, out)
    assert any("without a wait_group for its bulk stores" in w for w in record.warnings)


def test_bulk_load_races_with_a_reader():
    src = torch.arange(64, dtype=torch.uint8)
    start, read = INIT + LOAD.format(expect=64, size=64), "  ld.shared.b32 %r4, [%r2+256];\n"
    check(start + WAIT + read, start + read + WAIT, RaceError, "race", src)


# ---- global memory ----
@pytest.mark.parametrize("offset, error", [(124, None), (128, "outside every tensor"), (126, "misaligned")])
@pytest.mark.parametrize("op", ["ld.global.b32 %r4, [%rd0+{}]", "st.global.b32 [%rd0+{}], %r4"])
def test_bounds_and_alignment_of_global_memory(op, offset, error):
    whole = torch.zeros(64, dtype=torch.int32)
    body = f"  {op.format(offset)};"
    if error is None:
        launch(body, whole[:32])
        return
    with pytest.raises(MemoryAccessError, match=error):
        launch(body, whole[:32])  # the next element exists, but not in the tensor that was passed


def test_access_below_a_tensor():
    whole = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(MemoryAccessError, match="outside every tensor"):
        launch("  ld.global.b32 %r4, [%rd0-4];", whole[32:])


def test_registered_memory_is_reachable():
    hidden = torch.full((4,), 9, dtype=torch.int32)
    table = torch.tensor([hidden.data_ptr()])
    out = torch.zeros(1, dtype=torch.int32)
    text = module("  ld.global.b64 %rd2, [%rd0];\n  ld.global.b32 %r4, [%rd2];\n  st.global.b32 [%rd1], %r4;", 2)
    with emulate("sm_90a") as machine:
        with pytest.raises(MemoryAccessError, match=r"outside every tensor .*machine\.register\(tensor\)"):
            machine.launch_ptx(text, (table, out))
        machine.register(hidden)
        machine.launch_ptx(text, (table, out))
    assert out.item() == 9


def test_shared_bounds():
    check(
        "  st.shared.b32 [%r2+8188], 1;",
        "  st.shared.b32 [%r2+8192], 1;",
        MemoryAccessError,
        r"shared store of offsets",
    )


# ---- clusters ----
RANK = "  mov.u32 %r20, %cluster_ctarank;\n  xor.b32 %r21, %r20, 1;\n  mapa.shared::cluster.u32 %r22, %r2, %r21;\n"
SYNC = "  barrier.cluster.arrive.aligned;\n  barrier.cluster.wait.aligned;\n"


def test_cluster_barrier_orders_remote_accesses():
    write, read = "  @%p0 st.shared::cluster.b32 [%r22+64], %r20;\n", "  ld.shared.b32 %r4, [%r2+64];\n"
    good, bad = RANK + SYNC + write + SYNC + read, RANK + SYNC + write + "  bar.sync 0;\n" + read + SYNC
    check(good, bad, RaceError, "race", cluster=2)


def test_relaxed_cluster_arrival_orders_nothing_without_a_fence():
    write, read = "  @%p0 st.shared::cluster.b32 [%r22+64], %r20;\n", "  ld.shared.b32 %r4, [%r2+64];\n"
    relaxed = SYNC.replace("arrive.aligned", "arrive.relaxed.aligned")
    fenced = "  fence.acq_rel.cluster;\n" + relaxed
    check(RANK + SYNC + write + fenced + read, RANK + SYNC + write + relaxed + read, RaceError, "race", cluster=2)


def test_access_not_ordered_before_the_exit_of_its_cta():
    write = "  @%p0 st.shared::cluster.b32 [%r22+64], %r20;\n"
    for seed in range(4):
        launch(RANK + SYNC + write + SYNC, cluster=2, seed=seed)
        with pytest.raises(EmulatorError, match=r"not ordered before its exit|after that CTA has exited"):
            launch(RANK + SYNC + write, cluster=2, seed=seed)


def remote(body):
    """``body`` by the first thread of CTA 1, whose peer exits at once."""
    return f"  setp.eq.s32 %p4, %r20, 1;\n  and.pred %p4, %p4, %p0;\n  @!%p4 bra LEAVE;\n{body}LEAVE:\n"


ARRIVE_LATE = RANK + INIT + SYNC + remote("  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r22];\n")
COMMIT_LATE = (
    RANK + INIT + SYNC
    + remote("  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r22];\n")
)  # fmt: skip


# CTA 0 stays until the arrival has come
STAY = "  setp.ne.s32 %p5, %r20, 0;\n  @%p5 bra GONE;\n" + WAIT + "GONE:\n"


@pytest.mark.parametrize("body, arch", [(ARRIVE_LATE, "sm_90a"), (COMMIT_LATE, "sm_100a")], ids=["arrival", "commit"])
def test_arrival_on_a_cta_that_may_have_exited(body, arch):
    for seed in range(4):
        for strict in (True, False):
            assert not launch(body + STAY, cluster=2, arch=arch, seed=seed, strict_exits=strict).warnings
        with pytest.raises(EmulatorError, match=r"arrival .*exit.* \(emulate\(strict_exits=False\)"):
            launch(body, cluster=2, arch=arch, seed=seed)
        record = launch(body, cluster=2, arch=arch, seed=seed, strict_exits=False)
        assert [w for w in record.warnings if w.startswith("arrival on an mbarrier")]


def test_other_accesses_to_a_cta_that_has_exited_stay_errors():
    write = RANK + SYNC + remote("  st.shared::cluster.b32 [%r22+64], %r20;\n")
    for seed in range(4):
        with pytest.raises(EmulatorError, match=r"not ordered before its exit|after that CTA has exited"):
            launch(write, cluster=2, seed=seed, strict_exits=False)


# ---- launches that begin before the previous one has ended ----
def test_end_without_a_wait_for_the_previous_launch():
    """One warp that waits keeps the launch from its end."""
    body = only(1, "  griddepcontrol.wait;", "A")
    check(body, "", SyncError, "no warp of it has waited", warps=2, overlaps=True)
    launch("")  # one that does not overlap need not wait


@pytest.mark.parametrize("access", ["ld.global.b32 %r4, [%rd0];", "st.global.b32 [%rd0], %r0;"])
def test_access_before_the_wait_is_reported(access):
    for body, early in ((f"  griddepcontrol.wait;\n  {access}", False), (f"  {access}\n  griddepcontrol.wait;", True)):
        record = launch(body, torch.zeros(1, dtype=torch.int32), overlaps=True)
        assert record.overlaps
        assert (record.early is not None) == early
    assert launch(body, torch.zeros(1, dtype=torch.int32)).early is None


def test_letting_the_next_launch_begin_before_the_wait_is_reported():
    last = "  griddepcontrol.wait;\n  griddepcontrol.launch_dependents;"
    for body, at_once in ((last, False), (f"  griddepcontrol.launch_dependents;\n{last}", True)):
        assert (launch(body, overlaps=True).at_once is not None) == at_once
        assert launch(body).at_once is None
    for warp, at_once in ((0, False), (1, True)):  # a warp's own wait counts
        body = only(0, "  griddepcontrol.wait;", "A") + only(warp, "  griddepcontrol.launch_dependents;", "B")
        assert (launch(body, warps=2, overlaps=True).at_once is not None) == at_once


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("timing", ["adversarial", "in_order"])
def test_the_previous_launch_ends_when_nothing_else_can_go_on(timing, overlaps):
    """One warp reads without a wait, the other behind its own: what the first one reads is not there yet."""
    body = (
        only(0, "  ld.global.b32 %r4, [%rd0];\n  st.global.b32 [%rd0+4], %r4;\n  griddepcontrol.wait;\n", "A")
        + only(1, "  griddepcontrol.wait;\n  ld.global.b32 %r4, [%rd0];\n  st.global.b32 [%rd0+8], %r4;\n", "B")
    )  # fmt: skip
    for seed in range(3):
        t = torch.zeros(3, dtype=torch.int32)
        with emulate("sm_90a", seed=seed, timing=timing) as machine:
            machine.front = lambda t=t: t[:1].fill_(7)
            machine.launch_ptx(module(body, 1, "sm_90a"), [t], block=(64, 1, 1), overlaps=overlaps)
        assert t.tolist() == ([7, 0, 7] if overlaps else [0, 0, 0])


def test_rank_outside_the_cluster():
    with pytest.raises(MemoryAccessError, match="outside the cluster"):
        launch("  mapa.shared::cluster.u32 %r22, %r2, 5;\n  st.shared::cluster.b32 [%r22+64], 1;", cluster=2)


# ---- tensor memory ----
ALLOC = only(0, "  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+512], 32;", "A") + (
    "  bar.sync 0;\n  ld.shared.b32 %r30, [%r2+512];\n"
)
FREE = "  bar.sync 0;\n" + only(0, "  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32;", "F")
PUT = "  tcgen05.st.sync.aligned.32x32b.x1.b32 [%r31], {%r0};\n"
GET = "  tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r32}, [%r31];\n"
PUT_DONE, GET_DONE = "  tcgen05.wait::st.sync.aligned;\n", "  tcgen05.wait::ld.sync.aligned;\n"
MINE = "  shl.b32 %r31, %r1, 21;\n  add.s32 %r31, %r31, %r30;\n"


def blackwell(good, bad, error, match, **options):
    check(ALLOC + MINE + good, ALLOC + MINE + bad, error, match, arch="sm_100a", **options)


def test_tensor_memory_leak():
    blackwell(FREE, "", SyncError, "exits with tensor memory still allocated")


def test_tensor_memory_store_not_waited_for():
    blackwell(
        PUT + PUT_DONE + GET + GET_DONE + FREE, PUT + GET + GET_DONE + PUT_DONE + FREE, RaceError, "tensor memory"
    )


def test_tensor_memory_freed_while_in_use():
    blackwell(
        PUT + PUT_DONE + FREE, PUT + FREE.replace("bar.sync 0", "mov.u32 %r9, 0") + PUT_DONE, RaceError, "race", warps=4
    )


def test_tensor_memory_outside_the_allocation():
    out = "  add.s32 %r31, %r31, 32;\n"
    blackwell(
        PUT + PUT_DONE + FREE, out + PUT + PUT_DONE + FREE, MemoryAccessError, r"outside the allocation \(\[0, 32\)\)"
    )


def test_tensor_memory_of_another_warp():
    other = "  mov.u32 %r31, %r30;\n"
    blackwell(PUT + PUT_DONE + FREE, other + PUT + PUT_DONE + FREE, EmulatorError, "may address 32", warps=2)


def test_use_of_a_load_before_its_wait():
    use = "  add.s32 %r33, %r32, 1;\n"
    good, bad = PUT + PUT_DONE + GET + GET_DONE + use + FREE, PUT + PUT_DONE + GET + use + GET_DONE + FREE
    blackwell(good, bad, RaceError, "has not delivered: no tcgen05.wait::ld", strict_loads=True)
    assert not launch(ALLOC + MINE + good, arch="sm_100a").warnings
    assert any("undefined in PTX" in w for w in launch(ALLOC + MINE + bad, arch="sm_100a").warnings)


# ---- wgmma ----
def wgmma(fence=True, wait=True, copy="", early=""):
    """A 64x8x16 product of zeros, by one warpgroup; the accumulator is read afterwards."""
    desc = (
        "  add.s32 %r3, %r2, 1024;\n  shr.u32 %r3, %r3, 4;\n  cvt.u64.u32 %rd2, %r3;\n"
        "  or.b64 %rd2, %rd2, 68720001024;\n"  # leading and stride byte offsets 128, 256
    )
    load = LOAD.format(expect=4096, size=4096).replace("%r2+256", "%r2+1024")
    mma = (
        "  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd2, %rd2, 0, 1, 1, 0, 0;\n"
        "  wgmma.commit_group.sync.aligned;\n"
    )
    return (
        INIT + load + WAIT + desc
        + ("  wgmma.fence.sync.aligned;\n" if fence else "")
        + mma + early
        + ("  wgmma.wait_group.sync.aligned 0;\n" if wait else "")
        + copy + "  add.f32 %f5, %f0, %f1;\n"
    )  # fmt: skip


@pytest.mark.parametrize("bug", [{"fence": False}, {"wait": False}, {"wait": False, "copy": "  mov.b32 %f0, %f2;\n"}])
def test_wgmma_registers(bug):
    src = torch.zeros(4096, dtype=torch.uint8)
    check(wgmma(), wgmma(**bug), RaceError, r"without a wgmma.fence|has not delivered: no wgmma", src, warps=4)


def test_wgmma_accumulators_may_be_copied_before_the_wait():
    src = torch.zeros(4096, dtype=torch.uint8)
    launch(wgmma(early="  mov.b32 %f9, %f0;\n"), src, warps=4)


def test_wgmma_operands_overwritten_before_the_wait():
    src = torch.zeros(4096, dtype=torch.uint8)
    clobber = "  bar.sync 0;\n" + only(3, "  st.shared.b32 [%r2+1024], 1;", "C")
    check(wgmma(copy=clobber), wgmma(early=clobber), RaceError, "race: warp 3", src, warps=4)


# ---- refusals ----
@pytest.mark.parametrize(
    "text, name",
    [
        ("frobnicate.b32 %r4, %r5", "opcode frobnicate.b32"),
        ("add.sideways.s32 %r4, %r5, %r6", "modifier .sideways of add.sideways.s32"),
        ("fma.rn.f32.bf16.f16 %f1, %f2, %f3, %f4", "types of fma.rn.f32.bf16.f16"),
        ("mov.u32 %r4, %nosuch", "special register %nosuch"),
        ("ld.global.b32.v3 %r4, [%rd0]", "modifier .v3"),
    ],
)
def test_unknown_instructions_are_refused_by_name_when_reached(text, name):
    tensor = torch.zeros(4, dtype=torch.int32)
    record = launch(f"  bra PAST;\n  {text};\nPAST:\n", tensor)
    assert [name in refusal for refusal in record.unsupported] == [True] or not record.unsupported
    with pytest.raises(UnsupportedError, match=r"PTX line \d+.*unsupported") as e:
        launch(f"  {text};", tensor)
    assert name in str(e.value)
    assert text in str(e.value)


def test_trap():
    with pytest.raises(EmulatorError, match="trap instruction"):
        launch("  trap;")


@pytest.mark.parametrize(
    "options, match", [({"warps": 33}, "illegal launch"), ({"cluster": 2, "grid": 3}, "not a multiple of the cluster")]
)
def test_illegal_launches(options, match):
    with pytest.raises(SyncError, match=match):
        launch("", **options)


def test_tensors_passed_by_address_only():
    src, out = torch.full((4,), 7, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    text = module("  ld.global.b32 %r4, [%rd0+4];\n  st.global.b32 [%rd1], %r4;", 2)
    with emulate("sm_90a") as machine:
        for value in (7, 8):
            src.fill_(value)
            machine.launch_ptx(text, (src.data_ptr(), out.data_ptr()))
            assert out.item() == value
