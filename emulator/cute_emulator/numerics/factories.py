"""Instruction arithmetic bound to its types and modifiers, once per translated instruction.

Each factory refuses (UnsupportedError) a modifier or a combination that is not modelled, so that nothing is silently
dropped; the function it returns takes and returns register values.
"""

import numpy as np

from ..errors import UnsupportedError
from .atomics import FLOAT_TYPES, atom_op
from .convert import ITY, cvt
from .floats import PACKED, WIDTH, fop, fsetp
from .formats import CODE_BITS
from .lanes import M32, full

_ROUND = ("rn", "rz", "rm", "rp")
_ARITHMETIC = {
    "add": {*_ROUND, "ftz", "sat"},
    "sub": {*_ROUND, "ftz", "sat"},
    "mul": {*_ROUND, "ftz", "sat"},
    "fma": {*_ROUND, "ftz", "sat", "relu"},
    "mad": {*_ROUND, "ftz", "sat"},
    "div": {*_ROUND, "ftz", "approx", "full"},
    "rcp": {*_ROUND, "ftz", "approx"},
    "sqrt": {*_ROUND, "ftz", "approx"},
    "min": {"ftz", "NaN", "xorsign", "xorsign.abs", "abs"},
    "max": {"ftz", "NaN", "xorsign", "xorsign.abs", "abs"},
    "neg": {"ftz"},
    "abs": {"ftz"},
    **{name: {"ftz", "approx"} for name in ("rsqrt", "ex2", "lg2", "sin", "cos", "tanh")},
}


def _refuse(what, mods, allowed):
    for m in mods:
        if m not in allowed:
            raise UnsupportedError(f"modifier .{m} of {what}")


def make_fop(name, ty, mods):
    """Function of the operands of ``name{.mods}.ty`` (see :func:`.floats.fop` for the names and types)."""
    what = ".".join((name, *mods, ty))
    if name not in _ARITHMETIC or (ty not in WIDTH and ty not in PACKED):
        raise UnsupportedError(what)
    _refuse(what, mods, _ARITHMETIC[name])
    rounding = [m for m in mods if m in _ROUND]
    if len(rounding) > 1:
        raise UnsupportedError(what)
    if PACKED.get(ty, ty) in ("f16", "bf16") and ((rounding and rounding[0] != "rn") or name in ("div", "rcp", "sqrt")):
        raise UnsupportedError(what)
    if ty == "f64" and rounding and rounding[0] != "rn" and name == "sqrt":
        raise UnsupportedError(what)
    kw = {
        "sat": "sat" in mods,
        "nan": "NaN" in mods,
        "relu": "relu" in mods,
        "rnd": rounding[0] if rounding else None,
        "ftz": "ftz" in mods,
        "xorsign": "xorsign" in mods or "xorsign.abs" in mods,
    }
    return lambda *args: fop(name, ty, args, **kw)


def make_fop_mixed(name, wide, narrow, mods):
    """Function of ``name{.mods}.wide.narrow``: the last operand is wide, the others are narrow and widened exactly."""
    what = ".".join((name, *mods, wide, narrow))
    if name not in ("add", "sub", "fma") or wide != "f32" or narrow not in ("f16", "bf16"):
        raise UnsupportedError(what)
    body = make_fop(name, wide, mods)
    widen = make_cvt((), wide, narrow, 32)
    return lambda *args: body(*[widen(a) for a in args[:-1]], args[-1])


def make_fsetp(cmp, ty, mods):
    """Predicate function of ``setp.cmp{.mods}.ty``."""
    what = ".".join(("setp", cmp, *mods, ty))
    _refuse(what, mods, {"ftz"})
    if ty not in WIDTH or cmp not in (
        *("eq", "ne", "lt", "le", "gt", "ge"),
        *("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"),
    ):
        raise UnsupportedError(what)
    ftz = "ftz" in mods
    return lambda a, b: fsetp(cmp, ty, a, b, ftz)


def _can_saturate(dst, src):
    """Return whether a source value exists that the destination type (bits, signed) cannot hold."""
    (db, ds), (sb, ss) = dst, src
    return (ss and not ds) or sb - ss > db - ds


def make_cvt(mods, dty, sty, dbits):
    """Function of the source operands of ``cvt{.mods}.dty.sty`` (see :func:`.convert.cvt`)."""
    what = ".".join(("cvt", *mods, dty, sty))
    operands = 1
    if dty in ITY:
        allowed = {"sat"} if sty in ITY else {"rni", "rzi", "rmi", "rpi", "ftz", "sat"}
    elif dty == "ue8m0x2":
        allowed, operands = {"rz", "rp", "satfinite"}, 2 if sty == "f32" else 1
    elif dty[:-2] in CODE_BITS:
        allowed, operands = {"rn", "rs", "relu", "satfinite"}, 5 if dty[-1] == "4" else 2 if sty == "f32" else 1
        if "satfinite" not in mods:
            raise UnsupportedError(f"{what} without .satfinite")
    elif dty in ("f16x2", "bf16x2") and sty == "f32":
        allowed, operands = {"rn", "rz", "rs", "relu", "satfinite"}, 3 if "rs" in mods else 2
    elif dty in PACKED:
        allowed = {"rn", "relu"}
    elif sty in ITY:
        allowed = {*_ROUND}
    elif dty == "tf32":
        allowed = {"rn", "rz", "rna", "relu", "satfinite"}
    else:
        allowed = {*_ROUND, "rni", "rzi", "rmi", "rpi", "ftz", "sat", "relu", "satfinite"}
    _refuse(what, mods, allowed)
    if "sat" in mods and dty in ITY and sty in ITY and not _can_saturate(ITY[dty], ITY[sty]):
        raise UnsupportedError(f"{what}: every value fits, where .sat is not allowed")
    mods = tuple(mods)
    cvt(mods, dty, sty, (0,) * operands, dbits)  # refuses what the arithmetic does not define
    return lambda *args: cvt(mods, dty, sty, args, dbits)


def make_atom(op, ty, mods):
    """Function ``(old, *values) -> new`` of ``atom``/``red``, on raw bits: Python integers, or arrays of lanes."""
    what = ".".join((op, *mods, ty))
    _refuse(what, mods, {"noftz", "ftz"})
    atom_op(op, ty, 0, (0, 0))
    # red/atom.add.f32 flushes subnormals in shared memory only on hardware older than sm_90: never here
    if ty in FLOAT_TYPES and "ftz" in mods:
        raise UnsupportedError(what)
    return lambda old, *vals: atom_op(op, ty, old, vals)


def redux(op, value, mask, ty, mods=()):
    """``redux.sync``: the reduction of ``value`` over the lanes of the boolean ``mask``, as a uniform value.

    op: add, min, max, and, or, xor; ty: u32, s32, b32, or f32 (min/max, with modifiers abs and NaN).
    """
    a = full(value, 32)[mask]
    if ty == "f32":
        _refuse(f"redux.{op}.f32", mods, {"abs", "NaN"})
        if op not in ("min", "max"):
            raise UnsupportedError(f"redux.{op}.f32")
        lanes = [int(x) & 0x7FFFFFFF if "abs" in mods else int(x) for x in a]
        r = lanes[0]
        for x in lanes[1:]:
            r = fop(op, "f32", (r, x), nan="NaN" in mods)
        return fop(op, "f32", (r, r), nan="NaN" in mods)
    _refuse(f"redux.{op}.{ty}", mods, ())
    if ty == "s32":
        a = a.view(np.int32)
    if op == "add":
        return int(a.astype(np.int64).sum()) & M32
    if op in ("min", "max"):
        return int(a.min() if op == "min" else a.max()) & M32
    ufunc = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.get(op)
    if ufunc is None:
        raise UnsupportedError(f"redux.{op}.{ty}")
    return int(ufunc.reduce(a)) & M32
