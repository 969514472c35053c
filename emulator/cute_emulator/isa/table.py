"""The instruction table: one entry per opcode.

An entry is registered under a dotted prefix (``mbarrier.try_wait``, ``cp.async.bulk.tensor``); an instruction belongs
to the longest prefix that matches. Every further part of its opcode must be among the modifiers the entry allows, else
the instruction is refused by name: a modifier that is silently dropped is a wrong answer.

An emitter gets the code generator, the instruction and whether the warp may be diverged there, and returns lines of
Python. Destinations are the first ``dst`` operands; all others are uses (and the destinations too, if ``accumulates``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError
from ..parser import Insn

Emitter = Callable[[Any, Insn, bool], list[str]]


@dataclass(frozen=True)
class Entry:
    """An opcode: allowed modifiers (words and patterns), number of destination operands, and its emitter.

    ``line`` entries touch memory or synchronise: generated code notes their PTX line before they run.
    """

    name: str
    emit: Emitter
    mods: frozenset[str]
    pattern: re.Pattern[str] | None
    dst: int | Callable[[Insn], int]
    accumulates: bool = False
    line: bool = False


TABLE: dict[str, Entry] = {}

INTEGER = "u8 s8 b8 u16 s16 b16 u32 s32 b32 u64 s64 b64"
FLOAT = "f16 bf16 f32 f64 f16x2 bf16x2 f32x2"
SPACE = "global shared shared::cta shared::cluster local const param"
ORDER = "weak relaxed acquire release acq_rel volatile cta cluster gpu sys"
CACHE_HINTS = r"(L1|L2|level)::[\w:]+"


def op(
    *names: str,
    mods: str | Iterable[str] = "",
    pattern: str | None = None,
    dst: int | Callable[[Insn], int] = 1,
    accumulates: bool = False,
    line: bool = False,
) -> Callable[[Emitter], Emitter]:
    """Register an emitter for one or more opcode prefixes."""
    words = frozenset(mods.split() if isinstance(mods, str) else mods)

    def register(emit: Emitter) -> Emitter:
        for name in names:
            if name in TABLE:
                raise ValueError(f"{name} is registered twice")
            compiled = re.compile(rf"(?:{pattern})$") if pattern else None
            TABLE[name] = Entry(name, emit, words, compiled, dst, accumulates, line)
        return emit

    return register


def lookup(ins: Insn) -> Entry:
    """Return the entry of an instruction.

    Raises:
        UnsupportedError: unknown opcode or a modifier that the entry does not allow, named.
    """
    parts = ins.parts
    for n in range(len(parts), 0, -1):
        entry = TABLE.get(".".join(parts[:n]))
        if entry is None:
            continue
        for mod in parts[n:]:
            if mod not in entry.mods and not (entry.pattern and entry.pattern.match(mod)):
                raise UnsupportedError(f"modifier .{mod} of {ins.op}")
        return entry
    raise UnsupportedError(f"opcode {ins.op}")


def destinations(ins: Insn) -> tuple[int, bool]:
    """(number of destination operands, whether they are also read); unknown opcodes are assumed to write one."""
    try:
        entry = lookup(ins)
    except UnsupportedError:
        return 1, False
    return (entry.dst if isinstance(entry.dst, int) else entry.dst(ins)), entry.accumulates
