"""PTX modules for tests, written by hand, and how the tests of checkers run them."""

import pytest

from cute_emulator import emulate

HEADER = """
.version 8.7
.target {arch}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel({params})
{{
  .reg .pred %p<16>;
  .reg .b16 %h<16>;
  .reg .b32 %r<64>;
  .reg .b64 %rd<32>;
  .reg .f32 %f<64>;
  .reg .b128 %q<4>;
"""

# %r0 thread, %r1 warp, %r2 shared base, %p0 first thread of the CTA; %rd0.. the pointer parameters
PROLOGUE = """
  mov.u32 %r0, %tid.x;
  shr.u32 %r1, %r0, 5;
  mov.u32 %r2, smem;
  setp.eq.s32 %p0, %r0, 0;
"""


def module(body, pointers=0, arch="sm_90a"):
    """A module of one kernel with ``pointers`` parameters that are loaded to %rd0, %rd1, ..."""
    params = ", ".join(f".param .u64 a{i}" for i in range(pointers))
    loads = "".join(f"  ld.param.b64 %rd{i}, [a{i}];\n" for i in range(pointers))
    return HEADER.format(arch=arch, params=params) + PROLOGUE + loads + body + "\n  ret;\n}\n"


def only(warp, body, label):
    """``body`` executed by one warp."""
    return f"  setp.ne.s32 %p15, %r1, {warp};\n  @%p15 bra {label};\n{body}\n{label}:\n"


INIT = """
  @%p0 mbarrier.init.shared.b64 [%r2], 1;
  @%p0 fence.mbarrier_init.release.cluster;
  bar.sync 0;
"""
WAIT = """
WAITING:
  mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
  @!%p1 bra WAITING;
"""
LOAD = """
  @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {expect};
  @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+256], [%rd0], {size}, [%r2];
"""


def launch(
    body,
    *tensors,
    arch="sm_90a",
    warps=1,
    seed=0,
    timing="adversarial",
    cluster=1,
    grid=None,
    overlaps=False,
    **options,
):
    with emulate(arch, seed=seed, timing=timing, **options) as machine:
        text = module(body, len(tensors), arch)
        n = cluster if grid is None else grid
        return machine.launch_ptx(
            text,
            tensors,
            grid=(n, 1, 1),
            block=(32 * warps, 1, 1),
            cluster=(cluster, 1, 1),
            smem=8192,
            overlaps=overlaps,
        )


def check(good, bad, error, match, *tensors, **options):
    """``good`` runs under every schedule; ``bad`` raises under each of them, so no schedule is needed to see it."""
    for timing in ("adversarial", "in_order"):
        for seed in range(3):
            launch(good, *tensors, seed=seed, timing=timing, **options)
            with pytest.raises(error, match=match):
                launch(bad, *tensors, seed=seed, timing=timing, **options)
