"""Quantise on one CPU thread: tgl against torchao's CPU functions, and what quantising into buffers allocates.

    python benchmarks/quantize.py [--quick] [--groups N] [--seconds N] [--case SUBSTRING]

Arms take the same rows, interleaved in one process. Figures are medians of CPU milliseconds, ``ratio`` is torchao's
divided by ours (above 1 we are faster), GB/s is what we read of ``x``. What torchao calls:

* mxfp8: ``to_mx``
* nvfp4: ``nvfp4_quantize`` with ``per_tensor_amax_to_scale``
* fp8_tensor: ``tensor_to_scale``, then ``to_fp8_saturated`` of the product in float32
* fp8_block: ``_choose_scale_float8``, ``_quantize_affine_float8`` with blocks of 1 x 128

torchao knows no groups. To make what we make, its functions are called as its own training code calls them:

* Where scales belong to groups (fp8_tensor), once for every group that has rows; their results are put together, side
  by side, or (columnwise) where our layout has them.
* Columnwise, on a transposed copy. Blocks must not span groups, and its blocks are whole, so each group's rows are
  copied into a buffer in which they begin on a block and are followed by zeros, at places known beforehand.
* Otherwise (rowwise blocks, and nvfp4's global scale, of which ours has one per group) once, on all rows.

``one`` is the ratio where torchao takes all rows as a single matrix instead, as if there were no groups: less work
than ours unless ``--groups 1``. Each ratio is measured with its two arms alone, since what a process allocates decides
how fast it gets memory the next time.

The second table quantises into existing buffers under the profiler's allocation record, for T and for 4 T rows: the
peak must stay where it is while the buffers grow.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from harness.command import parser
from harness.report import geometric, medians
from harness.shapes import growing
from harness.timing import HostClock, for_seconds, interleaved
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import tgl
from tgl.meta import formats


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings: torchao lists the CUDA libraries that it could not load."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


with quiet():
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

E4M3 = torch.float8_e4m3fn
DIRECTIONS = ("rowwise", "columnwise", "both")


class Case(NamedTuple):
    """A format with its options, and rows of ``dtype``."""

    format: str
    options: dict[str, Any]
    dtype: torch.dtype
    rows: int
    columns: int
    groups: int

    def __str__(self) -> str:
        options = " ".join(str(v) for v in self.options.values())
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.format} {options} {dtype} {self.rows} x {self.columns}".replace("  ", " ")

    def operands(self, factor: int = 1) -> tuple[Tensor, Tensor]:
        """Rows and their group ends: ragged groups, the first of them empty."""
        rows = self.rows * factor
        x = torch.randn(rows, self.columns, generator=torch.Generator().manual_seed(0)).to(self.dtype)
        return x, growing(self.groups, rows, least=0)

    def ours(self, direction: str, x: Tensor, offs: Tensor, out: Any = None) -> Any:
        chosen = {"rowwise": direction != "columnwise", "columnwise": direction != "rowwise"}
        return tgl.group_quantize(x, offs, format=self.format, **self.options, **chosen, out=out)

    def theirs(self, direction: str, x: Tensor, offs: Tensor) -> Callable[[], None]:
        """A call that makes what ours does of these groups; ``offs`` with one end makes it one of a matrix."""
        quantize, block, ends = TORCHAO[self.format], formats.FORMATS[self.format].block, offs.tolist()
        segments = [(a, b) for a, b in zip([0, *ends], ends) if b > a]
        sizes = torch.tensor([b - a for a, b in segments])
        padded = -(-sizes // max(block, 1)) * max(block, 1)
        firsts = padded.cumsum(0) - padded
        place = torch.arange(x.shape[0]) + (firsts - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
        places = int(padded.sum())

        def whole() -> None:
            if direction != "columnwise":
                quantize(x, **self.options)
            if direction != "rowwise":
                rows = x if places == x.shape[0] else x.new_zeros(places, x.shape[1]).index_copy_(0, place, x)
                quantize(rows.t().contiguous(), **self.options)

        def apart() -> None:
            if direction != "columnwise":
                scales, data = zip(*(quantize(x[a:b], **self.options) for a, b in segments))
                torch.stack(scales), torch.cat([d.view(torch.uint8) for d in data])
            if direction != "rowwise":
                scales, data = zip(*(quantize(x[a:b].t().contiguous(), **self.options) for a, b in segments))
                together = torch.zeros(x.shape[1], 32 * (-(-x.shape[0] // 32) + len(ends) - 1), dtype=torch.uint8)
                torch.stack(scales)
                for (a, b), d in zip(segments, data):
                    start = (a // 32 + bisect.bisect_right(ends, a)) * 32
                    together[:, start : start + b - a].copy_(d.view(torch.uint8))

        return apart if not block and len(ends) > 1 else whole


def _mxfp8(x: Tensor, scaling: str) -> Any:
    return to_mx(x, E4M3, 32, ScaleCalculationMode[scaling.upper()])


def _nvfp4(x: Tensor) -> Any:
    return nvfp4_quantize(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max().float()))


def _fp8_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = tensor_to_scale(x, E4M3)
    return scale, to_fp8_saturated(x.float() * scale, E4M3)


def _fp8_block(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _choose_scale_float8(x, [1, 128], E4M3)
    return scale, _quantize_affine_float8(x, scale, E4M3)


TORCHAO: dict[str, Callable[..., Any]] = {
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
    "fp8_tensor": _fp8_tensor,
    "fp8_block": _fp8_block,
}
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mxfp8", {"scaling": "rceil"}),
    ("mxfp8", {"scaling": "floor"}),
    ("nvfp4", {}),
    ("fp8_tensor", {}),
    ("fp8_block", {}),
)


def cases(quick: bool, groups: int) -> Iterator[Case]:
    shapes = ((2048, 2048),) if quick else ((512, 1024), (2048, 2048), (2048, 7168))
    for shape in shapes:
        for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
            for format, options in FORMATS:
                yield Case(format, options, dtype, *shape, groups)


def seconds_of(arms: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median CPU seconds of each arm, interleaved for about ``seconds``."""
    return medians(interleaved(arms, HostClock(), for_seconds(seconds, least=4), warm_up=1))


def allocated(call: Callable[[], object]) -> tuple[int, int]:
    """Peak of what a call holds, and its largest single allocation, in bytes."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    current = peak = largest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            peak, largest = max(peak, current), max(largest, event.nbytes())
    return peak, largest


def throughput(options: argparse.Namespace) -> None:
    print(f"{'case':38} {'direction':10} {'torchao':>9} {'tgl':>9} {'GB/s':>6}  ratio    one")
    ratios = []
    for case in cases(options.quick, options.groups):
        if options.case not in str(case):
            continue
        x, offs = case.operands()
        for direction in DIRECTIONS:

            def run() -> None:
                case.ours(direction, x, offs)  # noqa: B023

            arms = {"torchao": case.theirs(direction, x, offs), "tgl": run}
            grouped, ours = seconds_of(arms, options.seconds).values()
            alone = {"torchao": case.theirs(direction, x, offs[-1:]), "tgl": run}
            one, beside = seconds_of(alone, options.seconds / 2).values()
            ratios.append(grouped / ours)
            rate = x.nbytes / ours / 1e9
            print(
                f"{case!s:38} {direction:10} {grouped * 1e3:9.2f} {ours * 1e3:9.2f} {rate:6.2f} {ratios[-1]:6.2f}"
                f" {one / beside:6.2f}",
                flush=True,
            )
    if ratios:
        print(f"geometric mean {geometric(ratios):.2f}, worst {min(ratios):.2f}")


def memory() -> None:
    print(f"\n{'into buffers':38} {'out KiB':>9} {'peak KiB':>9} {'largest':>9}   of 4 T: {'out':>9} {'peak':>9}")
    for format, options in FORMATS:
        case = Case(format, options, torch.bfloat16, 2048, 2048, 8)
        row = []
        for factor in (1, 4):
            x, offs = case.operands(factor)
            out = case.ours("both", x, offs)
            peak, largest = allocated(lambda: case.ours("both", x, offs, out))  # noqa: B023
            row.append((sum(t.nbytes for t in out) // 1024, peak // 1024, largest // 1024))
        (out_, peak, largest), (out_4, peak_4, _) = row
        print(f"{case!s:38} {out_:9} {peak:9} {largest:9}   {'':7} {out_4:9} {peak_4:9}")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="one shape, bfloat16")
    made.add_argument("--groups", type=int, default=8, help="how many, of 0, 1, 2, ... parts of the rows")
    made.add_argument("--seconds", type=float, default=2.0, help="for each line")
    made.add_argument("--case", default="", help="only cases whose name contains this")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    with torch.no_grad(), quiet():
        throughput(options)
        memory()


if __name__ == "__main__":
    main()
