"""Layers and tensors as files, which later versions must load.

    python tests/saved_objects.py FILE

writes an archive with every object as ``NAME.pkl`` by ``pickle``, and it or its state dict as ``NAME.pt`` by
``torch.save``, for ``torch.load(weights_only=True)``. ``tests/data/saved_objects.zip`` was written by version 0.1.0
before modules of the package were renamed, so the functions here use public names only, which exist in both.
"""

import io
import pickle
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tgl
from tgl import recipes

OFFS = torch.tensor([5, 32], dtype=torch.int32)
EXPERTS = torch.arange(24).view(12, 2) % 2
RECIPES = (
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
)
FORMATS = ("dense", "fp8_block", "fp8_tensor", "mxfp4", "mxfp8", "nvfp4")


def integers(*shape: int) -> Tensor:
    """Return small integers, of which every order of summation yields the same sums."""
    return (torch.arange(torch.Size(shape).numel()).view(shape) * 7 % 5 - 2).float()


def filled(layer: nn.Module) -> nn.Module:
    """Return the layer with small integers as parameters."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(integers(*parameter.shape))
    return layer


def linear(**options: Any) -> nn.Module:
    return filled(tgl.GroupedLinear(2, 32, 32, **options))


def trained(layer: nn.Module) -> nn.Module:
    """Return the layer after a forward and a backward, which leave state in it."""
    layer(integers(32, 32).requires_grad_(), OFFS).sum().backward()
    return layer


def accumulating() -> nn.Module:
    layer = linear(fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    return trained(layer)


def moe(**options: Any) -> nn.Module:
    return filled(tgl.MoE(2, 32, 32, **options))


def packed() -> nn.Module:
    layer = tgl.GroupedPackedLinear(2, 32, 32, bias=False)
    layer.weight.quantize_(integers(2, 32, 32).bfloat16())
    return layer


def low_rank() -> nn.Module:
    return filled(tgl.GroupedLoRALinear(tgl.GroupedLinear(2, 32, 32), 4))


def quantized(format: str, *, matrices: bool = False) -> tgl.GroupedTensor:
    x = integers(2, 32, 32) if matrices else integers(32, 32)
    return tgl.quantize(x, None if matrices else OFFS, format)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: trained(linear()),
    **{
        f"linear {recipe}": lambda recipe=recipe: trained(linear(recipe=getattr(recipes, recipe)()))
        for recipe in RECIPES
    },
    "linear with single weights": lambda: linear(single_grouped_weight=False),
    "linear with delayed weight gradients": lambda: trained(linear(delay_wgrad_compute=True)),
    "linear with main_grad": accumulating,
    "LoRA": low_rank,
    "packed": packed,
    "MLP": lambda: filled(tgl.GroupedMLP(2, 32, 32, recipe=recipes.MXFP8BlockScaling())),
    "sequential": lambda: tgl.Sequential(linear(), tgl.GroupedActivation("relu"), linear()),
    "MoE": moe,
    "MoE with a recipe": lambda: moe(recipe=recipes.MXFP8BlockScaling(), bias=True),
}
TENSORS: dict[str, Callable[[], tgl.GroupedTensor]] = {
    **{f"rows {format}": lambda format=format: quantized(format) for format in FORMATS},
    **{f"matrices {format}": lambda format=format: quantized(format, matrices=True) for format in FORMATS},
}


def result(layer: nn.Module) -> Tensor:
    """Return what a layer computes of integers."""
    if isinstance(layer, tgl.MoE):
        return layer(integers(12, 32), EXPERTS, torch.ones(12, 2))
    return layer(
        integers(32, 32).to(torch.bfloat16 if isinstance(layer, tgl.GroupedPackedLinear) else torch.float32), OFFS
    )


def main(path: str) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, make in {**LAYERS, **TENSORS}.items():
            torch.manual_seed(0)
            made = make()
            archive.writestr(f"{name}.pkl", pickle.dumps(made))
            file = io.BytesIO()
            torch.save(made.state_dict() if isinstance(made, nn.Module) else made, file)
            archive.writestr(f"{name}.pt", file.getvalue())


if __name__ == "__main__":
    main(sys.argv[1])
