"""What an output tile costs on Blackwell, counted on the emulator, beside the grouped GEMM of nvidia-cutlass-operators.

    python benchmarks/blackwell_economy.py [--quick] [--json FILE]

Both kernels run the same problems (fprop, bfloat16, B contiguous along K) with the same tile and as many CTAs, in one
process, and both results are checked to be exact. Counts are per output tile, and ``ratio`` is ours divided by theirs:
below 1 we need less. ``instructions`` are those a warp issues, without the register moves and parameter loads of PTX,
which machine code does not have; ``barriers`` are those of warps and of CTAs, per warp. Theirs writes tiles that a
group does not fill from registers, element by element; ours stages every tile in shared memory. Without the package
(``pip install nvidia-cutlass-operators``) only our counts are shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness.command import parser
from harness.report import save
from torch import Tensor

from cute_emulator import LaunchRecord
from tests.kernel_cases import ends, integers, product
from tgl.cutlass_kernels.config import VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.launchers import gemm
from tgl.testing import emulate

CTAS = 4
VIRTUAL = ("mov.", "cvta.", "ld.param")  # in PTX only
CONFIGS = (GemmConfig(128, 128), GemmConfig(256, 128, two_cta=True), GemmConfig(256, 256, two_cta=True))
ROUTINGS = {
    "even": (512, 512, 512, 512),
    "ragged": (256, 130, 0, 512, 127, 300),
    "small": (40, 3, 0, 77, 128, 1, 64, 90),
}
MEASURES = ("instructions", "MMAs", "TMA load bytes", "barriers", "mbarrier operations")


def their_kernel() -> type | None:
    """The class behind the grouped GEMM of nvidia-cutlass-operators, if that is installed."""
    try:
        from cutlass.operators.providers.cutedsl.gemm.implementations import (
            sm100_contiguous_offset_2d3d_dense_gemm_impl as module,
        )
    except ImportError:
        return None
    return module.ContiguousOffset2D3DGemmDenseKernel


def run_ours(config: GemmConfig, a: Tensor, b: Tensor, offs: Tensor, out: Tensor) -> None:
    key = gemm.GemmKey(VARLEN_M, "sm_100", True, "bfloat16", 1, EpilogueSpec("bfloat16"), config)
    gemm.build(key)(a, b, offs, out, None, None, None, None, CTAS // config.ctas)


def run_theirs(kernel: type, config: GemmConfig, a: Tensor, b: Tensor, offs: Tensor, out: Tensor) -> None:
    import cuda.bindings.driver as cuda
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    gemm = kernel(cutlass.Float32, config.two_cta, (config.tile_m, config.tile_n), (config.ctas, 1))
    operands = [
        from_dlpack(t, assumed_align=align).mark_layout_dynamic(leading_dim=unit)
        for t, align, unit in ((a[None], 16, 2), (b, 16, 1), (out[None], 16, 2), (offs, 4, 0))
    ]
    stream = cuda.CUstream(0)
    cute.compile(gemm, *operands, CTAS // config.ctas, stream)(*operands, stream)


def counts(record: LaunchRecord, tiles: int) -> dict[str, float]:
    """The measures of one launch, per tile."""

    def total(*prefixes: str) -> int:
        return sum(n for name, n in record.instructions.items() if name.startswith(prefixes))

    values = (
        record.warp_instructions - total(*VIRTUAL),
        record.mma_count,
        record.tma_bytes["load"],
        total("bar.", "barrier."),
        total("mbarrier."),
    )
    return {name: value / tiles for name, value in zip(MEASURES, values)}


def measure(run: Any, config: GemmConfig, sizes: tuple[int, ...], depth: int, columns: int) -> dict[str, float]:
    """Run a kernel on one problem, check its result, count."""
    torch.manual_seed(0)
    rows, groups = sum(sizes), len(sizes)
    a, b, offs = integers(rows, depth), integers(groups, columns, depth).transpose(1, 2), ends(sizes)
    out = torch.full((rows, columns), 7.0).bfloat16()
    with emulate("sm_100a", detect_races=False) as machine:
        run(config, a, b, offs, out)
        record = machine.launches[-1]
    if not torch.equal(out, product(a, b, sizes).bfloat16()):
        raise SystemExit(f"wrong result: {config}, {sizes}")
    tiles = sum(-(-size // config.tile_m) for size in sizes) * -(-columns // config.tile_n)
    return counts(record, tiles)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="one routing, half the depth")
    made.add_argument("--json", type=Path, help="write the counts to this file")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    depth, columns = (256, 256) if args.quick else (512, 512)
    routings = {"ragged": ROUTINGS["ragged"]} if args.quick else ROUTINGS
    kernel = their_kernel()
    rows: list[dict[str, Any]] = []
    print(f"{'tile':>12} {'routing':>8} {'per tile':>20} {'tgl':>10} {'operators':>10} {'ratio':>6}")
    for config in CONFIGS:
        tile = f"{config.tile_m}x{config.tile_n}" + (" pair" if config.two_cta else "")
        for routing, sizes in routings.items():
            ours = measure(run_ours, config, sizes, depth, columns)
            theirs = measure(lambda *call: run_theirs(kernel, *call), config, sizes, depth, columns) if kernel else None
            for name in MEASURES:
                other = theirs[name] if theirs else None
                rows.append({"tile": tile, "routing": routing, "measure": name, "tgl": ours[name], "operators": other})
                right = f"{other:10.1f} {ours[name] / other:6.2f}" if other else f"{'-':>10} {'-':>6}"
                print(f"{tile:>12} {routing:>8} {name:>20} {ours[name]:10.1f} {right}", flush=True)
    save(args.json, rows)


if __name__ == "__main__":
    main()
