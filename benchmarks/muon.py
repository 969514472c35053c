"""A step of Muon on a stack of experts' matrices: as a stack, and one matrix after the other.

    python benchmarks/muon.py [--device cuda] [--quick] [--seconds N]

``loop`` is ``torch.optim.Muon`` on a parameter per matrix, ``stack`` is ``tgl.optim.Muon`` on one of three dimensions
with torch's batched products, ``symmetric`` the same with what the registry has for ``batched_syrk``: on sm_90 a kernel
that computes a triangle, elsewhere torch's products again. All iterate in bfloat16. Figures are medians of
milliseconds, of a CPU's one thread or from call to end on a GPU, of arms that take turns in one process. ``saved`` is
the share of the loop's step that the stack saves. ``bits`` is the share of weights with the same bits after a step of
loop and stack: all on a CPU, which is asserted, while libraries of a GPU sum single and batched products in orders of
their own. ``half`` is the share of the stack's step that half of its products with symmetric results take: the most
that ``symmetric`` could save.

Nothing is timed unless symmetric results are symmetric to the bit where a kernel makes them, and the iteration with
them is at most 1.25 times as far from one in float32 as with torch's products: of two matrices, in Frobenius' norm.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from harness.command import needs_device, parser
from harness.report import medians
from harness.timing import HostClock, for_seconds, interleaved
from torch import Tensor, nn

import tgl
from tgl import backends, optim

SYRK = "batched_syrk"
SHAPES = {
    "cpu": ((64, 32, 32), (64, 64, 128), (32, 128, 256), (8, 512, 256)),
    # FC1 and FC2 of Qwen3-30B-A3B, gpt-oss-20b and Mixtral 8x7B.
    "cuda": (
        *((128, 1536, 2048), (128, 2048, 768)),
        *((32, 5760, 2880), (32, 2880, 2880)),
        *((8, 28672, 4096), (8, 4096, 14336)),
    ),
}
COLUMNS = ("loop", "stack", "loop / stack", "saved", "bits", "half", "symmetric", "of the stack")


def clock(device: str) -> HostClock:
    return HostClock(time.process_time if device == "cpu" else time.perf_counter)


def finished(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    """``call`` until a device has done it, too."""

    def run() -> None:
        call()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


@contextmanager
def torchs_products(device: str) -> Iterator[None]:
    """``batched_syrk`` without kernels."""
    kernels = [i for i in backends.in_order(SYRK, torch.device(device)) if i.emulable]
    for kernel in kernels:
        backends.remove(kernel)
    try:
        yield
    finally:
        for kernel in kernels:
            backends.add(kernel)


def with_torchs_products(step: Callable[[], Any], device: str) -> Callable[[], Any]:
    """``step`` in ``torchs_products``."""

    def run() -> None:
        with torchs_products(device):
            step()

    return run


def check(stack: Tensor, device: str) -> None:
    """Of the first two matrices: symmetric results are, and the iteration is as near to one in float32.

    Raises:
        AssertionError: they are not.
    """
    some = stack[:2]
    wide = (some.mT if some.shape[1] > some.shape[2] else some).bfloat16()
    s = tgl.batched_syrk(wide)
    if tgl.explain(SYRK, wide).chosen.emulable and not torch.equal(s, s.mT):
        raise AssertionError(f"{tuple(stack.shape)}: a symmetric product is not symmetric")
    found = optim.orthogonalized(some)
    with torchs_products(device):
        torchs = optim.orthogonalized(some)
    exact = in_float32(some)
    ours, theirs = (float((y.float() - exact).norm()) for y in (found, torchs))
    if ours > 1.25 * theirs:
        raise AssertionError(f"{tuple(stack.shape)}: {ours} from an iteration in float32, torch's products {theirs}")


def in_float32(stack: Tensor, steps: int = 5) -> Tensor:
    """``optim.orthogonalized`` without rounding to 16 bits, one matrix at a time."""
    a, b, c = optim.COEFFICIENTS
    made = []
    for matrix in stack.float():
        x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
        x = x / x.norm()
        for _ in range(steps):
            s = x @ x.mT
            x = a * x + (b * s + c * s @ s) @ x
        made.append(x.mT if matrix.shape[0] > matrix.shape[1] else x)
    return torch.stack(made)


def symmetric_products(stack: Tensor, steps: int = 5) -> Callable[[], None]:
    """The products ``x x^T`` and ``s s`` of an iteration, and nothing else."""
    x = (stack.mT if stack.shape[1] > stack.shape[2] else stack).bfloat16()
    s = torch.bmm(x, x.mT)

    def run() -> None:
        for _ in range(steps):
            torch.bmm(x, x.mT)
            torch.baddbmm(s, s, s)

    return run


def line(shape: tuple[int, int, int], device: str, seconds: float) -> str:
    """The measurement of one shape, ``(matrices, rows, columns)``."""
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(shape, device=device))
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    stack.grad = torch.randn(shape, device=device)
    for matrix, grad in zip(matrices, stack.grad):
        matrix.grad = grad.clone()
    check(stack.grad, device)
    step = optim.Muon([stack]).step
    arms = {"loop": torch.optim.Muon(matrices).step, "stack": with_torchs_products(step, device)}
    for arm in arms.values():
        arm()
    equal = sum(int((one == other).sum()) for one, other in zip(stack.detach(), matrices)) / stack.numel()
    if device == "cpu" and equal != 1:
        raise AssertionError(f"{shape}: a step has other bits")
    arms |= {"products": symmetric_products(stack.detach()), "symmetric": step}
    calls = {name: finished(arm, device) for name, arm in arms.items()}
    found = medians(interleaved(calls, clock(device), for_seconds(seconds, 5), warm_up=1))
    loop, whole, products, symmetric = (found[arm] * 1e3 for arm in arms)
    figures = f"{loop:9.2f} {whole:9.2f} {loop / whole:12.2f} {1 - whole / loop:9.2f} {equal:9.4f}"
    figures += f" {products / 2 / whole:9.2f} {symmetric:9.2f} {symmetric / whole:12.2f}"
    return f"{'x'.join(map(str, shape)):>14} {figures}"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="two shapes")
    made.add_argument("--device", choices=SHAPES, default="cpu")
    made.add_argument("--seconds", type=float, default=2.0, help="for each line")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    if options.device == "cuda":
        print(needs_device(), torch.__version__)
    print(f"{'matrices':>14} " + " ".join(f"{name:>9}" for name in COLUMNS))
    shapes = SHAPES[options.device]
    for shape in shapes[:2] if options.quick else shapes:
        print(line(shape, options.device, options.seconds), flush=True)


if __name__ == "__main__":
    main()
