"""The matrix of GEMM kernels on quantised operands: what they are made from, and what their code must look like."""

from __future__ import annotations

import itertools
import re

import torch

from tests.cutlass_kernels import quantizing_cases, sass
from tests.cutlass_kernels.matrix import REGISTER_FILE, Row, threads
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.cutlass_kernels.launchers.gemm_scaled import ScaledGemmKey
from tgl.cutlass_kernels.launchers.gemm_scaled_quantize import ScaledQuantizeKey
from tgl.ops.grouped_activation import Params

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
YES_NO = (True, False)
QUANTIZING = "quantizing"  # varlen_m with an activation that leaves quantised


def _tilings(kind: str) -> list[tuple[str, str, GemmConfig]]:
    """Every ``(architecture, format, tiling)`` that there is a kernel for."""
    found = []
    for name, form in OPERANDS.items():
        for m, n, c in itertools.product((64, 128, 256), (64, 128, 192), (1, 2)):
            tiling = GemmConfig(m, n, form.tile_k, cluster_n=c)
            if "sm_90" in form.archs and tilings.reason("sm_90", kind, tiling, form) is None:
                found.append(("sm_90", name, tiling))
        if "sm_100" in form.archs:
            sizes = itertools.product((128, 256), (64, 128, 256))
            pairs = [GemmConfig(m, n, form.tile_k, two_cta=m == 256) for m, n in sizes]
            found += [("sm_100", name, t) for t in pairs if tilings.reason("sm_100", kind, t, form) is None]
    return found


def _quantizing(*sizes: tuple[int, int]) -> list[tuple[str, str, GemmConfig]]:
    depth = OPERANDS["mxfp8"].tile_k
    return [("sm_100", "mxfp8", GemmConfig(m, n, depth, two_cta=m == 256)) for m, n in sizes]


TILINGS = {kind: _tilings(kind) for kind in (VARLEN_M, VARLEN_K)}
TILINGS[QUANTIZING] = _quantizing((128, 128), (256, 128), (128, 256), (256, 256))
USUAL = {
    kind: [
        (arch, name, tiling)
        for name, form in OPERANDS.items()
        for arch in form.archs
        if ARCHS[arch].wider_mmas  # the others' kernels have a matrix of their own
        for tiling in dict.fromkeys(tilings.choose_scaled(arch, kind, form, 4096, 4096, rows) for rows in (32, 2048))
    ]
    for kind in (VARLEN_M, VARLEN_K)
}
"""Tilings that are chosen for few and for many rows."""
USUAL[QUANTIZING] = _quantizing((128, 256), (256, 256), (256, 128))

ACTIVATIONS = {
    "swiglu": Params(),
    "alternating": Params("clamped_qgeglu", interleaved=True),
    "clamped": Params("clamped_qgeglu"),
    "srelu": Params("srelu"),
}

PARTS = {
    VARLEN_M: {
        "out": ("bfloat16", "float32"),
        "mixed": YES_NO,
        "b_rowwise": YES_NO,
        "bias": (None, "float32"),
        "bias_scale": (None, "bfloat16"),
        "zero_tail": YES_NO,
    },
    VARLEN_K: {"out": ("bfloat16", "float32"), "mixed": YES_NO, "accumulate": YES_NO},
    QUANTIZING: {
        "out": ("bfloat16", "float16"),
        "activation": tuple(ACTIVATIONS),
        "directions": ("both", "rows", "columns"),
        "scaling": ("rceil", "floor", "even"),
        "vectors": YES_NO,
        "b_rowwise": YES_NO,
    },
}
MMA = {
    ("sm_90", "fp8_tensor"): ("QGMMA", r"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{a}.{b}"),
    ("sm_90", "fp8_block"): ("QGMMA", r"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{a}.{b}"),
    ("sm_100", "fp8_tensor"): ("UTCQMMA", r"tcgen05.mma.cta_group::{ctas}.kind::f8f6f4"),
    ("sm_100", "fp8_block"): ("UTCQMMA", r"tcgen05.mma.cta_group::{ctas}.kind::f8f6f4"),
    ("sm_100", "mxfp8"): ("UTCQMMA", r"tcgen05.mma.cta_group::{ctas}.kind::mxf8f6f4.block_scale"),
    ("sm_100", "nvfp4"): ("UTCOMMA", r"tcgen05.mma.cta_group::{ctas}.kind::mxf4nvf4.block_scale"),
}
"""The machine instruction, and the one of PTX that it comes from."""


def allowed(choice: dict) -> bool:
    """Return whether such a kernel exists: NVFP4 has one element type, and data stored by place has its rows first."""
    _, name, tiling = choice["tiling"]
    if "activation" in choice:  # halves side by side need a whole atom of scales each
        return choice["activation"] in ("alternating", "srelu") or tiling.tile_n == 256
    by_place = OPERANDS[name].placed and not choice.get("b_rowwise", True)
    return not ((choice.get("bias_scale") and not choice["bias"]) or (name == "nvfp4" and choice["mixed"]) or by_place)


def key(kind: str, choice: dict) -> ScaledGemmKey | ScaledQuantizeKey:
    """Return the key of a kernel."""
    arch, name, tiling = choice["tiling"]
    if kind == QUANTIZING:
        vectors = torch.float32 if choice["vectors"] else None
        case = quantizing_cases.Case(
            *(tiling.tile_m, tiling.tile_n, (), ACTIVATIONS[choice["activation"]]),
            out=getattr(torch, choice["out"]),
            bias=vectors,
            probs=vectors,
            direction="rowwise" if choice["b_rowwise"] else "columnwise",
            rowwise=choice["directions"] != "columns",
            columnwise=choice["directions"] != "rows",
            dtype=getattr(torch, E5M2 if choice["scaling"] == "floor" else E4M3),
            scaling=choice["scaling"],
        )
        return quantizing_cases.key(case)
    form = OPERANDS[name]
    a, b = ("uint8", "uint8") if name == "nvfp4" else (E4M3, E5M2 if choice["mixed"] else E4M3)
    rows = kind == VARLEN_M
    spec = EpilogueSpec(
        choice["out"],
        choice.get("bias"),
        choice.get("bias_scale"),
        accumulate=choice.get("accumulate", False),
        tail=choice.get("zero_tail", False),
        alpha=form.alpha,
    )
    return ScaledGemmKey(kind, arch, True, name, a, b, rows and choice["b_rowwise"], spec, tiling)


def label(kind: str, choice: dict) -> str:
    arch, name, tiling = choice["tiling"]
    rest = [f"{n}={v}" for n, v in choice.items() if n != "tiling"]
    return " ".join([arch, name, f"{tiling.tile_m}x{tiling.tile_n}" + "x2" * (tiling.ctas == 2), kind, *rest])


def checked(kind: str, choice: dict, cubin: bytes, ptx: str) -> Row:
    """The kernel's line, after its machine code was found to be what it should be."""
    arch, name, tiling = choice["tiling"]
    report, plan = sass.inspect(cubin), key(kind, choice)
    mma, instruction = MMA[arch, name]
    assert report.spills == report.loops_over_lanes == 0
    assert report.frame == 0
    # Where sums are scaled on sm_100, by a second epilogue team, one more warp loads the scales.
    further = 5 * 32 if arch == "sm_100" and OPERANDS[name].block else 0
    assert report.registers * (threads(arch, tiling) + further) <= REGISTER_FILE
    assert report.count(mma) > 0
    assert report.count("QMMA") + report.count("HMMA") == 0  # what warps issue by themselves
    elements = {"a": plan.a_element[7:11], "b": plan.b_element[7:11]}
    assert instruction.format(n=tiling.tile_n, ctas=tiling.ctas, **elements) in ptx
    if OPERANDS[name].vector:
        assert report.count("UTCCP") > 0  # scales reach tensor memory
        assert not re.search(r"tcgen05\.mma(?!\S*block_scale)", ptx)
    if arch == "sm_90":
        # One wait per 64 rows of a warpgroup, in whole stages and in the last: more would be one for every single MMA.
        waits = max(tiling.tile_m // 128, 1) * (2 if kind == VARLEN_K else 1)
        assert report.count("WARPGROUP.DEPBAR") == waits
        if kind == VARLEN_K:
            assert sass.additions_in_turns(cubin) == 0
    # An adding store exactly where sums are formed in memory, that is in float32.
    adds = plan.spec.accumulate and plan.spec.out == "float32"
    assert (report.count("UTMAREDG") > 0) == adds
    assert (report.count("UTMASTG") > 0) == (not adds)
    total = sum(report.opcodes.values())
    return Row(report.registers, 0, report.spills, f"{report.count(mma)} {mma}", total, label(kind, choice))
