"""The matrix of GEMM kernels: what they are made from, and what their machine code must look like."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import cute_emulator
from tests.covers import covering
from tests.cutlass_kernels import activated_cases, gemm_cases, sass
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.config import LINE, VARLEN_K, VARLEN_M, WIDTHS, GemmConfig
from tgl.cutlass_kernels.launchers.gemm_activation import widths_of
from tgl.ops.grouped_activation import Params

REGISTER_FILE = 65536
ACTIVATED = "activated"  # varlen_m with an activation as second output
ACTIVATIONS = {
    "swiglu": Params(),
    "alternating": Params(interleaved=True),
    "srelu": Params("srelu"),
}

TILINGS = [("sm_90", GemmConfig(*t)) for t in ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128))]
TILINGS += [("sm_90", GemmConfig(*t)) for t in ((128, 192), (128, 256), (256, 64), (256, 128))]
TILINGS += [("sm_90", GemmConfig(*t, cluster_n=2)) for t in ((128, 128), (128, 256), (256, 128))]
TILINGS += [("sm_90", GemmConfig(*t, pingpong=True)) for t in ((64, 128), (64, 256), (128, 64), (128, 128))]
TILINGS += [("sm_90", GemmConfig(*t, pingpong=True)) for t in ((128, 192), (192, 128))]
TILINGS += [("sm_90", GemmConfig(128, 128, pingpong=True, cluster_n=2))]
TILINGS += [("sm_100", GemmConfig(128, n)) for n in (64, 128, 256)]
TILINGS += [("sm_100", GemmConfig(256, n, two_cta=True)) for n in (64, 128, 256)]

KINDS = (VARLEN_M, VARLEN_K, ACTIVATED)


def widths(choice: dict) -> tuple[int, ...]:
    """Return the columns of a tile that an epilogue with an activation takes; see ``gemm_activation.widths_of``."""
    params, (*_, k, n) = ACTIVATIONS[choice["activation"]], (1, 8, 16)
    b = torch.empty(1, k, n) if choice["b_row_major"] else torch.empty(1, n, k).transpose(1, 2)
    return tuple(width for width in widths_of(params, b) if width >= 2 * LINE)


def usual(kind: str) -> list[tuple[str, GemmConfig]]:
    """The tilings that are chosen by default."""
    of = VARLEN_M if kind == ACTIVATED else kind
    allowed = [(128, 256), (128, 192, 256)] if kind == ACTIVATED else [WIDTHS]
    sizes = list(itertools.product((64, 128, 512, 4096), (256, 4096), (32, 128, 1024, 4096), allowed))
    return [
        (arch, tiling)
        for arch in ("sm_90", "sm_100")
        for tiling in dict.fromkeys(tilings.choose(arch, of, *size) for size in sizes)
    ]


USUAL = {kind: usual(kind) for kind in KINDS}
EVERY = {kind: TILINGS for kind in (VARLEN_M, VARLEN_K)}
EVERY[ACTIVATED] = [(arch, tiling) for arch, tiling in TILINGS if tiling.tile_n >= 2 * LINE]

DTYPES = (torch.bfloat16, torch.float16)
YES_NO = (True, False)
PARTS = {
    VARLEN_M: {
        "dtype": DTYPES,
        "wide_out": YES_NO,
        "b_row_major": YES_NO,
        "bias": (None, "same", "float32"),
        "bias_scale": (None, "same", "float32"),
        "zero_tail": YES_NO,
    },
    VARLEN_K: {"dtype": DTYPES, "wide_out": YES_NO, "accumulate": YES_NO},
    ACTIVATED: {
        "dtype": DTYPES,
        "wide_out": YES_NO,
        "b_row_major": YES_NO,
        "bias": (None, "same", "float32"),
        "activation": tuple(ACTIVATIONS),
        "probs": YES_NO,
    },
}


def allowed(choice: dict) -> bool:
    if choice.get("activation") == "alternating" and choice["b_row_major"]:
        return False
    if "tiling" in choice:
        config = choice["tiling"][-1]
        if "activation" in choice and config.tile_n not in widths(choice):
            return False
        if choice.get("accumulate") and not choice["wide_out"] and 192 in (config.tile_m, config.tile_n):
            return False  # what is read before it is stored wants registers
    return not (choice.get("bias_scale") and not choice["bias"])


def every(choices: dict, allowed: Callable[[dict], bool] = allowed) -> list[dict]:
    """All combinations that can occur."""
    return [c for values in itertools.product(*choices.values()) if allowed(c := dict(zip(choices, values)))]


def pairwise(choices: dict, allowed: Callable[[dict], bool] = allowed, together: int = 2) -> list[dict]:
    """Return few combinations that hold every pair, or as many ``together``, of values that can occur so."""
    return covering(every(choices, allowed), dict, together)


def by_all_cores(compiled: Callable, kind: str, choices: list[dict]) -> list:
    """Return the results of ``compiled``, of a module, for every choice, by one process per core."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as pool:
        return list(pool.map(functools.partial(_one, compiled, kind), choices, chunksize=16))


def _one(compiled: Callable, kind: str, choice: dict) -> Any:
    """An error of one among thousands says which it is of."""
    try:
        return compiled(kind, choice)
    except Exception as error:
        raise AssertionError(f"{kind} {choice}") from error


def pairs_of(made: list[tuple[str, dict]], one: str, two: str) -> set[tuple[str, str]]:
    """Return the pairs of values of two axes of ``apart`` that occur together in ``made``."""
    return {(str(c[one]), str(c[two])) for c in map(apart, made) if {one, two} <= set(c)}


def apart(made: tuple[str, dict]) -> dict:
    """The choices of a kind and a choice, among them the kind, and instead of the tiling target, format and shape."""
    kind, choice = made
    *target, config = choice["tiling"]
    parts = {name: value for name, value in choice.items() if name != "tiling"}
    return {"kind": kind, "shape": (config.tile_m, config.tile_n), **dict(zip(("arch", "format"), target)), **parts}


def each(choices: dict, allowed: Callable[[dict], bool] = allowed) -> list[dict]:
    """Return few combinations that hold every value beside every target: an architecture and a format, if any."""
    targets: dict[tuple, list] = {}
    for tiling in choices["tiling"]:
        targets.setdefault(tiling[:-1], []).append(tiling)
    return [c for tilings in targets.values() for c in pairwise({**choices, "tiling": tilings}, allowed, together=1)]


def case(choice: dict) -> tuple[str, Any]:
    """The architecture, and a small problem that runs the kernel."""
    arch, config = choice["tiling"]
    dtype = choice["dtype"]
    named = {None: None, "same": dtype, "float32": torch.float32}
    if "activation" in choice:
        return arch, activated_cases.Case(
            config,
            (3, 0, 130, 65),
            ACTIVATIONS[choice["activation"]],
            tail=5,
            dtype=dtype,
            out=torch.float32 if choice["wide_out"] else dtype,
            b_row_major=choice["b_row_major"],
            bias=named[choice["bias"]],
            probs=torch.float32 if choice["probs"] else None,
        )
    return arch, gemm_cases.Case(
        config,
        (3, 0, 130, 65),
        tail=5,
        depth=72,
        columns=72,
        dtype=dtype,
        out=torch.float32 if choice["wide_out"] else dtype,
        b_row_major=choice.get("b_row_major", True),
        bias=named[choice.get("bias")],
        bias_scale=named[choice.get("bias_scale")],
        zero_tail=choice.get("zero_tail", True),
        accumulate=choice.get("accumulate", False),
    )


def kernel(arch: str, kind: str, tried: Any) -> Any:
    """The compiled kernel of a case; only inside ``emulate``."""
    if kind == ACTIVATED:
        return activated_cases.kernel(arch, tried)
    return gemm_cases.kernel(arch, kind, tried)


def run(arch: str, kind: str, tried: Any) -> cute_emulator.LaunchRecord:
    """The case, run once."""
    if kind == ACTIVATED:
        return activated_cases.run(arch, tried, seeds=(0,))
    return gemm_cases.run(arch, kind, tried, seeds=(0,))


def label(kind: str, choice: dict) -> str:
    arch, config = choice["tiling"]
    rest = [f"{n}={str(v).removeprefix('torch.')}" for n, v in choice.items() if n != "tiling"]
    tile = f"{config.tile_m}x{config.tile_n}" + "x2" * (config.ctas == 2) + "pp" * config.pingpong
    return " ".join([arch, tile, kind, *rest])


def threads(arch: str, config: GemmConfig) -> int:
    """Return the threads of a CTA: on sm_90 one warpgroup loads and one or two multiply."""
    if arch == "sm_100":
        return 192
    return 256 if config.tile_m == 64 and not config.pingpong else 384


class Row(NamedTuple):
    """A line of the table."""

    registers: int
    shared: int
    spills: int
    mma: str
    instructions: int
    name: str


HEADER = "registers  shared  spills        MMA  instructions  kernel"


def show(row: Row) -> str:
    return f"{row.registers:9d} {row.shared or '-':>7} {row.spills:7d} {row.mma:>14} {row.instructions:6d}  {row.name}"


def checked(kind: str, choice: dict, cubin: bytes, ptx: str, shared: int) -> Row:
    """The kernel's line, after its machine code was found to be what it should be."""
    arch, tried = case(choice)
    report = sass.inspect(cubin)
    mma = "HGMMA" if arch == "sm_90" else "UTCHMMA"
    assert report.spills == report.loops_over_lanes == 0
    assert report.frame == 0
    assert report.registers * threads(arch, tried.config) <= REGISTER_FILE
    assert report.count(mma) > 0
    assert report.count("HMMA") == 0
    assert report.count("UTMALDG") >= 2
    # An adding store exactly where sums are formed in memory, that is in float32.
    adds = choice.get("accumulate", False) and tried.out == torch.float32
    assert (report.count("UTMAREDG") > 0) == adds
    assert (report.count("UTMASTG") > 0) == (not adds)
    element = "bf16" if tried.dtype == torch.bfloat16 else "f16"
    if arch == "sm_90":
        assert f"wgmma.mma_async.sync.aligned.m64n{tried.config.tile_n}k16.f32.{element}.{element}" in ptx
        # One wait in the mainloop and one behind it: more would mean that every MMA is waited for.
        assert report.count("WARPGROUP.DEPBAR") == 2
    else:
        assert f"tcgen05.mma.cta_group::{2 if tried.config.two_cta else 1}.kind::f16" in ptx
    total = sum(report.opcodes.values())
    return Row(report.registers, shared, report.spills, f"{report.count(mma)} {mma}", total, label(kind, choice))
