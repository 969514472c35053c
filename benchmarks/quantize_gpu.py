"""Quantisation on a GPU, or dequantisation, against a copy, on the shapes and routings of real models.

    python benchmarks/quantize_gpu.py [--dequantize] [--formats mxfp8 ...] [--shapes mixtral-fc1 ...] [--samples N]
                                      [--out FILE]

For every format: both directions, rowwise only, columnwise only; of dequantisation, which gives bfloat16, rowwise and
columnwise. Bandwidth counts the bytes that must move, x once and every component once, and is given as a fraction of
that of ``copy_`` of x. Formats with a scale per group read x twice to quantise it, the first time for maxima; the last
column counts that. Every arm is a captured graph; before each replay 256 MB are written, so L2 holds none of x; arms
take turns in rotating order and medians are compared. Nothing is timed before its bytes are those of the CPU
implementation on a smaller problem.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from harness.command import cases, choice, gpu_parser, needs_device
from harness.report import Table, save, summaries, with_machine
from harness.shapes import QUICK_ROUTINGS, SHAPES, Shape, split
from harness.timing import Replay, replays
from torch import Tensor

import tgl
from tests.kernel_cases import ends
from tests.memory import same_bytes
from tgl.meta import formats
from tgl.meta.components import Components, component_specs
from tgl.meta.quantized import Options

MATRICES = {  # their rows and depth are quantised
    "mixtral-fc1": SHAPES["mixtral-fc1"],
    "mixtral-fc2": SHAPES["mixtral-fc2"],
    "qwen3-fc1": SHAPES["qwen3-g128-fc1"],
    "qwen3-fc2": SHAPES["qwen3-g128-fc2"],
    "deepseek-fc1": SHAPES["deepseek-g32-fc1"],
}
FORMATS: dict[str, dict[str, Any]] = {
    "mxfp8": dict(format="mxfp8", scale_layout="blocked"),
    "fp8_block": dict(format="fp8_block"),
    "fp8_tensor": dict(format="fp8_tensor"),
    "nvfp4": dict(format="nvfp4", scale_layout="blocked"),
    "nvfp4_rht": dict(format="nvfp4", scale_layout="blocked", rht=True),
    "nvfp4_seeded": dict(format="nvfp4", scale_layout="blocked", rng=torch.tensor([1, 2])),
}
DIRECTIONS: dict[str, dict[str, bool]] = {
    "both": {},
    "rowwise": dict(columnwise=False),
    "columnwise": dict(rowwise=False),
}
DEQUANTIZED = ("mxfp8", "fp8_block", "fp8_tensor", "nvfp4")
TABLE = Table(
    {
        "shape": "<14",
        "routing": "<9",
        "arm": "<22",
        "ms": ">8.4f",
        "TB/s": ">6.2f",
        "of copy": ">8.2f",
        "all reads": ">9.2f",
    }
)


def directions(name: str) -> dict[str, dict[str, bool]]:
    """The directions of a format; a transform is of columnwise data."""
    return {d: given for d, given in DIRECTIONS.items() if d != "rowwise" or not FORMATS[name].get("rht")}


def placed(options: dict[str, Any], device: str) -> dict[str, Any]:
    """The options with the seed, if there is one, on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}


def small_problem() -> tuple[Tensor, Tensor]:
    """Rows of many exponents with a tail, and their group ends."""
    sizes = (5, 0, 130, 127, 128, 129, 1, 0, 40, 300)
    x = torch.randn(sum(sizes) + 100, 1168) * torch.exp2(torch.randint(-20, 20, (1168,)).float())
    return x.bfloat16(), ends(sizes)


class Arm(NamedTuple):
    """A call, the bytes that it must move, and those of x that it reads once more."""

    call: Callable[[], object]
    moved: int
    again: int = 0


class Quantize:
    """``group_quantize`` into existing components."""

    formats = tuple(FORMATS)

    @staticmethod
    def check(name: str, device: str) -> None:
        """Raise if some bytes are not those of the CPU implementation."""
        x, offs = small_problem()
        for given in directions(name).values():
            options = FORMATS[name] | given
            expected = tgl.group_quantize(x, offs, **options)
            got = tgl.group_quantize(x.to(device), offs.to(device), **placed(options, device))
            for component, ours, theirs in zip(Components._fields, got, expected):
                if not same_bytes(ours.cpu(), theirs):
                    raise AssertionError(f"{options}: {component} differs from that of the CPU")

    @staticmethod
    def arms(name: str, x: Tensor, offs: Tensor) -> Iterator[tuple[str, Arm]]:
        """One per direction."""
        for direction, given in directions(name).items():
            options = placed(FORMATS[name] | given, str(x.device))
            out = tgl.group_quantize(x, offs, **options)
            twice = out.amax.numel() or out.columnwise_amax.numel()

            def call(options: dict[str, Any] = options, out: Components = out) -> object:
                return tgl.group_quantize(x, offs, **options, out=out)

            yield direction, Arm(call, x.nbytes + sum(t.nbytes for t in out), x.nbytes if twice else 0)


class Dequantize:
    """``group_dequantize`` of any bytes, to the dtype of x."""

    formats = DEQUANTIZED

    @staticmethod
    def check(name: str, device: str) -> None:
        """Raise if some values are not those of the CPU implementation."""
        x, offs = small_problem()
        for columnwise in (False, True):
            options = FORMATS[name]
            made = tgl.group_quantize(x, offs, rowwise=not columnwise, columnwise=columnwise, **options)
            data, scale, amax = made[3:6] if columnwise else made[:3]
            args = (data, scale, offs, amax if formats.FORMATS[options["format"]].decodes_with_amax else None)
            keywords = {**options, "columnwise": columnwise, "rows": len(x)}
            got = tgl.group_dequantize(*(None if t is None else t.to(device) for t in args), **keywords)
            if not torch.equal(got.cpu(), tgl.group_dequantize(*args, **keywords)):
                raise AssertionError(f"{options}: the values differ from those of the CPU")

    @staticmethod
    def arms(name: str, x: Tensor, offs: Tensor) -> Iterator[tuple[str, Arm]]:
        """One per direction."""
        for direction in ("rowwise", "columnwise"):
            columnwise = direction == "columnwise"
            options = Options(**FORMATS[name], rowwise=not columnwise, columnwise=columnwise)
            options = options.resolved("group_quantize")
            specs = component_specs(options, tuple(x.shape), len(offs), x.device, grouped=True)
            data, scale, amax = (spec.empty() for spec in (specs[3:6] if columnwise else specs[:3]))
            data.view(torch.uint8).random_()
            scale.fill_(1)
            amax.fill_(1)
            args = (data, scale, offs, amax if options.description.decodes_with_amax else None)
            keywords = {**FORMATS[name], "columnwise": columnwise, "rows": len(x)}

            def call(args: tuple = args, keywords: dict[str, Any] = keywords) -> object:
                return tgl.group_dequantize(*args, **keywords)

            yield direction, Arm(call, x.nbytes + data.nbytes + scale.nbytes)


def arms_of(work: type[Quantize | Dequantize], names: Sequence[str], x: Tensor, offs: Tensor) -> dict[str, Arm]:
    """A copy of x, then every format in every direction."""
    copy = torch.empty_like(x)
    arms = {"copy": Arm(lambda: copy.copy_(x), 2 * x.nbytes)}
    for name in names:
        arms |= {f"{name} {direction}": arm for direction, arm in work.arms(name, x, offs)}
    return arms


def rows_of(arms: dict[str, Arm], times: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
    """Return a row per arm; speeds in TB/s."""
    speeds = {name: arm.moved / times[name]["median"] / 1e9 for name, arm in arms.items()}
    for name, arm in arms.items():
        of_copy = speeds[name] / speeds["copy"]
        yield {
            "arm": name,
            "ms": times[name]["median"],
            "tb_per_s": speeds[name],
            "of_copy": of_copy,
            "read_twice": (arm.moved + arm.again) / arm.moved * of_copy,
            **times[name],
        }


def measure(work: type[Quantize | Dequantize], shape: Shape, routing: str, args: argparse.Namespace) -> Iterator[dict]:
    x = torch.randn(shape.rows, shape.depth, device="cuda", dtype=torch.bfloat16)
    offs = ends(split(routing, shape.groups, shape.rows), "cuda")
    arms = arms_of(work, args.formats, x, offs)
    graphs = {name: Replay(arm.call) for name, arm in arms.items()}
    return rows_of(arms, summaries(replays(graphs, args.samples, args.clean_l2, args.busy)))


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = gpu_parser(__doc__)
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--formats", nargs="*", choices=list(FORMATS))
    choice(parser, "--shapes", MATRICES)
    args = parser.parse_args(argv)
    args.formats = args.formats or list((Dequantize if args.dequantize else Quantize).formats)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    device = needs_device()
    work = Dequantize if args.dequantize else Quantize
    for name in args.formats:
        work.check(name, "cuda")
    print(f"{device}\n{TABLE.header()}")
    results = []
    for case in cases(shape=args.shapes, routing=QUICK_ROUTINGS):
        for row in measure(work, MATRICES[case["shape"]], case["routing"], args):
            results.append({**case, **row})
            shown = ("shape", "routing", "arm", "ms", "tb_per_s", "of_copy", "read_twice")
            print(TABLE.line(results[-1][column] for column in shown), flush=True)
        torch.cuda.empty_cache()
    save(args.out, with_machine(device, results))


if __name__ == "__main__":
    main()
