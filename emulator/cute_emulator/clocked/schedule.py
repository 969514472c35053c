"""Issue times of a block's instructions between a warp's events: in order, each after the results it reads."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import UnsupportedError
from ..parser import Insn
from .costs import latency

FREE = ("mov.", "cvta.", "ld.param", "createpolicy.", "wgmma.fence", "tcgen05.fence", "setmaxnreg")
"""PTX that machine code does not have, or that takes no time worth a look."""
EVENTS = (
    "mbarrier.", "bar.sync", "bar.arrive", "barrier.", "cp.async.", "cp.reduce.async.bulk", "wgmma.", "tcgen05.",
    "clusterlaunchcontrol.try_cancel", "st.async", "griddepcontrol", "atom", "red.", "nanosleep", "stmatrix",
)  # fmt: skip
"""Instructions that wait, signal or keep a unit busy: each runs when its warp's clock is the least."""
WITHOUT_TIME = ("mma.sync",)
BRANCH = 8
LONG = 30  # results that take as long are waited for at the end of their block


def schedule(insns: list[Insn], registers: Callable[[Insn], tuple[list[str], list[str]]]) -> dict[int, tuple[int, int]]:
    """Return the cycles before every event of a block and before its end.

    Args:
        insns: of the block.
        registers: those that an instruction writes and reads.

    Returns:
        By index of an event, and of ``len(insns)``: issue slots, and cycles, since the one before.
    """
    found: dict[int, tuple[int, int]] = {}
    ready: dict[str, int] = {}  # when a register's value is there
    time = last = slots = outstanding = 0
    for i, ins in enumerate(insns):
        written, read = registers(ins)
        start = max([time, *(ready.get(register, 0) for register in read)])
        if ins.op.startswith(FREE):
            ready.update(dict.fromkeys(written, start if start > time else 0))
            continue
        if ins.op.startswith(EVENTS):
            found[i] = slots, start - last
            slots, last = 0, start
        slots += 1
        time = start + (BRANCH if ins.parts[0] in ("bra", "ret", "exit") else 1)
        if written:
            there = start + latency(ins)
            ready.update(dict.fromkeys(written, there))
            outstanding = max(outstanding, there if latency(ins) >= LONG else 0)
    found[len(insns)] = slots, max(time, outstanding) - last
    return found


def refuse(ins: Insn) -> None:
    """Raise what an instruction gets that the model has no time for."""
    if ins.op.startswith(WITHOUT_TIME):
        raise UnsupportedError(f"{ins.op} with timing 'clocked'")
