"""What a tile of quantised operands costs on consumer Blackwell (sm_120), counted on the emulator, beside quack's GEMM.

    python benchmarks/warp_economy_scaled.py [--quick] [--json FILE]

Both grouped GEMMs run on the same bytes, scales in the tensor cores' layout, with tiles of 128 x 128 and as many CTAs;
both results, in bfloat16, are checked to be exact. Counts are per output tile and as in ``warp_economy``; ``ratio`` is
ours divided by theirs: below 1 we need less. Ours has NVFP4's factor per group in its epilogue, and FP8's scale, theirs
has neither. Both multiply FP8 with scales of blocks that are 1. Quack's weight gradients are of MXFP8
alone among formats with scales (``validate_blockscaled_sf`` refuses packed elements there). Without the package
(``pip install quack-kernels``) only our counts are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import blackwell_economy_scaled as scaled
import torch
from harness.command import parser
from harness.report import save
from torch import Tensor
from warp_economy import ARCH, BUSY, CTAS, MEASURES, TILE, measure, tiles_of

import tgl
from emulator.tests.third_party import quack_gemm as driver
from tests.kernel_cases import ends, exact, gradient, product
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.gemm.scaling import OPERANDS
from tgl.cutlass_kernels.launchers import gemm_scaled
from tgl.cutlass_kernels.runtime import names
from tgl.meta import formats

DEPTH, COLUMNS = 512, 256
ATOM = 32, 4, 4  # of scales: 128 rows x 4
GRADIENT = "weight gradient"
CASES = (("mxfp8", "forward"), ("mxfp8", GRADIENT), ("nvfp4", "forward"), ("fp8_tensor", "forward"))


class Problem(NamedTuple):
    """Operands as both take them; every sum of products is exact.

    Attributes:
        a: ``[T, K]``, or ``[T, M]`` of a weight gradient; two elements to a byte in NVFP4.
        a_scale: in atoms of the tensor cores, or a number for each group in FP8.
        b: ``[G, N, K]``, or ``[T, N]``.
    """

    format: str
    op: str
    sizes: tuple[int, ...]
    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    wanted: Tensor

    @property
    def tiles(self) -> int:
        """How many tiles the result has."""
        return tiles_of(self.op, self.sizes, self.wanted)

    @property
    def name(self) -> str:
        return f"{self.format}, {self.op}, {self.sizes}"


def problem(format: str, op: str, sizes: tuple[int, ...], depth: int = DEPTH, columns: int = COLUMNS) -> Problem:
    """``depth`` is K of the forward; of a weight gradient results are ``[G, columns, columns]``."""
    torch.manual_seed(0)
    rows, groups, offs = sum(sizes), len(sizes), ends(sizes)
    if not OPERANDS[format].vector:
        x, w, ones = exact(rows, depth), exact(groups, columns, depth), torch.ones(groups)
        a, b = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
        return Problem(format, op, sizes, a, ones, b, ones, product(x, w.transpose(1, 2), sizes).bfloat16())
    if op == "forward":
        p = scaled.problem(format, sizes, depth, columns)
        return Problem(format, op, sizes, p.a, p.a_scale, p.b, p.b_scale, p.expected)
    x, dy = exact(rows, columns), exact(rows, columns)
    both = (tgl.group_quantize(t, offs, format=format, scale_layout="blocked") for t in (x, dy))
    a, a_scale, b, b_scale = (t for q in both for t in (q.columnwise_data, q.columnwise_scale))
    tall = 1, -(-columns // 128), -1, *ATOM
    return Problem(
        *(format, op, sizes, a, a_scale.view(tall), b, b_scale.view(tall)), gradient(x, dy, sizes).bfloat16()
    )


def run_ours(p: Problem, out: Tensor) -> None:
    form, kind = OPERANDS[p.format], VARLEN_M if p.op == "forward" else VARLEN_K
    config = ARCHS[ARCH].tilings.deepest(*TILE, kind, form)
    stored = formats.FORMATS[p.format].data_dtypes[0]
    a, b = p.a.view(stored), p.b.view(stored)
    element, spec = names.name(stored), EpilogueSpec("bfloat16", alpha=form.alpha)
    key = gemm_scaled.ScaledGemmKey(
        kind, ARCH, True, p.format, element, element, kind == VARLEN_M, spec, config
    )  # fmt: skip
    amax = torch.full((len(p.sizes),), scaled.UNIT_AMAX) if form.alpha == "amax" else None
    scales = (p.a_scale.flatten(), p.b_scale.flatten(1 if form.vector and kind == VARLEN_M else 0))
    gemm_scaled.build(key)(a, scales[0], b, scales[1], ends(p.sizes), amax, amax, out, None, None, None, CTAS)


def run_theirs(p: Problem, out: Tensor) -> None:
    multiply, ends_from_0 = driver.load("sm_120a"), driver.ends(p.sizes)
    options: dict[str, Any] = {}
    if p.format in scaled.GEMMS:
        form = scaled.GEMMS[p.format]
        options = dict(bs_format_a=form.theirs, bs_format_b=form.theirs)
        options |= dict(SFA=p.a_scale.view(form.scale), SFB=p.b_scale.view(form.scale))
    if p.op == "forward":
        multiply(p.a, p.b, out, None, None, *TILE, 1, 1, cu_seqlens_m=ends_from_0, **options)
    else:
        multiply(p.a.T, p.b.T, out, None, None, *TILE, 1, 1, cu_seqlens_k=ends_from_0, **options)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="one routing")
    made.add_argument("--json", type=Path, help="write the counts to this file")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    cases = [(*case, routing) for case in CASES for routing in (("ragged",) if args.quick else tuple(BUSY))]
    found: dict[tuple[str, ...], dict[str, float]] = {}
    # quack changes the DSL when it is imported, so all of ours are counted before.
    for who, run in (("tgl", run_ours), ("quack", run_theirs)):
        try:
            for format, op, routing in cases:
                found[who, format, op, routing] = measure(run, problem(format, op, BUSY[routing]))
        except ImportError as error:
            print(f"without {who}: {error}")
    rows: list[dict[str, Any]] = []
    print(f"{'format':>10} {'op':>15} {'routing':>8} {'per tile':>20} {'tgl':>10} {'quack':>10} {'ratio':>6}")
    for format, op, routing in cases:
        ours, theirs = (found.get((who, format, op, routing)) for who in ("tgl", "quack"))
        assert ours is not None
        for name in MEASURES:
            other = theirs[name] if theirs else None
            rows.append({"format": format, "op": op, "routing": routing, "measure": name,
                         "tgl": ours[name], "quack": other})  # fmt: skip
            right = f"{other:10.1f} {ours[name] / other:6.2f}" if other else f"{'-':>10} {'-':>6}"
            print(f"{format:>10} {op:>15} {routing:>8} {name:>20} {ours[name]:10.1f} {right}", flush=True)
    save(args.json, rows)


if __name__ == "__main__":
    main()
