"""What each feature of ``GroupedLinear`` costs the host, per step of a layer (forward and backward).

    python benchmarks/layer_features.py [--rounds N]

All arms take turns in one process with the arithmetic taken out (an implementation that does nothing serves every op),
so that what is left is Python, dispatch, autograd and allocation: the time a GPU has to hide. Figures are medians over
rounds. ``op`` is ``tgl.grouped_gemm`` on the same parameters without a layer around it; ``plain`` is the layer with
every feature off, which must cost what the op does. Discrete parameters and views are measured with 64 groups, against
``stacked``, the op on ``torch.stack`` of as many parameters; everything else with 8.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from harness.command import parser
from harness.report import medians
from harness.timing import HostClock, interleaved, shuffled

import tgl

T, K, N = 64, 32, 48
STUBBED = ("grouped_gemm", "grouped_gemm_wgrad", "grouped_gemm_wgrad_accumulate_", "grouped_dbias", "splits_to_offsets")


@contextlib.contextmanager
def no_arithmetic() -> Iterator[None]:
    """Serve every op with an implementation that does nothing, ahead of all others."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    added = [tgl.register_implementation(op, "nothing", device="cpu", priority=1000)(nothing) for op in STUBBED]
    try:
        yield
    finally:
        for implementation in added:
            tgl.backends.remove(implementation)


def step(groups: int, *, buffers: bool = False, reserve: bool = False, op: str = "", **options: Any) -> Callable:
    """A function that runs one forward and one backward of a layer with these features, or of the op alone."""
    layer = tgl.GroupedLinear(groups, K, N, **options)
    x, dy = torch.randn(T, K, requires_grad=True), torch.ones(T, N)
    offs = torch.full((groups,), T, dtype=torch.int32)
    given = {"out": torch.empty(T, N), "dgrad_out": torch.empty(T, K)} if buffers else {}
    parameters = list(layer.parameters())
    weights, biases = layer.group_parameters("weight"), layer.group_parameters("bias")
    if options.get("fuse_wgrad_accumulation"):
        packed = tgl.allocate_wgrad(groups, (N, K), torch.float32)
        for weight, part in zip(weights, [packed] if layer.single_grouped_weight else packed):
            weight.main_grad = part
    if reserve:
        layer.reserve_delayed_wgrad(T)

    def run() -> None:
        if op == "packed":
            y = tgl.grouped_gemm(x, weights[0].transpose(1, 2), offs, biases[0])
        elif op == "stacked":
            y = tgl.grouped_gemm(x, torch.stack(weights).transpose(1, 2), offs, torch.stack(biases))
        else:
            y = layer.forward_offsets(x, offs, **given)
        y.backward(dy)
        if layer.delay_wgrad_compute:
            layer.backward_dw()
        x.grad = None
        for p in parameters:
            p.grad = None

    return run


DELAYED = {"delay_wgrad_compute": True}
DISCRETE = {"single_grouped_weight": False}
CONTIGUOUS, PADDED = torch.empty(64, N, K), tgl.allocate_wgrad(64, (N, K + 1), torch.float32)
ARMS: dict[str, tuple[str, Callable[[], Callable]]] = {
    # name: (the arm it is compared with, what makes it)
    "op": ("op", lambda: step(8, op="packed")),
    "plain": ("op", lambda: step(8)),
    "caller buffers": ("plain", lambda: step(8, buffers=True)),
    "main_grad": ("plain", lambda: step(8, fuse_wgrad_accumulation=True)),
    "delayed, by reference": ("plain", lambda: step(8, **DELAYED)),
    "delayed, by copy": ("plain", lambda: step(8, reserve=True, **DELAYED)),
    "stacked, 64 groups": ("stacked, 64 groups", lambda: step(64, op="stacked", **DISCRETE)),
    "discrete, 64 groups": ("stacked, 64 groups", lambda: step(64, **DISCRETE)),
    "discrete, main_grad": ("stacked, 64 groups", lambda: step(64, fuse_wgrad_accumulation=True, **DISCRETE)),
    "torch.unbind of 64": ("torch.unbind of 64", lambda: CONTIGUOUS.unbind),
    "64 gradients as views": ("torch.unbind of 64", lambda: PADDED.unbind),
}


def measure(functions: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, float]:
    """Median microseconds of each; every round takes them in another order."""
    for function in functions.values():
        for _ in range(50):
            function()
    clock = HostClock(time.perf_counter, calls)
    return {name: 1e6 * t for name, t in medians(interleaved(functions, clock, range(rounds), shuffled)).items()}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=1500, help="rounds of each arm")
    made.add_argument("--calls", type=int, default=3, help="calls of each round")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    with no_arithmetic():
        times = measure({name: make() for name, (_, make) in ARMS.items()}, options.rounds, options.calls)
    print(f"{'layer step':30} {'microseconds':>13} {'ratio':>6}  against")
    for name, (reference, _) in ARMS.items():
        print(f"{name:30} {times[name]:13.1f} {times[name] / times[reference]:6.2f}  {reference}")


if __name__ == "__main__":
    main()
