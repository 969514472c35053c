"""Control flow, barriers, mbarriers, fences, and instructions without effect on a functional model."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..happens_before import SCOPES
from ..parser import Insn
from .table import op


def _nothing(g, ins: Insn, part: bool) -> list[str]:
    return ["pass"]


# Prefetches, cache hints, register reallocation and launch dependencies do not change results.
op("fence.proxy.alias", dst=0)(_nothing)
op(
    "prefetch",
    "prefetchu",
    mods="global local L1 L2 param tensormap const evict_last evict_normal",
    pattern=r"L2::\w+",
    dst=0,
)(_nothing)
op("cp.async.bulk.prefetch", mods="tensor L2 global tile 1d 2d 3d 4d 5d", pattern=r"L2::\w+|tile::\w+", dst=0)(_nothing)


@op("griddepcontrol", mods="launch_dependents wait", dst=0, line=True)
def dependent_launch(g, ins: Insn, part: bool) -> list[str]:
    """Wait for the end of the previous launch: launches run one after the other."""
    if "wait" not in ins.parts:
        return ["w.let_next_begin()"]
    return ["t_ = w.front_wait()", "if not t_():", "  yield t_", "w.waited = True"]


op("setmaxnreg", mods="inc dec sync aligned u32", dst=0)(_nothing)
op("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", dst=0)(_nothing)
op("tcgen05.relinquish_alloc_permit", mods="cta_group::1 cta_group::2 sync aligned", dst=0)(_nothing)
op("applypriority", "discard", mods="global", pattern=r"L2::\w+", dst=0)(_nothing)
op("pmevent", "brkpt", mods="mask", dst=0)(_nothing)


# Block ends are emitted by the code generator; the entries say which modifiers they may have.
op("bra", mods="uni", dst=0)(_nothing)
op("ret", mods="uni", dst=0)(_nothing)
op("exit", dst=0)(_nothing)


@op("trap", dst=0, line=True)
def trap(g, ins: Insn, part: bool) -> list[str]:
    return ["w.fail('trap instruction')"]


@op("nanosleep", mods="u32", dst=0)
def sleep(g, ins: Insn, part: bool) -> list[str]:
    return ["yield None"]


@op("createpolicy.fractional", mods="b64", pattern=r"L2::\w+")
def policy(g, ins: Insn, part: bool) -> list[str]:
    return [g.assign(ins.ops[0], "0", part)]


@op(
    "fence.proxy.async",
    mods="global shared::cta shared::cluster",
    pattern=r"generic|acquire|release|sync_restrict::\S+|cluster",
    dst=0,
    line=True,
)
@op("fence.proxy.async::generic", mods="acquire release cluster", pattern=r"sync_restrict::\S+", dst=0, line=True)
def fence_async(g, ins: Insn, part: bool) -> list[str]:
    return ["pass"] if "global" in ins.parts else ["w.fence_proxy_async()"]


@op("fence.proxy.tensormap::generic", mods="acquire release cta cluster gpu sys", dst=0, line=True)
def fence_tensor_map(g, ins: Insn, part: bool) -> list[str]:
    if "acquire" in ins.parts:
        return [f"w.fence_map_acquire({g.addr(ins.ops[0])}, m)"]
    if "release" not in ins.parts:
        raise UnsupportedError(ins.op)
    return ["w.fence_map_release()"]


@op(
    "fence.acq_rel",
    "fence.sc",
    "fence.release",
    "fence.acquire",
    "membar",
    mods="cta cluster gl gpu sys sync_restrict::shared::cta sync_restrict::shared::cluster",
    dst=0,
    line=True,
)
def fence(g, ins: Insn, part: bool) -> list[str]:
    scope = next((x for x in ins.parts if x in SCOPES), "sys")
    return [f"w.fence({SCOPES[scope]}, {'acquire' not in ins.parts})"]


@op("fence.mbarrier_init", mods="release cluster", dst=0, line=True)
def fence_init(g, ins: Insn, part: bool) -> list[str]:
    return ["w.fence_mbarrier_init()"]


@op("bar", mods="sync cta aligned arrive", dst=0, line=True)
@op("barrier", mods="sync cta aligned arrive", dst=0, line=True)
def bar(g, ins: Insn, part: bool) -> list[str]:
    a = g.val(ins.ops[0])
    n = g.val(ins.ops[1]) if len(ins.ops) > 1 else "w.cta.nwarps * 32"
    if "arrive" in ins.parts:
        return [f"w.bar({a}, {n}, m, False)"]
    if "sync" not in ins.parts:
        raise UnsupportedError(ins.op)
    return [f"t_ = w.bar({a}, {n}, m, True)", "if t_ is not None: yield t_"]


@op("barrier.cluster.arrive", mods="release relaxed aligned", dst=0, line=True)
def cluster_arrive(g, ins: Insn, part: bool) -> list[str]:
    return [f"w.cluster_arrive({'relaxed' in ins.parts})"]


@op("barrier.cluster.wait", mods="acquire aligned", dst=0, line=True)
def cluster_wait(g, ins: Insn, part: bool) -> list[str]:
    return ["t_ = w.cluster_wait()", "if not t_():", "  yield t_", "  t_()"]


_MBAR = "shared shared::cta shared::cluster b64"


@op("mbarrier.init", mods=_MBAR, dst=0, line=True)
def mbar_init(g, ins: Insn, part: bool) -> list[str]:
    return [f"w.mbar_init({g.addr(ins.ops[0])}, {g.val(ins.ops[1])}, m)"]


@op("mbarrier.inval", mods=_MBAR, dst=0, line=True)
def mbar_inval(g, ins: Insn, part: bool) -> list[str]:
    return [f"w.mbar_inval({g.addr(ins.ops[0])}, m)"]


_WAIT = _MBAR + " parity acquire relaxed cta cluster"


@op("mbarrier.try_wait", mods=_WAIT, line=True)
def mbar_try_wait(g, ins: Insn, part: bool) -> list[str]:
    if "parity" not in ins.parts:
        raise UnsupportedError(f"{ins.op} with a state operand")
    return [
        f"t_ = w.mbar_wait({g.addr(ins.ops[1])}, {g.val(ins.ops[2])}, m, {'relaxed' in ins.parts})",
        "if t_ is not True and t_ is not False:",
        "  yield t_",
        "  t_ = t_()",
        g.assign(ins.ops[0], "t_", part),
    ]


@op("mbarrier.test_wait", mods=_WAIT, line=True)
def mbar_test_wait(g, ins: Insn, part: bool) -> list[str]:
    if "parity" not in ins.parts:
        raise UnsupportedError(f"{ins.op} with a state operand")
    return [
        f"t_ = w.mbar_wait({g.addr(ins.ops[1])}, {g.val(ins.ops[2])}, m, {'relaxed' in ins.parts})",
        "if t_ is not True and t_ is not False: t_ = t_(); w.spin += 50",
        g.assign(ins.ops[0], "t_", part),
    ]


@op(
    "mbarrier.arrive",
    mods=_MBAR + " expect_tx release relaxed cta cluster",
    dst=lambda ins: int(ins.ops[0][0] != "mem"),
    line=True,
)
def mbar_arrive(g, ins: Insn, part: bool) -> list[str]:
    has_state = ins.ops[0][0] != "mem"
    o = ins.ops[1:] if has_state else ins.ops
    n = g.val(o[1]) if len(o) > 1 else "1"
    count, tx = ("1", n) if "expect_tx" in ins.parts else (n, "0")
    out = [f"w.mbar_arrive({g.addr(o[0])}, {count}, m, {tx}, {'relaxed' in ins.parts})"]
    if has_state and ins.ops[0][0] == "reg":
        out.append(g.assign(ins.ops[0], "0", part))
    return out


@op("mbarrier.expect_tx", mods=_MBAR + " relaxed cta cluster", dst=0, line=True)
def mbar_expect(g, ins: Insn, part: bool) -> list[str]:
    return [f"w.mbar_expect({g.addr(ins.ops[0])}, {g.val(ins.ops[1])}, m)"]


@op("mbarrier.complete_tx", mods=_MBAR + " relaxed cta cluster", dst=0, line=True)
def mbar_complete(g, ins: Insn, part: bool) -> list[str]:
    return [f"w.mbar_complete({g.addr(ins.ops[0])}, {g.val(ins.ops[1])}, m)"]
