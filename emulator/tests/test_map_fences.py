"""Tensor maps written by the kernel that uses them: every proxy fence in between, planted to be missing."""

import pytest
import torch

from cute_emulator import MemoryAccessError, RaceError, UnsupportedError, cache

from .ptx import INIT, WAIT, check, launch, module, only
from .test_tensor_map import descriptor

# %rd0 a finished map, %rd1 where the kernel puts its own, %rd2 the output of 16 words
BY_STORES = """
  shl.b32 %r3, %r0, 2;
  and.b32 %r3, %r3, 127;
  cvt.u64.u32 %rd5, %r3;
  add.s64 %rd6, %rd0, %rd5;
  add.s64 %rd7, %rd1, %rd5;
  ld.global.b32 %r4, [%rd6];
  st.global.b32 [%rd7], %r4;
"""
BY_VECTORS = """
  @%p0 ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd0{0}];
  @%p0 st.global.v4.b32 [%rd1{0}], {{%r4, %r5, %r6, %r7}};
"""
REPLACED = """
  ld.global.b64 %rd5, [%rd0];
  tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd5;
"""
STAGED = """
  shl.b32 %r3, %r0, 2;
  and.b32 %r3, %r3, 127;
  cvt.u64.u32 %rd5, %r3;
  add.s64 %rd6, %rd0, %rd5;
  add.s32 %r3, %r3, %r2;
  ld.global.b32 %r4, [%rd6];
  st.shared.b32 [%r3+128], %r4;
  add.s32 %r5, %r2, 128;
  tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r5], 0, 16;
"""
COPY = "  tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%r5], 128;\n"
WRITES = {
    "stores": BY_STORES,
    "vectors": "".join(BY_VECTORS.format(f"+{o}" if o else "") for o in range(0, 128, 16)),
    "replace": REPLACED,
    "atomic": "  @%p0 ld.global.b64 %rd5, [%rd0];\n  @%p0 atom.global.exch.b64 %rd6, [%rd1], %rd5;\n",
}
RELEASE = "  fence.proxy.tensormap::generic.release.gpu;\n"
BARRIER = "  bar.sync 0;\n"
ACQUIRE = "  fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;\n"
LOAD = """
  elect.sync _|%p3, -1;
  mov.u32 %r8, 0;
  add.s32 %r9, %r2, 1024;
  @%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 64;
  @%p3 cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r9], [%rd1, {%r8}], [%r2];
"""
OUT = """
  and.b32 %r3, %r0, 15;
  shl.b32 %r3, %r3, 2;
  add.s32 %r9, %r3, %r2;
  ld.shared.b32 %r4, [%r9+1024];
  cvt.u64.u32 %rd5, %r3;
  add.s64 %rd6, %rd2, %rd5;
  st.global.b32 [%rd6], %r4;
"""
STORE = """
  elect.sync _|%p3, -1;
  mov.u32 %r8, 0;
  @%p3 cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%rd1, {%r8}], [%r2+1024];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
"""


def tensors():
    """A map of 16 words, room for another (which has all but its address, for ``replace``), an output, the words."""
    src = torch.arange(1, 17, dtype=torch.int32)
    made, room = torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8)
    raw = bytearray(descriptor("s32", [16], [], [16], base=src.data_ptr()))
    made[:64] = torch.frombuffer(raw, dtype=torch.uint8)
    room[8:64] = made[8:64]
    assert made.data_ptr() % 64 == room.data_ptr() % 64 == src.data_ptr() % 16 == 0
    return made, room, torch.zeros(16, dtype=torch.int32), src


def kernel(write, release=RELEASE, barrier=BARRIER, acquire=ACQUIRE, use=LOAD + WAIT + OUT):
    """Warp 0 writes the map, warp 1 loads through it."""
    return INIT + only(0, write + release, "A") + barrier + only(1, acquire + use, "B") + BARRIER


MISSING = {
    "release": (dict(release=""), MemoryAccessError, "without fence.proxy.tensormap::generic.release"),
    "acquire": (dict(acquire=""), MemoryAccessError, "without fence.proxy.tensormap::generic.acquire"),
    "both": (dict(release="", acquire=""), MemoryAccessError, "without fence.proxy.tensormap::generic.release"),
    "acquire of another address": (
        dict(acquire=ACQUIRE.replace("%rd1", "%rd0")),
        MemoryAccessError, "without fence.proxy.tensormap::generic.acquire"
    ),
    "acquire before the release": (
        dict(release=BARRIER + RELEASE, barrier="", acquire=ACQUIRE + BARRIER + BARRIER),
        MemoryAccessError, "without fence.proxy.tensormap::generic.(release|acquire)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("write", WRITES)
def test_a_map_written_in_global_memory(write, missing):
    args = tensors()
    changes, error, match = MISSING[missing]
    check(kernel(WRITES[write]), kernel(WRITES[write], **changes), error, match, *args, warps=2)


@pytest.mark.parametrize("write", WRITES)
def test_a_map_with_its_fences_is_used_as_written(write):
    for detect_races in (True, False):
        *args, out, src = tensors()
        launch(kernel(WRITES[write]), *args, out, src, warps=2, detect_races=detect_races)
        assert torch.equal(out, src)


@pytest.mark.parametrize("missing", ["release", "acquire", "both"])
def test_fences_without_race_detection(missing):
    changes, error, match = MISSING[missing]
    with pytest.raises(error, match=match):
        launch(kernel(BY_STORES, **changes), *tensors(), warps=2, detect_races=False)


def test_no_synchronisation_between_the_fences():
    """The order of the fences in one run is no order: warp 1 spins on a flag that synchronises nothing."""
    flag = "  st.relaxed.gpu.global.b32 [%rd2], -1;\n"
    spin = "SPIN:\n  ld.relaxed.gpu.global.b32 %r4, [%rd2];\n  setp.ne.s32 %p2, %r4, -1;\n  @%p2 bra SPIN;\n"
    bad = kernel(BY_STORES, release=RELEASE + flag, barrier="", acquire=spin + ACQUIRE)
    match = "no synchronisation orders the acquiring fence after the releasing one"
    check(kernel(BY_STORES), bad, RaceError, match, *tensors(), warps=2)


@pytest.mark.parametrize("race", [True, False])
def test_a_map_edited_in_shared_memory(race):
    *args, out, src = tensors()
    body = kernel(STAGED, release=COPY)
    launch(body, *args, out, src, warps=2, detect_races=race)
    assert torch.equal(out, src)
    with pytest.raises(MemoryAccessError, match=r"without fence.proxy.tensormap::generic.acquire of that address"):
        launch(kernel(STAGED, release=COPY, acquire=""), *tensors(), warps=2, detect_races=race)


def test_a_map_edited_in_shared_memory_by_two_warps():
    """The copy to global memory reads what both wrote: they need a barrier, as for any shared memory."""
    fill, edit = STAGED.split("  add.s32 %r5")
    edit = "  add.s32 %r5" + edit + COPY
    after = BARRIER + only(1, ACQUIRE + LOAD + WAIT + OUT, "C") + BARRIER
    good = INIT + only(0, fill, "A") + BARRIER + only(1, edit, "B") + after
    bad = INIT + only(0, fill, "A") + only(1, edit, "B") + after
    check(good, bad, RaceError, "race: warp", *tensors(), warps=2)


def test_one_warp_needs_both_fences_too():
    def body(fences):
        return INIT + only(0, BY_STORES + fences + LOAD + WAIT + OUT, "A")

    for fences in ("", RELEASE, ACQUIRE, ACQUIRE + RELEASE):
        check(body(RELEASE + ACQUIRE), body(fences), MemoryAccessError, "without fence.proxy.tensormap", *tensors())


def test_every_new_version_needs_its_fences():
    again = BY_STORES + RELEASE + ACQUIRE
    load = LOAD + WAIT
    second = load.replace("WAITING", "AGAIN").replace("%p1, [%r2], 0", "%p1, [%r2], 1")

    def body(fences):
        return INIT + only(0, again + load + BY_STORES + fences + second + OUT, "A")

    check(body(RELEASE + ACQUIRE), body(""), MemoryAccessError, "without fence.proxy", *tensors())
    check(body(RELEASE + ACQUIRE), body(RELEASE), MemoryAccessError, r"generic.acquire of that", *tensors())


def test_another_warp_may_acquire():
    start = INIT + only(0, BY_STORES + RELEASE, "A") + BARRIER
    use = only(1, LOAD + WAIT + OUT, "C") + BARRIER
    good = start + only(0, ACQUIRE, "B") + BARRIER + use
    check(good, start + only(0, ACQUIRE, "B") + use, MemoryAccessError, "generic.acquire of that", *tensors(), warps=2)


def test_stores_through_a_map():
    fill = "  and.b32 %r3, %r0, 15;\n  shl.b32 %r3, %r3, 2;\n  add.s32 %r3, %r3, %r2;\n  st.shared.b32 [%r3+1024], 7;\n"
    fill += "  fence.proxy.async.shared::cta;\n"

    def body(fences):
        return fill + BY_STORES + fences + STORE

    args = tensors()
    check(body(RELEASE + ACQUIRE), body(RELEASE), MemoryAccessError, "generic.acquire of that address", *args)
    assert (args[-1] == 7).all()


def test_a_map_made_before_the_launch_needs_none():
    *args, out, src = tensors()
    body = INIT + (LOAD + WAIT + OUT).replace("[%rd1", "[%rd0") + BY_STORES
    launch(body, *args, out, src)
    assert torch.equal(out, src)


def test_fences_without_direction_or_proxy_are_refused():
    for fence in ("fence.proxy.tensormap::generic.gpu", "fence.proxy.tensormap.release.gpu"):
        with pytest.raises(UnsupportedError, match=r"fence\.proxy"):
            launch(f"  {fence};\n")


# ---- which kernels are watched ----
def watched(lines):
    copy = "  cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%rd9, {{%r8}}], [%r2];\n"
    text = module(lines + copy.format(), 2)
    return cache.get_program(text, "kernel").maps_in_memory


@pytest.mark.parametrize(
    "address, in_memory",
    [
        ("mov.b64 %rd9, a0;", False),
        ("mov.b64 %rd8, a0; cvta.param.u64 %rd7, %rd8; add.s64 %rd9, %rd7, 64;", False),
        ("mov.b64 %rd8, a0; mov.b64 %rd7, a1; selp.b64 %rd9, %rd8, %rd7, %p0;", False),
        ("mov.b64 %rd8, a0; selp.b64 %rd9, %rd8, %rd0, %p0;", True),
        ("mov.b64 %rd9, a0; @%p0 mov.b64 %rd9, %rd0;", True),
        ("mov.b64 %rd9, %rd0;", True),
        ("ld.param.b64 %rd9, [a0];", True),
    ],
)
def test_maps_that_are_parameters_are_told_from_others(address, in_memory):
    assert watched(f"  {address}\n".replace("; ", ";\n  ")) is in_memory
