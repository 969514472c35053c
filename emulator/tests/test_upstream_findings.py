"""Minimal cases of faults that the emulator reported in kernels of others: docs/notes/2026_11_28_upstream_races.md."""

import pytest
import torch

from cute_emulator import EmulatorError, MemoryAccessError, RaceError, SyncError

from .ptx import check, launch, only
from .test_checkers import ALLOC, FREE, GET, GET_DONE, MINE, PUT, PUT_DONE

STORE = """
  @%p0 st.shared.v4.b32 [%r2+256], {%r0, %r0, %r0, %r0};
  @%p0 fence.proxy.async.shared::cta;
  @%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r2+256], 16;
  @%p0 cp.async.bulk.commit_group;
"""
PUBLISH = """
  mov.u32 %r3, %ctaid.x;
  setp.ne.s32 %p2, %r3, 0;
  @%p2 bra CONSUMER;
{store}
  cp.async.bulk.wait_group{read} 0;
  @%p0 st.release.gpu.global.b32 [%rd1], 1;
  ret;
CONSUMER:
  ld.acquire.gpu.global.b32 %r4, [%rd1];
  setp.eq.s32 %p2, %r4, 0;
  @%p2 bra CONSUMER;
  ld.global.b32 %r5, [%rd0];
"""


def test_a_product_published_after_a_wait_for_its_read():
    """The tail of a producer waits with ``.read`` and raises a flag; a CTA that sees it loads the product."""
    good, bad = (PUBLISH.format(store=STORE, read=read) for read in ("", ".read"))
    for seed in range(4):
        launch(good, torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), grid=2, seed=seed)
        with pytest.raises(RaceError, match=r"complete after a wait_group without \.read"):
            launch(bad, torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), grid=2, seed=seed)


def test_barriers_initialised_after_the_last_fence_of_a_cluster():
    init = "  @%p0 mbarrier.init.shared.b64 [%r2+{}], 1;\n"
    fence = "  fence.mbarrier_init.release.cluster;\n"
    meet = "  barrier.cluster.arrive.aligned;\n  barrier.cluster.wait.aligned;\n"
    arrive = (
        "  mov.u32 %r3, %cluster_ctarank;\n  xor.b32 %r3, %r3, 1;\n  mapa.shared::cluster.u32 %r4, %r2, %r3;\n"
        "  @%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4+8];\n"
    )
    good = init.format(0) + init.format(8) + fence + meet + arrive + meet
    bad = init.format(0) + fence + init.format(8) + meet + arrive + meet
    check(good, bad, SyncError, "not followed by fence.mbarrier_init", cluster=2)


BLACKWELL = {"arch": "sm_100a", "warps": 4}


def test_tensor_memory_freed_before_the_loads_of_other_warps():
    work = ALLOC + MINE + PUT + PUT_DONE + GET + GET_DONE
    early = FREE.replace("bar.sync 0", "mov.u32 %r9, 0")
    check(work + FREE, work + early, EmulatorError, "race: .* tensor memory|outside the allocation", **BLACKWELL)


def test_a_barrier_that_every_warp_initialises():
    elected = "  elect.sync _|%p3, -1;\n  @%p3 mbarrier.init.shared.b64 [%r2], 1;\n"
    rest = "  fence.mbarrier_init.release.cluster;\n  bar.sync 0;\n"
    check(only(0, elected, "ONE") + rest, elected + rest, RaceError, "race: warp", warps=4)


def test_rows_gathered_by_lanes_and_read_through_the_asynchronous_proxy():
    gather = (
        "  mul.wide.u32 %rd2, %r0, 16;\n  add.u64 %rd2, %rd0, %rd2;\n  shl.b32 %r4, %r0, 4;\n"
        "  add.s32 %r4, %r4, %r2;\n  cp.async.cg.shared.global [%r4+1024], [%rd2], 16;\n  cp.async.wait_all;\n"
    )
    # A 64 x 8 x 16 product of the gathered bytes, by one warpgroup: byte offsets 128 and 256 of the operands.
    product = (
        "  bar.sync 0;\n  add.s32 %r3, %r2, 1024;\n  shr.u32 %r3, %r3, 4;\n  cvt.u64.u32 %rd3, %r3;\n"
        "  or.b64 %rd3, %rd3, 68720001024;\n  wgmma.fence.sync.aligned;\n"
        "  wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd3, %rd3, 0, 1, 1, 0, 0;\n"
        "  wgmma.commit_group.sync.aligned;\n  wgmma.wait_group.sync.aligned 0;\n"
    )
    good, bad = (gather + fence + product for fence in ("  fence.proxy.async.shared::cta;\n", ""))
    check(good, bad, MemoryAccessError, "without fence.proxy.async", torch.zeros(2048, dtype=torch.uint8), warps=4)
