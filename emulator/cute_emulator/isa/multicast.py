"""``multimem.ld_reduce``, ``multimem.st`` and ``multimem.red``, in the combinations that the PTX ISA lists."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..happens_before import SCOPES
from ..parser import SIZES, Insn
from .memory import ORDERS, elements, ordered, vector_length
from .table import op

_BITS, _INTEGERS = ("b32", "b64"), ("u32", "s32", "u64", "s64")
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_FLOATS = (*_HALVES, "f32", "f64")
_FP8 = ("e4m3", "e4m3x2", "e4m3x4", "e5m2", "e5m2x2", "e5m2x4")
_LOGICAL = dict.fromkeys(("and", "or", "xor"), _BITS)
_ADD = ("u32", "s32", "u64")
_REDUCTIONS = {  # types by operation
    "ld_reduce": {"add": (*_ADD, *_FLOATS), **dict.fromkeys(("min", "max"), (*_INTEGERS, *_HALVES)), **_LOGICAL},
    "red": {"add": (*_ADD, *_FLOATS), **dict.fromkeys(("min", "max"), _INTEGERS), **_LOGICAL},
}
_SEMANTICS = {"ld_reduce": ("relaxed", "acquire"), "st": ("relaxed", "release"), "red": ("relaxed", "release")}
_TYPES = (*_BITS, *_INTEGERS, *_FLOATS, *_FP8)
_MODS = (*_TYPES, "weak", "relaxed", "acquire", "release", "cta", "cluster", "gpu", "sys", "global", "v2", "v4", "v8")


def _operation(ins: Insn) -> str | None:
    return next((x for x in ins.parts[2:] if x in _REDUCTIONS["red"]), None)


def _count(ins: Insn) -> int:
    """Return the number of elements of an access, after a check of its type."""
    kind, ty = ins.parts[1], ins.parts[-1]
    if ty in _FP8:
        raise UnsupportedError(f"{ins.op}: the PTX ISA does not say how a result is rounded to an FP8 type")
    operation = _operation(ins)
    if kind != "st" and (operation is None or ty not in _REDUCTIONS[kind][operation]):
        raise UnsupportedError(f"{ins.op}: the PTX ISA has no multimem.{kind}.{operation} of {ty}")
    count = vector_length(ins)
    if count * SIZES[ty] not in (4, 8, 16) or (count > 1 and (ty == "f64" or ty not in _FLOATS)):
        raise UnsupportedError(
            f"{ins.op}: a multimem access is one integer, one f64, or floats of 32, 64 or 128 bits in all"
        )
    if count != max(len(elements(o)) for o in ins.ops):
        raise UnsupportedError(f"{ins.op}: operands that are not {count} elements")
    return count


def _order(g, ins: Insn) -> str:
    """Return the argument of an access for its memory order, after a check of it."""
    kind = ins.parts[1]
    semantics = [x for x in ins.parts if x in ORDERS]
    scopes = [x for x in ins.parts if x in SCOPES]
    wrong = len(semantics) > 1 or not set(semantics) <= set(_SEMANTICS[kind])
    if wrong or (kind != "red" and len(scopes) != len(semantics)):
        raise UnsupportedError(
            f"{ins.op}: multimem.{kind} is weak, or {' or '.join(_SEMANTICS[kind])} with a scope in the PTX ISA"
        )
    return ordered(g, ins, "relaxed" if kind == "red" else "", "sys")


@op("multimem.ld_reduce", mods=(*_MODS, *_REDUCTIONS["red"], "acc::f32", "acc::f16"), line=True)
def load_reduce(g, ins: Insn, part: bool) -> list[str]:
    count, ty = _count(ins), ins.parts[-1]
    wide = "acc::f32" in ins.parts
    if (wide and ty not in _HALVES) or "acc::f16" in ins.parts:
        raise UnsupportedError(f"{ins.op}: the PTX ISA has .acc::f32 for f16 and bf16, .acc::f16 for FP8 types")
    reduction = g.constant(f"make_reduction({_operation(ins)!r}, {ty!r}, {wide})")
    order = _order(g, ins)
    out = ["w.spin += 20"] if order else []
    out.append(f"t_ = w.multimem_ld_reduce({reduction}, {g.addr(ins.ops[1])}, {SIZES[ty]}, {count}, m{order})")
    return out + [g.assign(d, f"t_[{j}]", part) for j, d in enumerate(elements(ins.ops[0])) if d[0] != "sink"]


@op("multimem.st", mods=_MODS, dst=0, line=True)
def store(g, ins: Insn, part: bool) -> list[str]:
    _count(ins)
    size = SIZES[ins.parts[-1]]
    vals = ", ".join(g.val(s, 8 * size) for s in elements(ins.ops[1]))
    return [f"w.multimem_st({g.addr(ins.ops[0])}, {size}, ({vals},), m{_order(g, ins)})"]


@op("multimem.red", mods=(*_MODS, *_REDUCTIONS["red"]), dst=0, line=True)
def reduction(g, ins: Insn, part: bool) -> list[str]:
    _count(ins)
    ty = ins.parts[-1]
    f = g.constant(f"make_atom({_operation(ins)!r}, {ty!r}, ())")
    vals = ", ".join(g.val(s, 8 * SIZES[ty]) for s in elements(ins.ops[1]))
    return [f"w.multimem_red({f}, {g.addr(ins.ops[0])}, {SIZES[ty]}, ({vals},), m{_order(g, ins)})"]
