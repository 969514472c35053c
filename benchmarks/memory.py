"""Memory of the expert layer on a CPU: the peak of a step beside transformers, and what each recipe keeps.

    python benchmarks/memory.py [--quick] [--recipes]

Every allocation and release that PyTorch's CPU allocator makes during one step, forward and backward, is recorded, and
the peak of their running sum is printed in MiB: activations, temporaries and gradients, without what is there before:
the weights, the inputs, oneDNN's primitives, and the buffers of up to 8 MiB (here 4) that a thread of ours keeps
between calls. ``ratio`` is ours divided by that of transformers' ``grouped_mm``: at most 1 means not more memory.

With ``--recipes``, instead: ``input`` is what a ``GroupedLinear`` keeps of its bfloat16 input for the weight gradient,
``weight`` what it keeps of its weight for the input gradient (without a recipe the parameter itself, which is there
anyway), and ``MLP`` what a ``GroupedMLP`` keeps of its input and in between, the pre-activation among it, which stays
bfloat16; each in MiB and as a share of what is kept without a recipe (of the parameter, for the weight). The decibels
are signal to noise of a float32 layer's output, input gradient and weight gradient, on normal inputs.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import torch
from harness.command import parser
from torch import Tensor, nn

import tgl
from tests.peak_memory import peak_memory

MIB = 1 << 20
RECIPES = (
    None,
    tgl.recipes.MXFP8BlockScaling(),
    tgl.recipes.Float8CurrentScaling(),
    tgl.recipes.DelayedScaling(),
    tgl.recipes.Float8BlockScaling(),
    tgl.recipes.NVFP4BlockScaling(),
)


def peaks(quick: bool) -> None:
    from expert_layer import CASES, QUICK, Layer  # needs transformers

    worst = 0.0
    print(f"{'dtype':9} {'case':42} {'grp_mm':>9} {'tgl':>9}  ratio")
    for dtype in (torch.float32, torch.bfloat16):
        for case in QUICK if quick else CASES:
            layer = Layer(case, dtype)
            theirs, ours = (peak_memory(functools.partial(layer.step, arm)) for arm in ("grouped_mm", "tgl"))
            worst = max(worst, ours / theirs)
            name = str(dtype).removeprefix("torch.")
            print(f"{name:9} {case!s:42} {theirs / MIB:9.2f} {ours / MIB:9.2f} {ours / theirs:6.2f}", flush=True)
    print(f"worst ratio {worst:.2f}")


def kept(module: nn.Module, x: Tensor, sizes: Tensor) -> int:
    """Return the bytes that one forward keeps for its backward, without parameters."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x, sizes)
    for p in module.parameters():
        storages.pop(p.untyped_storage().data_ptr(), None)
    del y
    return sum(storages.values())


def decibels(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return 10 * torch.log10(want.square().sum() / (got - want).square().sum()).item()


def quality(recipe: tgl.recipes.Recipe, groups: int, features: int, sizes: Tensor) -> list[float]:
    """Return the decibels of output, input gradient and weight gradient."""
    found = []
    for choice in (None, recipe):
        torch.manual_seed(0)
        layer = tgl.GroupedLinear(groups, features, features, bias=False, recipe=choice)
        x = torch.randn(int(sizes.sum()), features, requires_grad=True)
        y = layer(x, sizes)
        y.backward(torch.randn_like(y))
        found.append((y.detach(), x.grad, layer.weight.grad))
    return [decibels(got, want) for want, got in zip(*found)]


def recipes(quick: bool) -> None:
    groups, features, rows = 8, 512 >> quick, 8192 >> 2 * quick
    sizes = torch.full((groups,), rows // groups)
    print(f"{groups} groups of {rows // groups} tokens, {features} features")
    print(f"{'recipe':22}{'input':>16}{'weight':>16}{'MLP':>16}   {'y':>6}{'dx':>6}{'dw':>6} dB")
    bare: list[int] = []
    for recipe in RECIPES:
        x = torch.randn(rows, features, dtype=torch.bfloat16)
        make = {"params_dtype": torch.bfloat16, "bias": False, "recipe": recipe}
        linear = tgl.GroupedLinear(groups, features, features, **make)
        mlp = tgl.GroupedMLP(groups, features, features, **make)
        inputs = kept(linear, x, sizes)
        weight = kept(linear, x.clone().requires_grad_(), sizes) - inputs
        weights = 3 * weight  # FC1 of a gated activation is twice as tall
        found = [inputs, weight, kept(mlp, x.clone().requires_grad_(), sizes) - weights]
        if recipe is None:
            bare = [found[0], linear.weight.nbytes, found[2]]
        cells = "".join(f"{have / MIB:8.2f} {have / want:6.1%} " for have, want in zip(found, bare))
        noise = "" if recipe is None else "".join(f"{q:6.1f}" for q in quality(recipe, groups, features, sizes))
        print(f"{type(recipe).__name__ if recipe else 'none':22}{cells}   {noise}", flush=True)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, quick="three balanced cases, or a quarter of the tokens and of the width")
    made.add_argument("--recipes", action="store_true", help="what recipes keep")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    torch.set_num_threads(1)
    (recipes if options.recipes else peaks)(options.quick)


if __name__ == "__main__":
    main()
