"""Races in global memory: planted in small kernels, each beside one whose accesses are ordered or apart."""

import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from cute_emulator import RaceError, emulate, global_races

from . import kernels, kernels_flags
from .ptx import INIT, WAIT, check, launch, only

REPORT = r"global memory, bytes \[\d+, \d+\) of the tensor at .* not ordered after the (read|write) by"


def memory():
    return torch.zeros(4096, dtype=torch.uint8)


def own(step):
    """%rd1 = %rd0 + step * CTA: what each CTA calls its own."""
    return f"  mov.u32 %r3, %ctaid.x;\n  mul.wide.u32 %rd1, %r3, {step};\n  add.u64 %rd1, %rd0, %rd1;\n"


# width of an access in bytes, PTX type, value
ACCESSES = {
    1: ("b8", "%h1"),
    2: ("b16", "%h1"),
    4: ("b32", "%r4"),
    8: ("b64", "%rd4"),
    16: ("v4.b32", "{%r4, %r5, %r6, %r7}"),
    32: ("v8.b32", "{%r4, %r5, %r6, %r7, %r8, %r9, %r10, %r11}"),
}


@pytest.mark.parametrize("width", ACCESSES)
def test_two_ctas_write_the_same_bytes(width):
    kind, value = ACCESSES[width]
    body = own("{}") + f"  mul.wide.u32 %rd2, %r0, {width};\n  add.u64 %rd1, %rd1, %rd2;\n"
    body += f"  st.global.{kind} [%rd1], {value};"
    apart, overlapping = (body.replace("{}", str(n), 1) for n in (32 * width, 31 * width))
    check(apart, overlapping, RaceError, "writes " + REPORT, memory(), grid=2, arch="sm_100a")


@pytest.mark.parametrize("first, then", [("st", "ld"), ("ld", "st"), ("st", "st")])
def test_two_warps(first, then):
    access = {"st": "  st.global.b32 [%rd0+16], %r1;", "ld": "  ld.global.b32 %r4, [%rd0+16];"}
    one, other = only(0, access[first], "A"), only(1, access[then], "B")
    check(one + "  bar.sync 0;\n" + other, one + other, RaceError, REPORT, memory(), warps=2)


def test_two_loads_are_no_race():
    launch("  ld.global.b32 %r4, [%rd0];", memory(), warps=2, grid=3)


def test_a_read_that_a_later_reader_hides():
    """Two warps read, the second of which alone is ordered before the write."""
    read = "  ld.global.b32 %r4, [%rd0+16];"
    readers = only(0, read, "A") + only(1, read, "B")
    meet = "  bar.sync 1, 64;"
    write = only(2, meet + "\n  st.global.b32 [%rd0+16], %r1;", "D")
    ordered = only(0, "  bar.arrive 2, 64;", "E") + only(2, "  bar.sync 2, 64;", "F")
    start = "  @%p0 st.global.b32 [%rd0+16], 5;\n  bar.sync 0;\n"  # from the first write on reads are not listed alone
    for begin in (start, ""):
        body = begin + readers + only(1, "  bar.arrive 1, 64;", "C")
        check(body + ordered + write, body + write, RaceError, REPORT, memory(), warps=3)


def test_reads_beyond_the_list(monkeypatch):
    monkeypatch.setattr(global_races, "_LISTED", 3)
    reads = "".join(f"  ld.global.b32 %r4, [%rd0+{16 * i}];\n" for i in range(10))
    body = only(0, reads, "A") + "{}" + only(1, "  st.global.b32 [%rd0+32], %r1;", "B")
    check(body.format("  bar.sync 0;\n"), body.format(""), RaceError, REPORT, memory(), warps=2)


def test_atomics_do_not_race_with_each_other():
    atomic = "  atom.add.global.u32 %r4, [%rd0], 1;\n  red.max.gpu.global.u32 [%rd0], 1;\n"
    strong = "  st.relaxed.gpu.global.b32 [%rd0], 1;\n  ld.volatile.global.b32 %r4, [%rd0];\n"
    weak = "  ld.global.b32 %r4, [%rd0];\n"
    check(atomic + strong, atomic + weak, RaceError, REPORT, memory(), grid=2)


def test_atomics_of_vectors_and_of_lanes():
    body = own("{}") + "  mul.wide.u32 %rd2, %r0, 16;\n  add.u64 %rd1, %rd1, %rd2;\n"
    reduce = "  red.relaxed.gpu.global.add.v4.f32 [%rd1], {%f1, %f1, %f1, %f1};\n"
    read = "  ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd1];\n"
    body += "  mov.f32 %f1, 0f3F800000;\n" + reduce
    good, bad = body.replace("{}", "0", 1), body.replace("{}", "0", 1) + read
    check(good, bad, RaceError, REPORT, memory(), grid=2)


# ---- copies ----
STORE = """
  @%p0 st.shared.v4.b32 [%r2+256], {%r0, %r0, %r0, %r0};
  @%p0 fence.proxy.async.shared::cta;
  @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2+256], 16;
  @%p0 cp.async.bulk.commit_group;
  cp.async.bulk.wait_group{} 0;
"""


@pytest.mark.parametrize("instruction", ["cp.async.bulk", "cp.reduce.async.bulk"])
def test_a_bulk_store_is_read_after_its_source_was_alone(instruction):
    store = STORE
    if instruction != "cp.async.bulk":
        store = store.replace("cp.async.bulk.global", "cp.reduce.async.bulk.global").replace(
            "bulk_group [", "bulk_group.add.u32 ["
        )
    read = "  bar.sync 0;\n  ld.global.b32 %r4, [%rd0+8];"
    good, bad = (store.replace("{}", wait) + read for wait in ("", ".read"))
    match = r"bulk store of warp 0 .*\(complete after a wait_group without .read\)"
    check(good, bad, RaceError, match, memory(), warps=2)


def test_a_wait_for_later_stores_covers_earlier_ones():
    """The first store is waited for by ``.read``, and both by the wait after the second one."""
    store, more = STORE.replace("{}", ".read"), STORE.replace("{}", "").replace("[%rd0]", "[%rd0+64]")
    read = "  ld.global.b32 %r4, [%rd0+8];"
    for seed in range(6):
        launch(store + more + "  bar.sync 0;\n" + read, memory(), warps=2, seed=seed)


def test_a_bulk_store_writes_later_than_it_reads():
    """After a wait for the read, and overwriting of what was read, some schedule has not written yet."""
    seen = set()
    body = STORE.replace("{}", ".read").replace("{%r0, %r0, %r0, %r0}", "{%r4, %r4, %r4, %r4}")
    body = "  mov.u32 %r4, 7;\n" + body + "  ld.global.b32 %r5, [%rd0];\n  st.global.b32 [%rd0+64], %r5;\n"
    for seed in range(12):
        tensor = torch.zeros(32, dtype=torch.int32)
        launch(body, tensor, seed=seed, detect_races=False)
        assert tensor[:4].tolist() == [7] * 4
        seen.add(tensor[16].item())
    assert seen == {0, 7}


def test_a_bulk_load_of_what_another_warp_writes():
    write = only(1, "  st.global.b32 [%rd0+32], %r1;\n", "W")
    load = (
        "  @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;\n"
        "  @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+256], [%rd0], 64, [%r2];\n"
    )
    first, then = INIT + write + "  bar.sync 0;\n" + load + WAIT, INIT + load + WAIT + write
    check(first, INIT + write + load + WAIT, RaceError, REPORT, memory(), warps=2)
    early = INIT + load + write + WAIT
    check(then, early, RaceError, REPORT, memory(), warps=2)


def test_cp_async_of_what_another_warp_writes():
    write = only(1, "  st.global.b32 [%rd0], %r1;\n", "W")
    load = only(0, "  cp.async.ca.shared.global [%r2+256], [%rd0], 16;\n  cp.async.wait_all;\n", "C")
    check(load + "  bar.sync 0;\n" + write, load + write, RaceError, REPORT, memory(), warps=2)


@pytest.mark.parametrize("seed", range(3))
def test_a_published_store_that_was_waited_for_by_read_alone(seed):
    """The report names both lines of the kernel's source."""
    tensors = [torch.zeros(n, dtype=torch.int32) for n in (4, 1, 4)]
    args = [from_dlpack(t, assumed_align=16) for t in tensors]
    with emulate("sm_90a", seed=seed) as machine:
        function = cute.compile(kernels_flags.Publish(read=True), *args, kernels.STREAM)
        with pytest.raises(RaceError, match=REPORT) as report:
            function(*args, kernels.STREAM)
    with open(kernels_flags.__file__) as file:
        lines = {i for i, line in enumerate(file, 1) if "inline_ptx" in line or "= shelf[i]" in line}
    for line in lines:
        assert f"kernels_flags.py:{line})" in str(report.value)
    assert len(machine.launches) == 1


@pytest.mark.parametrize("seed", range(3))
def test_tiles_by_tma_that_overlap(seed):
    """``Double`` gives each CTA a tile of its own; a kernel for one column of tiles more writes some tile twice."""
    src = torch.arange(64.0 * 64).view(64, 64)
    dst = torch.empty(64, 64)
    shifted = torch.as_strided(dst, (64, 64), (32, 1))  # rows overlap by half
    with emulate("sm_90a", seed=seed):
        for out in (dst, shifted):
            args = [*(from_dlpack(t, assumed_align=16) for t in (src, out)), kernels.STREAM]
            function = cute.compile(kernels.Double(), *args)
            if out is dst:
                function(*args)
                assert torch.equal(dst, 2 * src)
            else:
                with pytest.raises(RaceError, match="writes " + REPORT):
                    function(*args)
