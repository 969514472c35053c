"""Hugging Face PEFT: adapters of transformers' experts as grouped products, without a second tensor of weights' size.

``target_parameters`` of a ``LoraConfig`` names the three-dimensional parameters of experts. PEFT adds the update to the
whole parameter in every forward, which takes memory for as many values again, and for the gradient of them in the
backward. After ``attach`` the experts compute ``x W + scaling * (x A) B``::

    tgl.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="tgl")
    model = get_peft_model(model, LoraConfig(r=16, target_modules=[], target_parameters=[
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))
    tgl.integrations.peft.attach(model)

Everything else stays PEFT's: parameters and their names, files, several adapters, ``disable_adapter``, merging, and
what it refuses (dropout, DoRA, biases of adapters, mixed batches of adapters).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..nn._errors import fail
from ..nn._low_rank import LowRank
from ..nn.layouts import lora_from_peft
from ._packed_experts import PackedExperts
from .transformers import serves

OLDEST = (0, 21)  # the oldest that knows of transposed experts and of several adapters
_NEEDS = "tgl.integrations.peft needs peft 0.21 or later; install it with `pip install torch-grouped-linear[peft]`"

try:
    import peft
    from peft.tuners import lora
except ImportError as error:
    raise ImportError(_NEEDS) from error

_BIAS = "`lora_bias` must be False for adapters of experts"
MATRICES = ("gate_up_proj", "up_proj", "down_proj")


class ParamWrapper(lora.ParamWrapper):  # named as in PEFT, which looks classes up by name
    """PEFT's module around a parameter, which hands its adapters to the experts instead of adding them to the weight.

    ``attach`` makes PEFT's modules of this class. There is one around the other for every parameter of the experts.
    """

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Update the layer as PEFT does, for another adapter; PEFT rejects biases of the first adapter only."""
        if config.lora_bias:
            raise ValueError(f"{_BIAS}, but is True of {adapter_name!r}")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the experts on ``x [S, H]``, with the active adapters of this parameter and of the enclosing modules.

        Raises:
            ValueError: the model runs its experts by another implementation now; or ``adapter_names`` is given.
        """
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        updates: tuple[LowRank, ...] = ()
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
        elif not self.merged:
            updates = tuple([self._update(name) for name in self.active_adapters if name in self.lora_A])
        if updates:
            _check_implementation(self.get_base_layer(), "")
            kwargs["low_rank"] = {**kwargs.get("low_rank", {}), self.parameter_name: updates}
        return self.base_layer(x, *args, **kwargs)

    def _update(self, adapter: str) -> LowRank:
        """Return the matrices in the parameter's dtype, ``lora_B`` in the memory order that is fastest for GEMMs."""
        dtype = self.get_param().dtype
        weight_a: Any = self.lora_A[adapter].weight
        weight_b: Any = self.lora_B[adapter].weight
        a, b = lora_from_peft(weight_a, weight_b, self.num_experts)
        b = b.to(dtype, memory_format=torch.contiguous_format).contiguous()
        return LowRank(a.to(dtype), b, self.scaling[adapter])


def attach(model: nn.Module) -> list[str]:
    """Make the adapters of a model's experts grouped products.

    Adapters that are loaded or added later are served as well. Wrapped parameters of other modules, and biases, stay
    with PEFT.

    Args:
        model: a ``PeftModel``, or a transformers model with adapters in it, whose experts run by the implementation
            of ``tgl.integrations.transformers``.

    Returns:
        The names of the modules around parameters that are served from now on.

    Raises:
        ImportError: peft is older than 0.21.
        ValueError: ``model`` has no adapters of experts' matrices; its experts run by another implementation, or in
            expert parallelism, or are quantised; an adapter has biases. Nothing is changed then.
    """
    if tuple(int(part) for part in peft.__version__.split(".")[:2]) < OLDEST:
        raise ImportError(f"{_NEEDS}, but {peft.__version__} is installed")
    found = dict(_wrappers(model, lora.ParamWrapper))
    if not found:
        raise ValueError(
            "`model` must have adapters of experts (`target_parameters` of LoraConfig) on "
            f"{', '.join(MATRICES)}, but has none"
        )
    for name, wrapper in found.items():
        experts = wrapper.get_base_layer()
        _check_implementation(experts, f" at {name}")
        if getattr(experts, "_is_expert_parallel", False):
            raise ValueError(f"`model` must hold all experts on every rank, but {name} is in expert parallelism")
        biased = [adapter for adapter, bias in wrapper.lora_bias.items() if bias]
        if biased:
            raise ValueError(f"{_BIAS}, but is True of {biased[0]!r} at {name}")
        dtype = wrapper.get_param().dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(f"`model` must have experts in a floating dtype of 16 bits or more, but {name} is {dtype}")
    for wrapper in found.values():
        wrapper.__class__ = ParamWrapper
    return list(found)


def detach(model: nn.Module) -> None:
    """Undo ``attach``: PEFT's own forward runs again. Parameters and adapters stay as they are."""
    for _, wrapper in _wrappers(model, ParamWrapper):
        wrapper.__class__ = lora.ParamWrapper


def _wrappers(model: nn.Module, kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yield the wrappers of class ``kind`` around matrices of experts, by their names in ``model``."""
    for name, module in model.named_modules():
        if isinstance(module, kind) and module.parameter_name in MATRICES:
            experts = module.get_base_layer()  # type: ignore[operator]
            gated = hasattr(experts, "_apply_gate") or isinstance(experts, PackedExperts)
            if gated and getattr(experts, str(module.parameter_name)).dim() == 3:
                yield name, module


def _check_implementation(experts: nn.Module, where: str) -> None:
    """Check that ``experts`` run by the implementation that takes updates.

    Raises:
        ValueError: they do not.
    """
    if not serves(experts):
        name = experts.config._experts_implementation  # type: ignore[union-attr]
        fail(
            f"`experts_implementation` must be the one of tgl.integrations.transformers for adapters{where}, but is "
            f"{name!r}: call tgl.integrations.transformers.register() and model.set_experts_implementation('tgl')"
        )
