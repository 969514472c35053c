"""Why a surviving mutant is harmless, or why the emulator cannot see it; anything not listed here counts as missed."""

import re

_TAIL = (
    "a last wait for empty stages before the warp leaves: a later wait of the same sequence, or the epilogue's wait "
    "for the last accumulator, orders the release before the exit anyway"
)
_ACC_TAIL = "the last wait for empty accumulators: the hand-shake of the pair before dealloc comes after it"
_INFO_TAIL = "a last wait for tile records or stages that only warps of the same CTA release, which keep it alive"
_OWN = "the warp waits for a tile record that it has written itself"
_PEEK = "only peeks at a later stage, which is released later: errs to the safe side, and the blocking wait follows"
_FRESH = "the first waits for an empty stage succeed on a fresh barrier, whichever it is"
_PREFETCH = "guards the prefetch of descriptors only"
_LANES = "lanes of a warp run in step here, so a barrier within one warp cannot be seen to be missing"
_RECORD = "follows generic accesses to the tile record, which no asynchronous unit reads"
_RENAMED = "all its threads meet at this one instruction, under either name"
_DEPTH = "the tile record of two tiles earlier is released only after its accumulator was read"
_LAST_BARRIER = "the last subtile's barrier already follows every read of the accumulator"
_NO_TILE = "differs only in a CTA that gets no tile at all"
_NO_COLUMN = "no column at this offset equals N in these problems"
_GROUPS = "differs only when the groups end exactly where the scheduler's search by 31 groups continues"
_SWAPPED_LANES = "two lanes release one CTA each: the exchange only swaps the lanes"
_ITSELF = "CTA 0 copies its bytes on itself, which it waited for, and CTA 1 does nothing"
_REDUNDANT = "between the two MMAs no other instruction touches the registers"

# (kernel, mutant id, instruction) patterns -> (verdict, reason); the first match counts
REASONS: list[tuple[str, str, str, str, str]] = [
    ("", "^delete@griddepcontrol", "", "harmless", "there is no dependent launch"),
    ("", "^delete@tcgen05.relinquish", "", "harmless", "no other CTA of the SM waits to allocate"),
    ("", "^delete@fence.mbarrier_init", "", "harmless", "the compiler emits this fence twice in a row"),
    ("sm100 grouped", "^delete@fence.proxy.async", "", "harmless", _RECORD),
    ("", "^delete@bar.sync", r"bar.sync\s+3, 32", "missed", _LANES),
    ("", "^delete@bar.warp.sync", "", "missed", _LANES),
    ("", "^other named barrier@bar.sync", "", "harmless", _RENAMED),
    ("sm100 dense", "^delete@bar.sync#[67]$", "", "harmless", "the kernel has two of these barriers in a row"),
    ("sm100 block-scaled", "^delete@bar.sync#11$", "", "harmless", _LAST_BARRIER),
    ("", "^wrong leading offset of A", "", "harmless", "swizzled K-major operands have no leading offset"),
    ("", "^always accumulates@", "", "harmless", "not the first MMA of its tile: it accumulates anyway"),
    ("sm90 published", "^loop one round short@setp.ne.b32#1$", "", "harmless", _ITSELF),
    ("", "^loop one round short@setp.ne.b32#1$", "", "harmless", _PREFETCH),
    ("", "^every lane elected@elect.sync#1$", "", "harmless", _PREFETCH),
    ("", "^waits on the next barrier@mbarrier.try_wait.parity.acquire", "", "harmless", _PEEK),
    ("sm90 dense", "^wrong CTA of the pair@mapa", "", "harmless", _SWAPPED_LANES),
    ("sm90 dense", "^waits on the next barrier@mbarrier.try_wait.parity.shared.b64#1$", "", "harmless", _FRESH),
    ("sm100 grouped", "^off by one in a bound@setp.ge.s32#1$", "", "harmless", _NO_TILE),
    ("sm100 grouped", "^off by one in a bound@setp.lt.s32#1$", "", "harmless", _NO_COLUMN),
    ("sm100 grouped", "^delete@mbarrier.try_wait.parity.shared.b64#17$", "", "harmless", _DEPTH),
    ("sm100 grouped", "^delete@mbarrier.try_wait.parity.shared.b64#[23]$", "", "harmless", _INFO_TAIL),
    ("sm100 grouped", "^delete@mbarrier.try_wait.parity.shared.b64#20$", "", "harmless", _ACC_TAIL),
    ("sm100 grouped", "^delete@mbarrier.try_wait.parity.shared.b64#([7-9]|1[0-5])$", "", "harmless", _TAIL),
    ("sm100 grouped", "^waits on the next barrier@mbarrier.try_wait.parity.shared.b64#2$", "", "harmless", _TAIL),
    ("sm100 block-scaled", "^delete@mbarrier.try_wait.parity.shared.b64#[2-7]$", "", "harmless", _TAIL),
    ("sm100 block-scaled", "^wrong parity@mbarrier.try_wait.parity.shared.b64#1$", "", "harmless", _TAIL),
    ("sm100 block-scaled", "^delete@mbarrier.try_wait.parity.shared.b64#10$", "", "harmless", _ACC_TAIL),
    ("sm100 dense", "^delete@mbarrier.try_wait.parity.shared.b64#([2-9]|10)$", "", "harmless", _TAIL),
    ("sm100 dense", "^delete@mbarrier.try_wait.parity.shared.b64#15$", "", "harmless", _ACC_TAIL),
    ("sm100 dense", "^wrong parity@mbarrier.try_wait.parity.shared.b64#1$", "", "harmless", _TAIL),
    ("sm90 dense", "^delete@mbarrier.try_wait.parity.shared.b64#([89]|1[0-8])$", "", "harmless", _TAIL),
    ("sm90 dense", "^waits on the next barrier@mbarrier.try_wait.parity.shared.b64#2$", "", "harmless", _TAIL),
    ("sm90 dense", "^never accumulates@wgmma.*#2$", "", "harmless", "the first MMA of its tile does not accumulate"),
    ("sm90 grouped", "^delete@mbarrier.try_wait.parity.shared.b64#3$", "", "harmless", _OWN),
    ("sm90 grouped", "^delete@mbarrier.try_wait.parity.shared.b64#([4-9]|1[012])$", "", "harmless", _INFO_TAIL),
    ("sm90 grouped", "^delete@wgmma.fence", "", "harmless", _REDUNDANT),
    ("sm90 grouped", "^waits on the next barrier@mbarrier.try_wait.parity.shared.b64#1$", "", "harmless", _INFO_TAIL),
    ("sm90 grouped", "^never accumulates@wgmma.*#2$", "", "harmless", "the first MMA of its tile does not accumulate"),
    ("sm90 grouped", "^off by one in a bound@setp.lt.s32#2$", "", "harmless", _GROUPS),
]


def explain(subject, record):
    """(verdict, reason) of a survivor."""
    for kernel, pattern, instruction, verdict, reason in REASONS:
        if all(
            re.search(p, t) for p, t in ((kernel, subject), (pattern, record["id"]), (instruction, record["original"]))
        ):
            return verdict, reason
    return "missed", "not explained"
