"""What quantised operands cost on Blackwell, counted on the emulator: GEMMs beside quack's, casts beside their minimum.

    python benchmarks/blackwell_economy_scaled.py [--quick] [--json FILE]

Both grouped GEMMs (fprop to bfloat16, scales in the tensor cores' layout) run on the same bytes with the same tile and
as many CTAs, and both results are checked to be exact. Counts are per output tile and as in ``blackwell_economy``;
``ratio`` is ours divided by theirs: below 1 we need less. Ours has NVFP4's factor per group in its epilogue, theirs has
not. Without the package (``pip install quack-kernels``) only our counts are shown.

``group_quantize`` moves at least x, of 16 bits, once, or twice where the scale of a group follows from its largest
value, and codes and scales once: the ``minimum``, in bytes per element. ``moved`` is what is loaded of x and stored,
padding included, for even groups, of which every lane loads all it can. ``narrow`` are the bytes of offsets, maxima and
factors, which every block reads again and finds in L1 or L2.

``grouped_gemm_scaled_activation_quantize`` does not read the product back: 4 bytes per element of a SwiGLU of 16-bit
halves. Its bytes, per element of the result and without the operands of the MMAs, stand beside those of the GEMM and
the kernel that quantises after it.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blackwell_economy import CTAS, MEASURES, ROUTINGS, counts
from harness.command import parser
from harness.report import save
from torch import Tensor

import tgl
from cute_emulator import LaunchRecord
from emulator.tests.third_party import quack_gemm as driver
from tests.kernel_cases import ends
from tgl.cutlass_kernels.config import VARLEN_M, GemmConfig
from tgl.cutlass_kernels.epilogue import EpilogueSpec
from tgl.cutlass_kernels.gemm.scaling import OPERANDS
from tgl.cutlass_kernels.launchers import gemm_scaled
from tgl.meta import formats
from tgl.testing import emulate

TILES = ((128, 128), (256, 128), (256, 256))  # of an MMA; 256 rows by two CTAs
UNIT_AMAX = 6.0 * 448.0  # NVFP4: the amax whose factor is 1
WIDE_LOADS = re.compile(r"ld\.global(\.L2::cache_hint)?\.v4\.b32")  # of x: 16 bytes a lane


class Format(NamedTuple):
    """A format as ours and as theirs."""

    theirs: str
    vector: int
    scale: torch.dtype
    element: str


GEMMS = {
    "mxfp8": Format("mxfp8_e4m3", 32, torch.float8_e8m0fnu, "float8_e4m3fn"),
    "nvfp4": Format("nvfp4", 16, torch.float8_e4m3fn, "uint8"),
}


class Cast(NamedTuple):
    """A quantisation, and the bytes per element that it cannot do without: x of 16 bits, codes and scales.

    Attributes:
        options: of ``group_quantize``.
        reads: how often x is read: twice if a group's scale follows from its largest value.
        written: bytes of an element and its part of a scale, in one direction.
    """

    options: dict[str, Any]
    reads: int
    written: float


CASTS = {
    "mxfp8": Cast(dict(format="mxfp8", scale_layout="blocked"), 1, 1 + 1 / 32),
    "nvfp4": Cast(dict(format="nvfp4", scale_layout="blocked"), 2, 1 / 2 + 1 / 16),
    "fp8_tensor": Cast(dict(format="fp8_tensor"), 2, 1),
    "fp8_tensor, delayed": Cast(dict(format="fp8_tensor"), 1, 1),
    "fp8_block": Cast(dict(format="fp8_block"), 1, 1 + 4 / 128),
}


class Problem(NamedTuple):
    """Operands as both take them; every sum of products is exact."""

    format: str
    sizes: tuple[int, ...]
    a: Tensor  # [T, K], two to a byte in NVFP4
    a_scale: Tensor  # [1, tiles of 128 rows, tiles of 4 scales, 32, 4, 4]
    b: Tensor
    b_scale: Tensor
    expected: Tensor


def problem(format: str, sizes: tuple[int, ...], depth: int, columns: int) -> Problem:
    gen = torch.Generator().manual_seed(4)
    form = GEMMS[format]
    rows, groups = sum(sizes), len(sizes)
    a, a_values = driver.quantised(gen, form.theirs, rows, depth)
    a_codes, a_factors = driver.scales(gen, form.theirs, rows, depth // form.vector)
    a_values = a_values * a_factors.repeat_interleave(form.vector, 1)
    matrices, b_scales, expected = [], [], []
    for part in a_values.split(list(sizes)):
        b, b_values = driver.quantised(gen, form.theirs, columns, depth)
        codes, factors = driver.scales(gen, form.theirs, columns, depth // form.vector)
        matrices.append(b.view(torch.uint8))
        b_scales.append(driver.blocked(codes))
        expected.append(part @ (b_values * factors.repeat_interleave(form.vector, 1)).T)
    first = [start // 128 + g for g, start in enumerate([0, *torch.tensor(sizes).cumsum(0).tolist()][:-1])]
    place = torch.cat([at * 128 + torch.arange(size) for at, size in zip(first, sizes)])
    a_scale = driver.blocked(a_codes, -(-rows // 128) + groups - 1, place)
    b = torch.stack(matrices).view(a.dtype)
    return Problem(format, sizes, a, a_scale[None], b, torch.stack(b_scales), torch.cat(expected).bfloat16())


def run_ours(p: Problem, tile: tuple[int, int], out: Tensor) -> None:
    form = OPERANDS[p.format]
    config = GemmConfig(*tile, form.tile_k, two_cta=tile[0] == 256)
    spec = EpilogueSpec("bfloat16", alpha=form.alpha)
    element = GEMMS[p.format].element
    key = gemm_scaled.ScaledGemmKey(VARLEN_M, "sm_100", True, p.format, element, element, True, spec, config)
    offs = ends(p.sizes)
    amax = torch.full((len(p.sizes),), UNIT_AMAX) if form.alpha == "amax" else None
    a, b = (t.view(formats.FORMATS[p.format].data_dtypes[0]) for t in (p.a, p.b))
    scales = p.a_scale.flatten(), p.b_scale.flatten(1)
    call = gemm_scaled.build(key)
    call(a, scales[0], b, scales[1], offs, amax, amax, out, None, None, None, CTAS // config.ctas)


def run_theirs(p: Problem, tile: tuple[int, int], out: Tensor) -> None:
    gemm = driver.load("sm_100a")
    form, ctas = GEMMS[p.format], 2 if tile[0] == 256 else 1
    sys.modules["quack.gemm"].get_max_active_clusters = lambda *_, **__: CTAS // ctas  # type: ignore[attr-defined]
    gemm(
        p.a, p.b, out, None, None, *tile, ctas, 1,
        bs_format_a=form.theirs,
        bs_format_b=form.theirs,
        SFA=p.a_scale.view(form.scale),
        SFB=p.b_scale.view(form.scale),
        cu_seqlens_m=driver.ends(p.sizes),
    )  # fmt: skip


def measure(run: Any, p: Problem, tile: tuple[int, int]) -> dict[str, float]:
    """Run a kernel on one problem, check its result, count."""
    out = torch.full(p.expected.shape, 7.0).bfloat16()
    with emulate("sm_100a", detect_races=False) as machine:
        run(p, tile, out)
        record = machine.launches[-1]
    if not torch.equal(out, p.expected):
        raise SystemExit(f"wrong result: {p.format}, {tile}, {p.sizes}")
    tiles = sum(-(-size // tile[0]) for size in p.sizes) * -(-p.expected.shape[1] // tile[1])
    return counts(record, tiles)


def quantised(name: str, columnwise: bool, sizes: tuple[int, ...], columns: int) -> dict[str, float]:
    """Bytes per element that ``group_quantize`` moves."""
    torch.manual_seed(0)
    x = torch.randn(sum(sizes), columns).bfloat16()
    offs = ends(sizes)
    cast = CASTS[name]
    scale = torch.ones(len(sizes)) if name == "fp8_tensor, delayed" else None
    with emulate("sm_100a", detect_races=False) as machine:
        tgl.group_quantize(x, offs, scale, columnwise=columnwise, **cast.options)
    loads = sum(n for r in machine.launches for name, n in r.instructions.items() if WIDE_LOADS.match(name))
    narrow = sum(r.global_bytes["load"] for r in machine.launches) - loads * 32 * 16
    stores = sum(r.global_bytes["store"] for r in machine.launches)
    moved = loads * 32 * 16 + stores
    minimum = 2 * cast.reads + (1 + columnwise) * cast.written
    return {"moved": moved / x.numel(), "minimum": minimum, "narrow": narrow / x.numel()}


def traffic(record: LaunchRecord) -> float:
    """Bytes between a launch and global memory without what TMA loads."""
    return sum(record.global_bytes.values()) + record.tma_bytes["store"]


def activated(sizes: tuple[int, ...], depth: int, columns: int) -> dict[str, float]:
    """Bytes per element of an activation in MXFP8, by the GEMM itself and by a kernel after it."""
    torch.manual_seed(0)
    names = {"format": "mxfp8", "scale_layout": "blocked"}
    offs = ends(sizes)
    x = tgl.group_quantize(torch.randn(sum(sizes), depth).bfloat16(), offs, **names)
    w = tgl.group_quantize(torch.randn(len(sizes), 2 * columns, depth).bfloat16(), None, **names)
    operands = (x.data, x.scale, w.data, w.scale, offs)
    with emulate("sm_100a", detect_races=False) as machine:
        h, out = tgl.grouped_gemm_scaled_activation_quantize(*operands, **names)
        wanted_h = tgl.grouped_gemm_scaled(*operands, **names)
        wanted = tgl.grouped_activation_quantize(wanted_h, offs, **names)
        one, *two = map(traffic, machine.launches)
    for ours, theirs in zip((h, *out), (wanted_h, *wanted)):
        if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            raise SystemExit("wrong result of grouped_gemm_scaled_activation_quantize")
    return {"one op": one / (sum(sizes) * columns), "two ops": sum(two) / (sum(sizes) * columns)}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="one routing and tile, half the depth")
    made.add_argument("--json", type=Path, help="write the counts to this file")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    depth, columns = (256, 256) if args.quick else (512, 512)
    cases = [
        (format, tile, routing)
        for format in GEMMS
        for tile in TILES[: 1 if args.quick else None]
        for routing in (("ragged",) if args.quick else ROUTINGS)
    ]
    rows: list[dict[str, Any]] = []
    found: dict[tuple, dict[str, float]] = {}
    # quack changes the DSL when it is imported, so all of ours are counted before.
    for who, run in (("tgl", run_ours), ("quack", run_theirs)):
        try:
            for format, tile, routing in cases:
                p = problem(format, ROUTINGS[routing], depth, columns)
                found[who, format, tile, routing] = measure(run, p, tile)
        except ImportError as error:
            print(f"without {who}: {error}")
        if who == "tgl":
            print(f"{'quantise':>25} {'moved':>8} {'minimum':>8} {'ratio':>6} {'narrow':>8}")
            for format, columnwise in itertools.product(CASTS, (True, False)):
                bytes_ = quantised(format, columnwise, ROUTINGS["even"], columns)
                name = f"{format}, {'both' if columnwise else 'rows'}"
                rows.append({"quantise": name, **bytes_})
                moved, least, narrow = bytes_.values()
                print(f"{name:>25} {moved:8.3f} {least:8.3f} {moved / least:6.3f} {narrow:8.3f}")
            bytes_ = activated(ROUTINGS["even"], depth, columns)
            rows.append({"activated": "mxfp8 both", **bytes_})
            one, two = bytes_.values()
            print(f"{'activated':>25} {'by two':>8} {'ratio':>6}\n{one:25.3f} {two:8.3f} {one / two:6.3f}")
    print(f"{'format':>6} {'tile':>12} {'routing':>8} {'per tile':>20} {'tgl':>10} {'quack':>10} {'ratio':>6}")
    for format, tile, routing in cases:
        ours, theirs = found["tgl", format, tile, routing], found.get(("quack", format, tile, routing))
        shown = f"{tile[0]}x{tile[1]}" + (" pair" if tile[0] == 256 else "")
        for name in MEASURES:
            other = theirs[name] if theirs else None
            rows.append({"format": format, "tile": shown, "routing": routing, "measure": name,
                         "tgl": ours[name], "quack": other})  # fmt: skip
            right = f"{other:10.1f} {ours[name] / other:6.2f}" if other else f"{'-':>10} {'-':>6}"
            print(f"{format:>6} {shown:>12} {routing:>8} {name:>20} {ours[name]:10.1f} {right}", flush=True)
    save(args.json, rows)


if __name__ == "__main__":
    main()
