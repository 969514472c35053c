"""Bulk and TMA copies, tensor maps, cluster launch control, tensor-core instructions."""

from __future__ import annotations

import re

from ..errors import UnsupportedError
from ..parser import Insn
from .memory import elements
from .table import op

_HINT = r"L2::cache_hint"
_COPY = (
    "global shared::cta shared::cluster shared mbarrier::complete_tx::bytes bulk_group multicast::cluster "
    "cta_group::1 cta_group::2"
)
_REDUCTIONS = ("add", "min", "max", "and", "or", "xor", "inc", "dec")


def _coordinates(g, memory) -> str:
    return "(" + ", ".join(g.val(c) for c in memory[3][0][1]) + ",)"


@op("cp.async.bulk.commit_group", dst=0, line=True)
def bulk_commit(g, ins: Insn, part: bool) -> list[str]:
    return ["w.bulk_commit()"]


@op("cp.async.bulk.wait_group", mods="read", dst=0, line=True)
def bulk_wait(g, ins: Insn, part: bool) -> list[str]:
    return [f"t_ = w.bulk_wait({g.val(ins.ops[0])}, {'read' in ins.parts})", "if not t_():", "  yield t_", "  t_()"]


@op(
    "cp.async.bulk.tensor",
    mods="1d 2d 3d 4d 5d tile tile::gather4 tile::scatter4 " + _COPY,
    pattern=_HINT,
    dst=0,
    line=True,
)
def tensor_copy(g, ins: Insn, part: bool) -> list[str]:
    k, ops = ins.parts, ins.ops
    dim = int(k[4][0])
    if k[5].startswith("shared"):
        mask = g.val(ops[3], 16) if "multicast::cluster" in k else "0"
        group = 2 if "cta_group::2" in k else 1
        return [
            f"w.tma_load({dim}, {g.addr(ops[0])}, {g.addr(ops[1])}, {_coordinates(g, ops[1])}, {g.addr(ops[2])}, "
            f"{mask}, {group}, m)"
        ]
    if k[5] != "global":
        raise UnsupportedError(ins.op)
    return [f"w.tma_store({dim}, {g.addr(ops[0])}, {_coordinates(g, ops[0])}, {g.addr(ops[1])}, None, m)"]


@op(
    "cp.reduce.async.bulk.tensor",
    mods="1d 2d 3d 4d 5d tile " + _COPY + " " + " ".join(_REDUCTIONS),
    pattern=_HINT,
    dst=0,
    line=True,
)
def tensor_reduce(g, ins: Insn, part: bool) -> list[str]:
    k, ops = ins.parts, ins.ops
    red = next(x for x in k if x in _REDUCTIONS)
    return [f"w.tma_store({int(k[5][0])}, {g.addr(ops[0])}, {_coordinates(g, ops[0])}, {g.addr(ops[1])}, {red!r}, m)"]


@op("cp.async.bulk", mods=_COPY, pattern=_HINT, dst=0, line=True)
def bulk_copy(g, ins: Insn, part: bool) -> list[str]:
    k, ops = ins.parts, ins.ops
    d, s = k[3], k[4]
    if d.startswith("shared::c") and s == "global":
        mask = g.val(ops[4], 16) if "multicast::cluster" in k else "0"
        return [f"w.bulk_g2s({g.addr(ops[0])}, {g.addr(ops[1])}, {g.val(ops[2])}, {g.addr(ops[3])}, {mask}, m)"]
    if d == "global":
        return [f"w.bulk_s2g({g.addr(ops[0])}, {g.addr(ops[1])}, {g.val(ops[2])}, None, m)"]
    if d == "shared::cluster" and s == "shared::cta":
        return [f"w.bulk_s2s({g.addr(ops[0])}, {g.addr(ops[1])}, {g.val(ops[2])}, {g.addr(ops[3])}, m)"]
    raise UnsupportedError(ins.op)


@op(
    "cp.reduce.async.bulk",
    mods="global shared::cta bulk_group noftz f16 bf16 f32 f64 u32 s32 u64 s64 b32 b64 " + " ".join(_REDUCTIONS),
    pattern=_HINT, dst=0, line=True,
)  # fmt: skip
def bulk_reduce(g, ins: Insn, part: bool) -> list[str]:
    k, ops = ins.parts, ins.ops
    if k[4] != "global":
        raise UnsupportedError(ins.op)
    red = next(x for x in k if x in _REDUCTIONS)
    f = g.constant(f"bulk_reduction({red!r}, {k[-1]!r})")
    return [f"w.bulk_s2g({g.addr(ops[0])}, {g.addr(ops[1])}, {g.val(ops[2])}, {f}, m)"]


@op("cp.async.ca", "cp.async.cg", mods="shared shared::cta global", pattern=r"L2::\w+", dst=0, line=True)
def cp_async(g, ins: Insn, part: bool) -> list[str]:
    ops = ins.ops
    size = ops[2][1]
    if len(ops) > 3 and g.width(ops[3]) == 1:
        raise UnsupportedError(f"{ins.op} with an ignore-src predicate")
    source = g.val(ops[3]) if len(ops) > 3 and "cache_hint" not in ins.op else str(size)
    return [f"w.cp_async({g.addr(ops[0])}, {g.addr(ops[1])}, {size}, {source}, m)"]


@op("cp.async.commit_group", dst=0, line=True)
def cp_async_commit(g, ins: Insn, part: bool) -> list[str]:
    return ["w.cp_async_commit()"]


@op("cp.async.wait_group", dst=0, line=True)
def cp_async_wait(g, ins: Insn, part: bool) -> list[str]:
    return [f"w.cp_async_wait({g.val(ins.ops[0])})"]


@op("cp.async.wait_all", dst=0, line=True)
def cp_async_wait_all(g, ins: Insn, part: bool) -> list[str]:
    return ["w.cp_async_wait(-1)"]


@op("cp.async.mbarrier.arrive", mods="noinc shared shared::cta b64", dst=0, line=True)
def cp_async_arrive(g, ins: Insn, part: bool) -> list[str]:
    return [f"w.cp_async_mbarrier({g.addr(ins.ops[0])}, {'noinc' in ins.parts}, m)"]


@op(
    "tensormap.replace",
    mods="tile global_address global_dim global_stride box_dim element_stride swizzle_mode rank global shared::cta "
    "b1024 b64 b32",
    dst=0,
    line=True,
)
def tensormap_replace(g, ins: Insn, part: bool) -> list[str]:
    o = ins.ops[1:]
    ordinal = o[0][1] if len(o) > 1 else 0
    shared = any(x.startswith("shared") for x in ins.parts)
    return [f"w.tensormap_replace({ins.parts[3]!r}, {ordinal}, {g.addr(ins.ops[0])}, {g.val(o[-1], 64)}, {shared}, m)"]


@op(
    "tensormap.cp_fenceproxy",
    mods="global shared::cta tensormap::generic release cta cluster gpu sys sync aligned",
    dst=0,
    line=True,
)
def tensormap_copy(g, ins: Insn, part: bool) -> list[str]:
    return [f"w.tensormap_copy({g.addr(ins.ops[0])}, {g.addr(ins.ops[1])}, m)"]


@op(
    "clusterlaunchcontrol.try_cancel",
    mods="async shared::cta mbarrier::complete_tx::bytes multicast::cluster::all b128",
    dst=0,
    line=True,
)
def clc_try_cancel(g, ins: Insn, part: bool) -> list[str]:
    return [
        f"w.clc_try_cancel({g.addr(ins.ops[0])}, {g.addr(ins.ops[1])}, {'multicast::cluster::all' in ins.parts}, m)"
    ]


@op("clusterlaunchcontrol.query_cancel.is_canceled", mods="pred b128")
def clc_canceled(g, ins: Insn, part: bool) -> list[str]:
    return [g.assign(ins.ops[0], f"clc_canceled({g.val(ins.ops[1], 64)})", part)]


@op(
    "clusterlaunchcontrol.query_cancel.get_first_ctaid", "clusterlaunchcontrol.query_cancel.get_first_ctaid::x",
    "clusterlaunchcontrol.query_cancel.get_first_ctaid::y", "clusterlaunchcontrol.query_cancel.get_first_ctaid::z",
    mods="v4 b32 b128",
)  # fmt: skip
def clc_ctaid(g, ins: Insn, part: bool) -> list[str]:
    v = g.val(ins.ops[1], 64)
    if "::" in ins.parts[2]:
        return [g.assign(ins.ops[0], f"clc_ctaid({v}, {'xyz'.index(ins.parts[2][-1])})", part)]
    return [g.assign(x, f"clc_ctaid({v}, {j})", part) for j, x in enumerate(ins.ops[0][1][:3]) if x[0] != "sink"]


# ---- tcgen05 ----
_GROUP = "cta_group::1 cta_group::2"
_SHAPES = "32x32b 16x64b 16x128b 16x256b 16x32bx2 x1 x2 x4 x8 x16 x32 x64 x128 sync aligned b32"


def _cta_group(ins: Insn) -> int:
    return 2 if "cta_group::2" in ins.parts else 1


@op("tcgen05.alloc", mods=_GROUP + " sync aligned shared::cta b32", dst=0, line=True)
def tc_alloc(g, ins: Insn, part: bool) -> list[str]:
    return [
        f"t_ = w.tc_alloc({g.addr(ins.ops[0])}, {g.val(ins.ops[1])}, {_cta_group(ins)})",
        "while not t_(): yield t_",
    ]


@op("tcgen05.dealloc", mods=_GROUP + " sync aligned b32", dst=0, line=True)
def tc_dealloc(g, ins: Insn, part: bool) -> list[str]:
    return [f"w.tc_dealloc({g.val(ins.ops[0])}, {g.val(ins.ops[1])}, {_cta_group(ins)})"]


@op("tcgen05.commit", mods=_GROUP + " mbarrier::arrive::one shared::cluster multicast::cluster b64", dst=0, line=True)
def tc_commit(g, ins: Insn, part: bool) -> list[str]:
    mask = g.val(ins.ops[1], 16) if len(ins.ops) > 1 else "None"
    return [f"w.tc_commit({g.addr(ins.ops[0])}, {mask}, {_cta_group(ins)}, m)"]


def _shape(ins: Insn) -> tuple[str, int]:
    shape = next(x for x in ins.parts if re.match(r"^(16x|32x)", x))
    return shape, int(next(x for x in ins.parts if re.match(r"^x\d+$", x))[1:])


@op("tcgen05.ld", mods=_SHAPES + " pack::16b", line=True)
def tc_ld(g, ins: Insn, part: bool) -> list[str]:
    shape, num = _shape(ins)
    dst = elements(ins.ops[0])
    imm = g.val(ins.ops[2]) if len(ins.ops) > 2 else "0"
    call = f"w.tc_ld({shape!r}, {num}, {g.addr(ins.ops[1])}, {'pack::16b' in ins.parts}, {imm})"
    if not part and all(d[0] == "reg" for d in dst):
        return [f"{', '.join(g.names[d[1]] for d in dst)}, = {call}"]
    return [f"t_ = {call}"] + [g.assign(d, f"t_[{j}]", part) for j, d in enumerate(dst) if d[0] == "reg"]


@op("tcgen05.st", mods=_SHAPES + " unpack::16b", dst=0, line=True)
def tc_st(g, ins: Insn, part: bool) -> list[str]:
    shape, num = _shape(ins)
    source = ins.ops[-1] if ins.ops[1][0] == "imm" else ins.ops[1]
    imm = g.val(ins.ops[1]) if ins.ops[1][0] == "imm" else "0"
    vals = ", ".join(g.val(s) for s in elements(source))
    return [f"w.tc_st({shape!r}, {num}, {g.addr(ins.ops[0])}, ({vals},), {'unpack::16b' in ins.parts}, {imm})"]


@op("tcgen05.wait::ld", "tcgen05.wait::st", mods="sync aligned", dst=0, line=True)
def tc_wait(g, ins: Insn, part: bool) -> list[str]:
    return [f"w.tc_wait({ins.parts[1][6:]!r})"]


@op(
    "tcgen05.cp",
    mods=_GROUP
    + " 128x256b 128x128b 64x128b 32x128b 4x256b warpx4 warpx2::02_13 warpx2::01_23 b8x16 b6x16_p32 b4x16_p64",
    dst=0, line=True,
)  # fmt: skip
def tc_cp(g, ins: Insn, part: bool) -> list[str]:
    shape = next(x for x in ins.parts if re.match(r"^\d+x\d+b$", x))
    multicast = next((x for x in ins.parts if x.startswith("warpx")), "")
    fmt = [x for x in ins.parts if x.startswith("b") and "x16" in x]
    taddr = g.addr(ins.ops[0]) if ins.ops[0][0] == "mem" else g.val(ins.ops[0])
    return [f"w.tc_cp({shape!r}, {multicast!r}, {fmt!r}, {taddr}, {g.val(ins.ops[1], 64)}, {_cta_group(ins)}, m)"]


@op(
    "tcgen05.mma", mods=_GROUP + " block_scale scale_vec::1X scale_vec::2X scale_vec::4X block16 block32",
    pattern=r"kind::\w+|collector::a::\w+", dst=0, line=True,
)  # fmt: skip
def tc_mma(g, ins: Insn, part: bool) -> list[str]:
    k, ops = ins.parts, ins.ops
    kind = next(x for x in k if x.startswith("kind::"))[6:]
    in_tmem = ops[1][0] == "mem"
    a = g.addr(ops[1]) if in_tmem else g.val(ops[1], 64)
    rest = ops[4:]
    scales = scale_vec = disable = scale_d = "None"
    if "block_scale" in k:
        scale_vec = repr(next((x for x in k if x.startswith("scale_vec") or x in ("block16", "block32")), ""))
        scales = f"({g.addr(rest[0])}, {g.addr(rest[1])})"
        rest = rest[2:]
    if rest and rest[0][0] == "vec":
        disable = f"({', '.join(g.val(x) for x in rest[0][1])},)"
        rest = rest[1:]
    enable = g.val(rest[0], 1)
    if len(rest) > 1:
        scale_d = g.val(rest[1])
    return [
        f"w.tc_mma({_cta_group(ins)}, {kind!r}, {g.addr(ops[0])}, {a}, {in_tmem}, {g.val(ops[2], 64)}, "
        f"{g.val(ops[3])}, "
        f"{disable}, {enable}, {scale_d}, {scale_vec}, {scales}, m)"
    ]


@op("tcgen05.mma.sp", "tcgen05.mma.ws", "tcgen05.shift", pattern=r".*", dst=0)
def tc_refused(g, ins: Insn, part: bool) -> list[str]:
    raise UnsupportedError(ins.op)


# ---- wgmma, mma.sync ----
@op("wgmma.fence", mods="sync aligned", dst=0, line=True)
def wgmma_fence(g, ins: Insn, part: bool) -> list[str]:
    return ["w.wgmma_fence()"]


@op("wgmma.commit_group", mods="sync aligned", dst=0, line=True)
def wgmma_commit(g, ins: Insn, part: bool) -> list[str]:
    return ["w.wgmma_commit()"]


@op("wgmma.wait_group", mods="sync aligned", dst=0, line=True)
def wgmma_wait(g, ins: Insn, part: bool) -> list[str]:
    return [f"t_ = w.wgmma_wait({g.val(ins.ops[0])})", "if not t_():", "  yield t_", "  t_()"]


@op(
    "wgmma.mma_async",
    mods="sync aligned f32 s32 f16 bf16 tf32 e4m3 e5m2 s8 u8 satfinite",
    pattern=r"m64n\d+k\d+",
    accumulates=True,
    line=True,
)
def wgmma(g, ins: Insn, part: bool) -> list[str]:
    k, ops = ins.parts, ins.ops
    shape, dt, at, bt = [x for x in k[2:] if x not in ("sync", "aligned", "satfinite")]
    in_regs = ops[1][0] == "vec"
    a = f"({', '.join(g.val(x) for x in ops[1][1])},)" if in_regs else g.val(ops[1], 64)
    imm = tuple(x[1] for x in ops[4:])
    if any(x[0] != "imm" for x in ops[4:]):
        raise UnsupportedError(f"{ins.op} with a variable scale or transposition")
    dst = ", ".join(g.names[x[1]] for x in elements(ops[0]))
    return [
        f"{dst}, = w.wgmma({shape!r}, {dt!r}, {at!r}, {bt!r}, ({dst},), {a}, {in_regs}, {g.val(ops[2], 64)}, "
        f"{g.val(ops[3], 1)}, {imm!r}, m, {'satfinite' in k})"
    ]


@op(
    "mma.sync",
    mods="aligned row col f32 s32 f16 bf16 tf32 e4m3 e5m2 e2m1 s8 u8 satfinite block_scale ue8m0 ue4m3 "
    "kind::mxf8f6f4 kind::mxf4 kind::mxf4nvf4 scale_vec::1X scale_vec::2X scale_vec::4X",
    pattern=r"m\d+n\d+k\d+",
)
def mma_sync(g, ins: Insn, part: bool) -> list[str]:
    shape = next(x for x in ins.parts if re.match(r"^m\d+n\d+k\d+$", x))
    a, b, c = (f"({', '.join(g.val(x) for x in elements(o))},)" for o in ins.ops[1:4])
    m, n, k = (int(x) for x in re.findall(r"\d+", shape))
    out = [f"w.launch.count_mma({2 * m * n * k})"]
    if "block_scale" in ins.parts:
        types = ins.parts[-5:]
        kinds = [x for x in ins.parts if "::" in x]
        scales = []
        for data, selector in (ins.ops[4:6], ins.ops[6:8]):
            word, byte, thread = *elements(data), *elements(selector)
            scales.append(f"({g.val(word)}, {g.val(byte, 16)}, {g.val(thread, 16)})")
        out.append(f"t_ = mma_scaled({shape!r}, {kinds!r}, {types!r}, {a}, {b}, {c}, ({', '.join(scales)}))")
    else:
        types = [x for x in ins.parts if x != "satfinite"][-4:]
        out.append(f"t_ = mma_sync({shape!r}, {types!r}, {a}, {b}, {c}, {'satfinite' in ins.parts})")
    return out + [g.assign(x, f"t_[{j}]", part) for j, x in enumerate(elements(ins.ops[0]))]
