"""Loads, stores, atomics and exchanges between lanes."""

from __future__ import annotations

import re
from typing import Any

from ..errors import UnsupportedError
from ..happens_before import SCOPES
from ..parser import SIZES, Insn
from .arithmetic import WIDTH
from .table import CACHE_HINTS, FLOAT, INTEGER, ORDER, SPACE, op

_TYPES = INTEGER + " " + FLOAT + " b128"
ORDERS = ("relaxed", "acquire", "release", "acq_rel", "volatile")


def space(ins: Insn) -> str:
    for s in ins.parts:
        if s.startswith("shared"):
            return "shared"
        if s in ("global", "param", "local", "const"):
            return s
    return "generic"


def ordered(g, ins: Insn, default: str = "", scope: str = "gpu") -> str:
    """Return the argument of a memory access for its order, after a comma; nothing for a weak one."""
    kind = next((x for x in ins.parts if x in ORDERS), default)
    if not kind:
        return ""
    scope = "sys" if kind == "volatile" else next((x for x in ins.parts if x in SCOPES), scope)
    atomic = ins.parts[0] in ("atom", "red") or ins.parts[:2] == ["multimem", "red"]
    return ", " + str(g.constant(f"Order({kind!r}, {SCOPES[scope]}, {atomic})"))


def vector_length(ins: Insn) -> int:
    return next((int(x[1:]) for x in ins.parts if re.match(r"^v\d$", x)), 1)


def elements(o) -> list:
    return o[1] if o[0] == "vec" else [o]


@op("ld", "ldu", mods=f"{_TYPES} {SPACE} {ORDER} v2 v4 v8 nc ca cg cs lu cv", pattern=CACHE_HINTS, line=True)
def load(g, ins: Insn, part: bool) -> list[str]:
    ty = ins.parts[-1]
    size = SIZES[ty]
    dst = elements(ins.ops[0])
    sp = space(ins)
    widths = [g.width(d) or 8 * size for d in dst]
    if size == 16:
        raise UnsupportedError(ins.op)
    memory = ins.ops[1]
    if sp == "param" and memory[1][0] == "sym":
        base = g.k.param_offset[memory[1][1]] + memory[1][2] + memory[2]
        out = []
        for j, d in enumerate(dst):
            e = f"w.launch.param({base + j * size}, {size})"
            if ty[0] == "s" and widths[j] > size * 8:
                e = f"sext({e}, {size * 8}, {widths[j]})"
            out.append(g.assign(d, e, part))
        return out
    sp = "generic" if sp == "param" else sp
    order = ordered(g, ins)
    out = ["w.spin += 20"] if order else []
    out.append(f"t_ = w.ld({sp!r}, {g.addr(memory)}, {size}, {vector_length(ins)}, m{order})")
    for j, d in enumerate(dst):
        e = f"t_[{j}]"
        if widths[j] > size * 8:
            e = f"sext({e}, {size * 8}, {widths[j]})" if ty[0] == "s" else f"zext({e}, {widths[j]})"
        if d[0] != "sink":
            out.append(g.assign(d, e, part))
    return out


@op("st", mods=f"{_TYPES} {SPACE} {ORDER} v2 v4 v8 wb cg cs wt", pattern=CACHE_HINTS, dst=0, line=True)
def store(g, ins: Insn, part: bool) -> list[str]:
    size = SIZES[ins.parts[-1]]
    if size == 16:
        raise UnsupportedError(ins.op)
    vals = ", ".join(g.val(s, 8 * size) for s in elements(ins.ops[1]))
    return [f"w.st({space(ins)!r}, {g.addr(ins.ops[0])}, {size}, ({vals},), m{ordered(g, ins)})"]


@op("st.async", mods=f"{_TYPES} {SPACE} weak mbarrier::complete_tx::bytes v2 v4", dst=0, line=True)
def store_async(g, ins: Insn, part: bool) -> list[str]:
    size = SIZES[ins.parts[-1]]
    vals = ", ".join(g.val(s, 8 * size) for s in elements(ins.ops[1]))
    return [f"w.st_async({g.addr(ins.ops[0])}, {size}, ({vals},), {g.addr(ins.ops[2])}, m)"]


_ATOMIC = f"{_TYPES} {SPACE} {ORDER} add min max and or xor exch cas inc dec noftz v2 v4 v8"
_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


def _atomic(g, ins: Insn, operands: list) -> str:
    ty = ins.parts[-1]
    operation = next(x for x in ins.parts if x in _OPERATIONS)
    mods = tuple(x for x in ins.parts[1:] if x == "noftz")
    if ty == "b128":
        raise UnsupportedError(ins.op)
    f = g.constant(f"make_atom({operation!r}, {ty!r}, {mods!r})")
    vector = vector_length(ins) > 1
    vals = "".join(g.val(x, WIDTH[ty]) + ", " for x in (elements(operands[1]) if vector else operands[1:]))
    if vector:
        vals = f"({vals}),"
    return f"w.atom({space(ins)!r}, {f}, {SIZES[ty]}, {g.addr(operands[0])}, ({vals}), m{ordered(g, ins, 'relaxed')})"


@op("atom", mods=_ATOMIC, pattern=CACHE_HINTS, line=True)
def atomic(g, ins: Insn, part: bool) -> list[str]:
    if vector_length(ins) > 1:
        raise UnsupportedError(ins.op)
    return ["w.spin += 20", g.assign(ins.ops[0], _atomic(g, ins, ins.ops[1:]), part)]


@op("red", mods=_ATOMIC, pattern=CACHE_HINTS, dst=0, line=True)
def reduction(g, ins: Insn, part: bool) -> list[str]:
    return [_atomic(g, ins, ins.ops)]


@op("red.async", mods=f"{_TYPES} {SPACE} relaxed cluster mbarrier::complete_tx::bytes", dst=0, line=True)
def reduction_async(g, ins: Insn, part: bool) -> list[str]:
    raise UnsupportedError(ins.op)


@op("stmatrix", mods="sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16", dst=0, line=True)
def store_matrix(g, ins: Insn, part: bool) -> list[str]:
    regs = ", ".join(g.val(x) for x in elements(ins.ops[1]))
    return [f"w.stmatrix(m, {g.addr(ins.ops[0])}, ({regs},), {'trans' in ins.parts})"]


@op("ldmatrix", mods="sync aligned m8n8 m16n16 x1 x2 x4 trans shared shared::cta b16 b8", line=True)
def load_matrix(g, ins: Insn, part: bool) -> list[str]:
    regs = elements(ins.ops[0])
    if ("m16n16" in ins.parts) != ("b8" in ins.parts) or ("b8" in ins.parts and "trans" not in ins.parts):
        raise UnsupportedError(ins.op)
    if "b8" in ins.parts:
        out = [f"t_ = w.ldmatrix_bytes(m, {g.addr(ins.ops[1])}, {len(regs)})"]
        return out + [g.assign(x, f"t_[{j}]", part) for j, x in enumerate(regs)]
    out = [f"t_ = w.ldmatrix(m, {g.addr(ins.ops[1])}, {len(regs)}, {'trans' in ins.parts})"]
    return out + [g.assign(x, f"t_[{j}]", part) for j, x in enumerate(regs)]


# ---- between lanes ----
def together(g, ins: Insn, members: Any, part: bool) -> list[str]:
    """Check that the lanes named by ``members`` have not branched away; only where lanes can be apart."""
    return [f"w.line = {ins.line}", f"w.together({ins.op!r}, m, {g.val(members)})"] if part else []


@op("elect.sync")
def elect(g, ins: Insn, part: bool) -> list[str]:
    leader, chosen = ins.ops[0][1], ins.ops[0][2]
    out = [*together(g, ins, ins.ops[1], part), "t_, t2_ = elect(w, m)", g.assign(chosen, "t2_", part)]
    return out + ([g.assign(leader, "t_", part)] if leader[0] == "reg" else [])


@op("shfl.sync", mods="idx up down bfly b32")
def shuffle(g, ins: Insn, part: bool) -> list[str]:
    a, b, c = (g.val(o) for o in ins.ops[1:4])
    mode = ins.parts[2]
    check = together(g, ins, ins.ops[4], part)
    if ins.ops[0][0] == "pair":
        out = [f"t_, t2_ = shfl_pred({mode!r}, {a}, {b}, {c}, m)", g.assign(ins.ops[0][1], "t_", part)]
        return [*check, *out, g.assign(ins.ops[0][2], "t2_", part)]
    return [*check, g.assign(ins.ops[0], f"shfl({mode!r}, {a}, {b}, {c}, m)", part)]


@op("vote.sync", mods="any all uni ballot pred b32")
def vote(g, ins: Insn, part: bool) -> list[str]:
    check = together(g, ins, ins.ops[2], part)
    return [*check, g.assign(ins.ops[0], f"vote({ins.parts[2]!r}, {g.val(ins.ops[1], 1)}, m)", part)]


@op("redux.sync", mods="add min max and or xor u32 s32 b32 f32 abs NaN")
def redux(g, ins: Insn, part: bool) -> list[str]:
    mods = tuple(x for x in ins.parts[3:-1])
    value = f"redux({ins.parts[2]!r}, {g.val(ins.ops[1])}, m, {ins.parts[-1]!r}, {mods!r})"
    return [*together(g, ins, ins.ops[2], part), g.assign(ins.ops[0], value, part)]


@op("bar.warp.sync", dst=0)
def barrier_warp(g, ins: Insn, part: bool) -> list[str]:
    return together(g, ins, ins.ops[0], part) or ["pass"]


@op("match.any.sync", "match.all.sync", mods="b32 b64")
def match(g, ins: Insn, part: bool) -> list[str]:
    raise UnsupportedError(ins.op)


@op("activemask", mods="b32")
def active_mask(g, ins: Insn, part: bool) -> list[str]:
    return [g.assign(ins.ops[0], "maskbits(m)", part)]
