"""Arithmetic, logic, comparison, conversion and data movement between registers."""

from __future__ import annotations

from ..errors import UnsupportedError
from ..parser import Insn
from .table import FLOAT, INTEGER, op

FLOAT_TYPES = frozenset(FLOAT.split())
INTEGER_TYPES = frozenset(INTEGER.split())
WIDTH = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
    "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64,
    "b128": 128,
    "u16x2": 32, "s16x2": 32,
}  # fmt: skip
FULL = {8: "0xFF", 16: "0xFFFF", 32: "0xFFFFFFFF", 64: "0xFFFFFFFFFFFFFFFF"}

_ARITHMETIC = INTEGER + " " + FLOAT + " rn rz rm rp ftz sat approx full NaN xorsign abs relu"
_FORMATS = "tf32 e4m3x2 e5m2x2 e2m1x2 e2m3x2 e3m2x2 ue8m0x2 e4m3x4 e5m2x4 e2m1x4 e2m3x4 e3m2x4"


def _values(g, ins: Insn, bits: int, first: int = 1) -> list[str]:
    return [g.val(o, bits) for o in ins.ops[first:]]


def _float(g, ins: Insn, part: bool) -> list[str]:
    """Floating-point arithmetic: the function is made once, for the exact type and modifiers."""
    k = ins.parts
    ty = k[-1]
    types = [x for x in k[1:] if x in FLOAT_TYPES]
    mods = tuple(x for x in k[1:] if x not in FLOAT_TYPES)
    if len(types) == 2:  # mixed precision: the last operand has the first type, the others the second
        wide, narrow = types
        n = len(ins.ops)
        args = [g.val(ins.ops[i], WIDTH[narrow]) for i in range(1, n - 1)] + [g.val(ins.ops[-1], WIDTH[wide])]
        f = g.constant(f"make_fop_mixed({k[0]!r}, {wide!r}, {narrow!r}, {mods!r})")
    elif len(types) == 1:
        args = _values(g, ins, WIDTH[ty])
        f = g.constant(f"make_fop({k[0]!r}, {ty!r}, {mods!r})")
    else:
        raise UnsupportedError(f"types of {ins.op}")
    return [g.assign(ins.ops[0], f"{f}({', '.join(args)})", part)]


def _integer(name: str, ty: str, v: list[str], ops: list, g, ins: Insn) -> str:
    bits, signed = WIDTH[ty], ty[0] == "s"
    mask = FULL[bits]
    mods = set(ins.parts[1:-1])
    extra = mods - {"lo", "hi", "wide"}
    if extra == {"sat"} and ty == "s32" and name == "add":
        return f"addsat({v[0]}, {v[1]})"
    if extra == {"relu"} and ty == "s32" and name in ("min", "max"):
        return f"iminmax(iminmax({v[0]}, {v[1]}, 32, True, {name == 'max'}), 0, 32, True, True)"
    if extra:
        raise UnsupportedError(f"modifier .{sorted(extra)[0]} of {ins.op}")
    if name in ("add", "sub"):
        return f"({v[0]} {'+' if name == 'add' else '-'} {v[1]}) & {mask}"
    if name in ("mul", "mad"):
        if "wide" in mods:
            product = f"mulwide({v[0]}, {v[1]}, {bits}, {signed})"
            return product if name == "mul" else f"({product} + {g.val(ops[3], 2 * bits)}) & {FULL[2 * bits]}"
        if "hi" in mods:
            product = f"mulhi({v[0]}, {v[1]}, {bits}, {signed})"
        elif "lo" in mods:
            product = f"{v[0]} * {v[1]}"
        else:
            raise UnsupportedError(ins.op)
        return f"({product}) & {mask}" if name == "mul" else f"({product} + {v[2]}) & {mask}"
    if name in ("div", "rem"):
        return f"idiv({v[0]}, {v[1]}, {bits}, {signed}, {name == 'rem'})"
    if name in ("min", "max"):
        if len(v) != 2:
            raise UnsupportedError(ins.op)
        return f"iminmax({v[0]}, {v[1]}, {bits}, {signed}, {name == 'max'})"
    if name == "neg":
        return f"(0 - {v[0]}) & {mask}"
    return f"iminmax({v[0]}, (0 - {v[0]}) & {mask}, {bits}, True, True)"  # abs


@op("add", "sub", "mul", "mad", "div", "rem", "min", "max", "neg", "abs", mods=_ARITHMETIC + " lo hi wide u16x2 s16x2")
def arithmetic(g, ins: Insn, part: bool) -> list[str]:
    ty = ins.parts[-1]
    if ty in FLOAT_TYPES:
        return _float(g, ins, part)
    if ty in ("u16x2", "s16x2"):
        if list(ins.parts[:-1]) not in (["min"], ["max"]):
            raise UnsupportedError(ins.op)
        a, b = _values(g, ins, 32)
        return [g.assign(ins.ops[0], f"iminmax2({a}, {b}, {ty[0] == 's'}, {ins.parts[0] == 'max'})", part)]
    if ty not in INTEGER_TYPES:
        raise UnsupportedError(ins.op)
    return [g.assign(ins.ops[0], _integer(ins.parts[0], ty, _values(g, ins, WIDTH[ty]), ins.ops, g, ins), part)]


@op("fma", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", mods=_ARITHMETIC)
def float_only(g, ins: Insn, part: bool) -> list[str]:
    return _float(g, ins, part)


@op("and", "or", "xor", mods=INTEGER + " pred")
def bitwise(g, ins: Insn, part: bool) -> list[str]:
    bits = WIDTH[ins.parts[-1]]
    sign = {"and": "&", "or": "|", "xor": "^"}[ins.parts[0]]
    return [g.assign(ins.ops[0], f"{g.val(ins.ops[1], bits)} {sign} {g.val(ins.ops[2], bits)}", part)]


@op("not", mods=INTEGER + " pred")
def invert(g, ins: Insn, part: bool) -> list[str]:
    bits = WIDTH[ins.parts[-1]]
    return [g.assign(ins.ops[0], f"{g.val(ins.ops[1], bits)} ^ {'True' if bits == 1 else FULL[bits]}", part)]


@op("shl", "shr", mods=INTEGER)
def shift(g, ins: Insn, part: bool) -> list[str]:
    ty = ins.parts[-1]
    bits = WIDTH[ty]
    f = "shl" if ins.parts[0] == "shl" else "shrs" if ty[0] == "s" else "shru"
    return [g.assign(ins.ops[0], f"{f}({g.val(ins.ops[1], bits)}, {g.val(ins.ops[2], 32)}, {bits})", part)]


@op("shf.l", "shf.r", mods="wrap clamp b32")
def funnel(g, ins: Insn, part: bool) -> list[str]:
    a, b, c = _values(g, ins, 32)
    return [g.assign(ins.ops[0], f"shf({a}, {b}, {c}, {ins.parts[1] == 'l'}, {'wrap' in ins.parts})", part)]


@op("prmt", mods="b32 f4e b4e rc8 ecl ecr rc16")
def permute(g, ins: Insn, part: bool) -> list[str]:
    a, b, c = _values(g, ins, 32)
    mode = ins.parts[2] if len(ins.parts) > 2 else ""
    return [g.assign(ins.ops[0], f"prmt({a}, {b}, {c}, {mode!r})", part)]


@op("dp4a", "dp2a.lo", "dp2a.hi", mods="u32 s32")
def dot_product(g, ins: Insn, part: bool) -> list[str]:
    types = ins.parts[-2:]
    if len(ins.parts) != (3 if ins.parts[0] == "dp4a" else 4):
        raise UnsupportedError(ins.op)
    args = [*_values(g, ins, 32), *(str(t == "s32") for t in types)]
    if ins.parts[0] == "dp2a":
        args.append(str(ins.parts[1] == "hi"))
    return [g.assign(ins.ops[0], f"{ins.parts[0]}({', '.join(args)})", part)]


@op("lop3", mods="b32")
def lop3(g, ins: Insn, part: bool) -> list[str]:
    a, b, c = (g.val(o, 32) for o in ins.ops[1:4])
    return [g.assign(ins.ops[0], f"lop3({a}, {b}, {c}, {ins.ops[4][1]})", part)]


@op("bfe", mods="u32 s32 u64 s64")
def extract(g, ins: Insn, part: bool) -> list[str]:
    ty = ins.parts[-1]
    a = g.val(ins.ops[1], WIDTH[ty])
    return [
        g.assign(ins.ops[0], f"bfe({a}, {g.val(ins.ops[2])}, {g.val(ins.ops[3])}, {WIDTH[ty]}, {ty[0] == 's'})", part)
    ]


@op("bfi", mods="b32 b64")
def insert(g, ins: Insn, part: bool) -> list[str]:
    bits = WIDTH[ins.parts[-1]]
    a, b = g.val(ins.ops[1], bits), g.val(ins.ops[2], bits)
    return [g.assign(ins.ops[0], f"bfi({a}, {b}, {g.val(ins.ops[3])}, {g.val(ins.ops[4])}, {bits})", part)]


@op("clz", "brev", mods="b32 b64")
def leading(g, ins: Insn, part: bool) -> list[str]:
    bits = WIDTH[ins.parts[-1]]
    return [g.assign(ins.ops[0], f"{ins.parts[0]}({g.val(ins.ops[1], bits)}, {bits})", part)]


@op("popc", mods="b32 b64")
def popc(g, ins: Insn, part: bool) -> list[str]:
    return [g.assign(ins.ops[0], f"popc({g.val(ins.ops[1], WIDTH[ins.parts[-1]])})", part)]


@op("bfind", mods="u32 s32 u64 s64 shiftamt")
def bfind(g, ins: Insn, part: bool) -> list[str]:
    ty = ins.parts[-1]
    bits = WIDTH[ty]
    e = f"bfind({g.val(ins.ops[1], bits)}, {bits}, {ty[0] == 's'}, {'shiftamt' in ins.parts})"
    return [g.assign(ins.ops[0], e, part)]


@op("fns", mods="b32")
def find_nth_set(g, ins: Insn, part: bool) -> list[str]:
    return [g.assign(ins.ops[0], f"fns({', '.join(g.val(o) for o in ins.ops[1:])})", part)]


@op("copysign", mods="f32 f64")
def copysign(g, ins: Insn, part: bool) -> list[str]:
    ty = ins.parts[-1]
    a, b = _values(g, ins, WIDTH[ty])
    return [g.assign(ins.ops[0], f"copysign({a}, {b}, {ty!r})", part)]


@op("testp", mods="finite infinite number notanumber normal subnormal f32 f64")
def testp(g, ins: Insn, part: bool) -> list[str]:
    ty = ins.parts[-1]
    return [g.assign(ins.ops[0], f"testp({ins.parts[1]!r}, {ty!r}, {g.val(ins.ops[1], WIDTH[ty])})", part)]


@op("selp", mods=INTEGER + " " + FLOAT)
def select(g, ins: Insn, part: bool) -> list[str]:
    bits = WIDTH[ins.parts[-1]]
    a, b = g.val(ins.ops[1], bits), g.val(ins.ops[2], bits)
    return [g.assign(ins.ops[0], f"selp({g.val(ins.ops[3], 1)}, {a}, {b}, {bits})", part)]


_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_BOOLEAN = {"and": "&", "or": "|", "xor": "^"}


def _signed(g, o, bits: int) -> str:
    if o[0] == "imm":
        x = o[1] & ((1 << bits) - 1)
        return str(x - (1 << bits) if x >> (bits - 1) else x)
    return f"s{bits}({g.val(o, bits)})"


@op(
    "setp", mods=INTEGER + " " + FLOAT + " eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan and or xor ftz"
)
def compare(g, ins: Insn, part: bool) -> list[str]:
    k, ops = ins.parts, ins.ops
    ty, bits = k[-1], WIDTH[k[-1]]
    if ty in FLOAT_TYPES:
        f = g.constant(f"make_fsetp({k[1]!r}, {ty!r}, {tuple(x for x in k[2:-1] if x not in _BOOLEAN)!r})")
        e = f"{f}({g.val(ops[1], bits)}, {g.val(ops[2], bits)})"
    else:
        if k[1] not in _COMPARE or "ftz" in k:
            raise UnsupportedError(ins.op)
        sign = _COMPARE[k[1]]
        if ty[0] == "s" and sign not in ("==", "!="):
            a, b = _signed(g, ops[1], bits), _signed(g, ops[2], bits)
        else:
            a, b = g.val(ops[1], bits), g.val(ops[2], bits)
        e = f"({a} {sign} {b})"
    boolean = next((x for x in k[2:-1] if x in _BOOLEAN), None)
    tail = f" {_BOOLEAN[boolean]} {g.val(ops[3], 1)}" if boolean else ""
    if ops[0][0] == "pair":
        return [f"t_ = {e}", g.assign(ops[0][1], f"t_{tail}", part), g.assign(ops[0][2], f"(t_ ^ True){tail}", part)]
    return [g.assign(ops[0], e + tail, part)]


@op("mov", mods=INTEGER + " " + FLOAT + " b128 pred")
def move(g, ins: Insn, part: bool) -> list[str]:
    d, s = ins.ops
    bits = WIDTH[ins.parts[-1]]
    if bits == 128:
        if s[0] == "vec":
            return [g.assign(d, f"({g.val(s[1][0], 64)}, {g.val(s[1][1], 64)})", part)]
        if d[0] == "vec":
            return [g.assign(x, f"{g.val(s, 128)}[{j}]", part) for j, x in enumerate(d[1]) if x[0] != "sink"]
        return [g.assign(d, g.val(s, 128), part)]
    if d[0] == "vec":
        each = bits // len(d[1])
        out = [f"t_ = {g.val(s, bits)}"]
        out += [g.assign(x, f"field(t_, {j * each}, {each})", part) for j, x in enumerate(d[1]) if x[0] != "sink"]
        return out
    if s[0] == "vec":
        each = bits // len(s[1])
        return [g.assign(d, f"pack(({', '.join(g.val(x, each) for x in s[1])},), {each}, {bits})", part)]
    return [g.assign(d, g.val(s, bits, raw=True), part)]


@op("cvt.pack.sat", mods="u8 s8 u16 s16 u4 s4 u2 s2 s32 b32")
def convert_pack(g, ins: Insn, part: bool) -> list[str]:
    args = ", ".join(_values(g, ins, 32))
    return [g.assign(ins.ops[0], f"cvt_pack({ins.parts[3]!r}, ({args},))", part)]


@op(
    "cvt",
    mods=INTEGER
    + " "
    + FLOAT
    + " "
    + _FORMATS
    + " rn rz rm rp rni rzi rmi rpi rna rs ftz sat satfinite relu scaled n2",
)
def convert(g, ins: Insn, part: bool) -> list[str]:
    k = ins.parts
    bits = g.width(ins.ops[0]) or 32
    f = g.constant(f"make_cvt({tuple(k[1:-2])!r}, {k[-2]!r}, {k[-1]!r}, {bits})")
    src = WIDTH.get(k[-1], 32)
    args: list[str] = []
    for o in ins.ops[1:]:
        args += [g.val(x, src) for x in o[1]] if o[0] == "vec" else [g.val(o, src)]
    return [g.assign(ins.ops[0], f"{f}({', '.join(args)})", part)]


@op("cvta", mods="to u64 u32 global shared shared::cta shared::cluster local const param")
def convert_address(g, ins: Insn, part: bool) -> list[str]:
    src = g.val(ins.ops[1], 64)
    space = next(x for x in ins.parts[1:] if x != "to")
    if space.startswith("shared"):
        src = f"({src} - SHARED_BASE) & 0xFFFFFFFFFFFFFFFF" if "to" in ins.parts else f"({src} + SHARED_BASE)"
    return [g.assign(ins.ops[0], src, part)]


@op("mapa", mods="shared::cluster u32 u64")
def map_address(g, ins: Insn, part: bool) -> list[str]:
    bits = 64 if ins.parts[-1] == "u64" else 32
    e = f"mapa({g.val(ins.ops[1], bits)}, {g.val(ins.ops[2], 32)}, {'shared::cluster' not in ins.parts})"
    return [g.assign(ins.ops[0], e, part)]


@op("getctarank", mods="shared::cluster u32 u64")
def cta_rank(g, ins: Insn, part: bool) -> list[str]:
    return [g.assign(ins.ops[0], f"({g.val(ins.ops[1], 64)} >> 24) & 0xFF", part)]


@op("isspacep", mods="global shared shared::cta shared::cluster local")
def is_space(g, ins: Insn, part: bool) -> list[str]:
    return [g.assign(ins.ops[0], f"isspacep({ins.parts[1]!r}, {g.val(ins.ops[1], 64)})", part)]
