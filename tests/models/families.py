"""Small models of experts: stacks of this package's layers, and models of transformers that run on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tgl

from .cases import RECIPES, THEIRS, Case

VOCABULARY, TOP_K, POOL, LENGTH = 64, 2, 16, 8
CHECKPOINT = {"use_reentrant": False, "preserve_rng_state": False}  # a capture cannot read the state


class Size(NamedTuple):
    """Sizes of a model, whose input is ``[rows, hidden]``."""

    blocks: int = 2
    experts: int = 4
    hidden: int = 64
    ffn: int = 96
    rows: int = 48


class Routed(nn.Module):
    """A router and its experts."""

    def __init__(self, size: Size, options: dict[str, Any]) -> None:
        super().__init__()
        dtype, device = options["params_dtype"], options["device"]
        self.gate = nn.Linear(size.hidden, size.experts, bias=False, dtype=dtype, device=device)
        self.experts = tgl.MoE(size.experts, size.hidden, size.ffn, **options)

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        routed = tgl.topk_router(self.gate(x), TOP_K)
        return self.experts(x, routed.top_k_index, routed.weights)


def mlp(size: Size, options: dict[str, Any]) -> nn.Module:
    return tgl.GroupedMLP(size.experts, size.hidden, size.ffn, bias=True, **options)


def discrete(size: Size, options: dict[str, Any]) -> nn.Module:
    return tgl.GroupedLinear(size.experts, size.hidden, size.hidden, single_grouped_weight=False, **options)


def lora(size: Size, options: dict[str, Any]) -> nn.Module:
    """An MLP of two frozen layers with adapters, whose second matrices are not zero as those of new ones are."""
    made = tgl.GroupedMLP(size.experts, size.hidden, size.ffn, **options)
    made.fc1, made.fc2 = (tgl.GroupedLoRALinear(layer, rank=8) for layer in (made.fc1, made.fc2))
    for layer in (made.fc1, made.fc2):
        nn.init.normal_(layer.lora_B, std=0.2)
    return made


BLOCKS: dict[str, Callable[[Size, dict[str, Any]], nn.Module]] = {
    "moe": Routed,
    "mlp": mlp,
    "discrete": discrete,
    "lora": lora,
}


class Stack(nn.Module):
    """Blocks of a family, each added to its input, as a model of transformers adds its own."""

    def __init__(self, size: Size, case: Case, device: str, *, reference: bool) -> None:
        super().__init__()
        recipe = RECIPES[case.recipe]
        options: dict[str, Any] = {"params_dtype": parameters_dtype(case), "device": device}
        if not reference:
            options["recipe"] = None if recipe is None else recipe()
            if case.training in ("main_grad", "delayed"):
                options["fuse_wgrad_accumulation"] = case.training == "main_grad"
                options["delay_wgrad_compute"] = case.training == "delayed"
        self.blocks = nn.ModuleList(BLOCKS[case.family](size, options) for _ in range(size.blocks))
        self.checkpointed = case.training == "checkpointed" and not reference

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, splits, **CHECKPOINT) if self.checkpointed else block(x, splits))
        return x


def parameters_dtype(case: Case) -> torch.dtype:
    return torch.bfloat16 if case.precision == "bfloat16" else torch.float32


def transformers_model(family: str, size: Size | None = None, implementation: str = "tgl") -> nn.Module:
    """A model of transformers in float32 on a CPU, whose routers tell experts apart."""
    import transformers

    import tgl.integrations.transformers

    tgl.integrations.transformers.register()
    size = size or Size()
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.blocks,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts_per_tok": TOP_K,
        "attn_implementation": "eager",
    }
    if family == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(moe_intermediate_size=size.ffn, num_experts=size.experts, **common)
        model = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.GptOssConfig(num_local_experts=size.experts, **common)
        model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # the initialisation of models is for models of more layers and width
                parameter.normal_(std=0.1)
        for router in routers(model):
            router.weight.normal_(std=1)
    model.set_experts_implementation(implementation)
    return model


def routers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that choose experts: their ``weight [E, H]`` and ``bias`` make the logits."""
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in ("gate", "router")]


class Model(NamedTuple):
    """A model and the arguments of its call.

    Attributes:
        module: with parameters of the case's dtype.
        reference: the same in float64 and eager, without any option.
        arguments: rows that require a gradient, and the other arguments of ``module``.
        target: what its result is to be.
    """

    module: nn.Module
    reference: nn.Module
    arguments: tuple[Tensor, ...]
    target: Tensor


class LanguageModel(nn.Module):
    """A model of transformers from embedded tokens to logits.

    It has the causal mask as a buffer: transformers makes one from a number on the host, which a capture cannot read.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        self.register_buffer("mask", mask[None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, attention_mask=self.mask, use_cache=False).logits


def make(case: Case, size: Size, device: str = "cpu") -> Model:
    """The model of ``case``, with the same numbers every time."""
    torch.manual_seed(0)
    if case.family in THEIRS:
        module = LanguageModel(transformers_model(case.family, size)).to(device, parameters_dtype(case))
        wide = LanguageModel(transformers_model(case.family, size, "eager"))
        if case.training == "checkpointed":
            module.model.gradient_checkpointing_enable(CHECKPOINT)
        module.train()
        shape, rest, width = (size.rows // POOL * 2, LENGTH, size.hidden), (), VOCABULARY
    else:
        module = Stack(size, case, device, reference=False)
        wide = Stack(size, case, device, reference=True)
        shape, rest, width = (size.rows, size.hidden), (splits(size, device),), size.hidden
    reference = wide.to(device).double()
    reference.load_state_dict(module.state_dict(), strict=False)  # a recipe has states of its own
    x = well_routed(reference, shape, rest, device).to(parameters_dtype(case))
    target = torch.randn(*shape[:-1], width).to(device)
    return Model(module, reference, (x.requires_grad_(), *rest), target)


def splits(size: Size, device: str) -> Tensor:
    """Return splits with one empty group and a tail."""
    share = size.rows // size.experts
    return torch.tensor([share - 3, 0, 2 * share - 5, *[share] * (size.experts - 3)], device=device)


def well_routed(reference: nn.Module, shape: tuple[int, ...], rest: tuple, device: str) -> Tensor:
    """Rows whose choices of experts are the clearest of many: rounding must not turn one of them.

    Gradients of the same rows routed otherwise would say nothing of each other.
    """
    x = torch.randn(shape[0] * POOL, *shape[1:]).to(device)
    found = routers(reference)
    if not found:
        return x[: shape[0]]
    margins: list[Tensor] = []

    def margin(module: Any, args: tuple, _: object) -> None:
        logits = functional.linear(args[0], module.weight, getattr(module, "bias", None))
        best = logits.topk(TOP_K + 1).values
        margins.append((best[..., -2] - best[..., -1]).reshape(x.shape[0], -1).amin(1))

    hooks = [module.register_forward_hook(margin) for module in found]
    with torch.no_grad():
        reference(x.double(), *rest)
    for hook in hooks:
        hook.remove()
    return x[torch.stack(margins).amin(0).topk(shape[0]).indices]
