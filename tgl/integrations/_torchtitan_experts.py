"""The classes by which torchtitan runs experts on the grouped ops; imported where torchtitan is installed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torchtitan.config.override import derive
from torchtitan.models.common import moe
from torchtitan.protocols.model import ModelConfigConverter

from .. import recipes
from ..nn.grouped_mlp import GroupedMLP

# The others keep buffers, amax histories or the state of a generator, which torchtitan's experts and checkpoints lack.
RECIPES = ("mxfp8", "fp8_block", "fp8_current")


class GroupedExperts(moe.GroupedExperts):
    """torchtitan's routed experts, computed by ``tgl.GroupedMLP`` in bfloat16, as torchtitan computes its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(moe.GroupedExperts.Config):
        """torchtitan's config of the experts, and the recipe.

        Attributes:
            recipe: name of the recipe by which both layers quantise; None for bfloat16.
        """

        recipe: str | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recipe = _checked(config.recipe)
        self._set_layer()

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the parameters as torchtitan does; the layer is then one of this rank's experts."""
        super().parallelize(parallel_dims)
        self._set_layer()

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Return the results of rows that are sorted by expert; rows past those of the last expert are zero."""
        w1, w2, w3 = (_local(w).bfloat16() for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        w13 = torch.cat([w1, w3], 1)
        with _concatenated_again(w13, w1.detach(), w3.detach()):
            y = functional_call(
                self._layer[0],
                {"fc1.weight": w13, "fc2.weight": w2},
                (x_RD.bfloat16(), num_tokens_per_expert_E),
            )
        return y.type_as(x_RD)

    def _set_layer(self) -> None:
        """Make the layer for the sizes of this rank's parameters; a call gives it the weights.

        It is in a tuple because it is no child: it has no parameters of its own.
        """
        experts, intermediate_size, hidden_size = _local(self.w1_EFD).shape
        layer = GroupedMLP(
            experts, hidden_size, intermediate_size, dtype=torch.bfloat16, device="meta", recipe=self.recipe
        )
        self._layer = (layer,)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, recipe={self.recipe!r}"


class GroupedExpertsConverter(ModelConfigConverter):
    """Converter of a model's config, from torchtitan's ``GroupedExperts`` to those that run on the grouped ops."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Options of the converter.

        Attributes:
            recipe: name of the recipe by which the experts quantise; None for bfloat16.
            fqns: parts of the names of the modules to convert, as torchtitan's converters take them; empty for all.
        """

        recipe: str | None = None
        fqns: list[str] = field(default_factory=list)

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace the experts' configs in ``model_config``, in place.

        Raises:
            ValueError: the model has no experts to convert, or the recipe is not one of those that experts take.
            TypeError: the experts are of a subclass, whose parameters or arithmetic differ.
        """
        found = [
            entry
            for entry in model_config.traverse(moe.GroupedExperts.Config)
            if not self.config.fqns or any(name in entry[0] for name in self.config.fqns)
        ]
        if not found:
            where = f" under names with one of {self.config.fqns}" if self.config.fqns else ""
            raise ValueError(
                f"`model_config` must have GroupedExperts{where}, but {type(model_config).__qualname__} has none"
            )
        configs = [convert(config, self.config.recipe) for _, config, _, _ in found]
        for new, (_, _, parent, name) in zip(configs, found):
            setattr(parent, name, new)
        return model_config


def convert(config: moe.GroupedExperts.Config, recipe: str | None) -> GroupedExperts.Config:
    """Return the config of experts that run on the grouped ops, from torchtitan's.

    Raises:
        ValueError: the recipe is not one of those that experts take.
        TypeError: the experts are of a subclass, whose parameters or arithmetic differ.
    """
    if type(config) is not moe.GroupedExperts.Config:
        raise TypeError(
            "`config` must be torchtitan.models.common.moe.GroupedExperts.Config, but got "
            f"{type(config).__module__}.{type(config).__qualname__}"
        )
    _checked(recipe)
    return derive(config, GroupedExperts.Config, recipe=recipe)


def _checked(recipe: str | None) -> str | None:
    recipes.named(recipe)
    if recipe is not None and recipe not in RECIPES:
        raise ValueError(f"`recipe` must be one of {', '.join(RECIPES)} or None for torchtitan, but got {recipe!r}")
    return recipe


def _concatenated_again(w13: Tensor, w1: Tensor, w3: Tensor) -> AbstractContextManager:
    """Make autograd save ``w1`` and ``w3`` wherever it would save their concatenation, which the backward makes again.

    FSDP frees these two between forward and backward. A compiler decides by itself what a backward computes again.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    storage = w13.untyped_storage()._cdata

    def pack(t: Tensor) -> Any:
        return (t.shape, t.stride(), t.storage_offset()) if t.untyped_storage()._cdata == storage else t

    def unpack(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else torch.cat([w1, w3], 1).as_strided(*saved)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
