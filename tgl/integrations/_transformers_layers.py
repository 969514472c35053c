"""Mixture-of-Experts layers of transformers' models as ``tgl.MoELayer``: options, and state dicts in both directions.

| family (``config.model_type``) | module of transformers |
|---|---|
| ``mixtral`` | ``MixtralSparseMoeBlock`` |
| ``qwen3_moe`` | ``Qwen3MoeSparseMoeBlock`` |
| ``deepseek_v3`` | ``DeepseekV3MoE`` |
| ``gpt_oss`` | ``GptOssMLP`` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..meta.activations import CLAMPED, IDENTITY, TABLE
from ..meta.checks import unknown
from ..nn.layouts import from_transformers, to_transformers
from ..ops.grouped_activation import Params

State = Mapping[str, Tensor]
_SHARED = tuple(f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))


class Family(NamedTuple):
    """A family of models with one form of layer.

    Attributes:
        options: from a config to the arguments of ``MoELayer``.
        names: names of ours by those of transformers, for all but experts and shared experts.
        transposed: whether the experts' matrices are ``[G, in, out]``.
        shared: whether there are shared experts.
    """

    options: Callable[[Any], dict[str, Any]]
    names: dict[str, str]
    transposed: bool = False
    shared: bool = False


def _sizes(config: Any, intermediate_size: int, num_experts: int) -> dict[str, Any]:
    made = {
        "hidden_size": config.hidden_size,
        "intermediate_size": intermediate_size,
        "num_experts": num_experts,
        "top_k": config.num_experts_per_tok,
    }
    coefficient = getattr(config, "router_aux_loss_coef", None)
    return made if coefficient is None else {**made, "load_balancing_coefficient": coefficient}


def _gated(name: str) -> str:
    """Return the gated activation whose gate transformers calls ``name``."""
    gates = {a.gate.name: kind for kind, a in TABLE.items() if a.linear is IDENTITY}
    if name not in gates:
        raise ValueError(f"`config.hidden_act` must be one of {', '.join(gates)}, but got {unknown(name, gates)}")
    return gates[name]


def _mixtral(config: Any) -> dict[str, Any]:
    return {
        **_sizes(config, config.intermediate_size, config.num_local_experts),
        "activation": _gated(config.hidden_act),
        "router": {"renormalize": True},
    }


def _qwen3_moe(config: Any) -> dict[str, Any]:
    return {
        **_sizes(config, config.moe_intermediate_size, config.num_experts),
        "activation": _gated(config.hidden_act),
        "router": {"renormalize": config.norm_topk_prob},
    }


def _deepseek_v3(config: Any) -> dict[str, Any]:
    return {
        **_sizes(config, config.moe_intermediate_size, config.n_routed_experts),
        "activation": _gated(config.hidden_act),
        "shared_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "balance": "bias",
        "router": {
            "score_function": "sigmoid",
            "renormalize": config.norm_topk_prob,
            "scale": config.routed_scaling_factor,
            "num_groups": config.n_group,
            "topk_groups": config.topk_group,
            "group_score": "top2_sum",
        },
    }


def _gpt_oss(config: Any) -> dict[str, Any]:
    (activation,) = (kind for kind, a in TABLE.items() if a.linear is CLAMPED)
    served = Params()
    for name, constant in (("swiglu_alpha", served.alpha), ("swiglu_limit", served.limit)):
        if getattr(config, name, constant) != constant:
            raise ValueError(f"`config.{name}` must be {constant}, but got {getattr(config, name)}")
    return {
        **_sizes(config, config.intermediate_size, config.num_local_experts),
        "activation": activation,
        "interleaved": True,
        "bias": True,
        "router_bias": True,
        "router": {"renormalize": True},
    }


_GATE = {"gate.weight": "router.weight"}
FAMILIES = {
    "mixtral": Family(_mixtral, _GATE),
    "qwen3_moe": Family(_qwen3_moe, _GATE),
    "deepseek_v3": Family(_deepseek_v3, {**_GATE, "gate.e_score_correction_bias": "router.expert_bias"}, shared=True),
    "gpt_oss": Family(_gpt_oss, {name: name for name in ("router.weight", "router.bias")}, transposed=True),
}


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"`family` must be one of {', '.join(FAMILIES)}, but got {unknown(name, FAMILIES)}")
    return FAMILIES[name]


def layer_options(config: Any) -> dict[str, Any]:
    """Return the arguments of the ``tgl.MoELayer`` that computes what the model's own layer does.

    Args:
        config: the config of a model of one of the families (``config.model_type``).

    Raises:
        ValueError: another family, or a constant that the layer does not have.
    """
    return _family(config.model_type).options(config)


def to_layer(state: State, family: str) -> dict[str, Tensor]:
    """Convert the state dict of a model's layer to that of a ``tgl.MoELayer``; views but for shared experts.

    Args:
        state: by the names of transformers' modules, the experts packed (``experts.gate_up_proj``).
        family: ``"mixtral"``, ``"qwen3_moe"``, ``"deepseek_v3"`` or ``"gpt_oss"``.

    Raises:
        ValueError: another family, or an entry of another name.
    """
    found = _family(family)
    rest = dict(state)
    packed = from_transformers(_part(rest, "experts."), transposed=found.transposed)
    made = {f"experts.{name}": t for name, t in packed.items()}
    if found.shared:
        gate, up, down = (rest.pop(name) for name in _SHARED)
        made["shared.fc1.weight"], made["shared.fc2.weight"] = torch.cat([gate, up])[None], down[None]
    _check_names(rest, found.names)
    return {**{found.names[name]: t for name, t in rest.items()}, **made}


def from_layer(state: State, family: str) -> dict[str, Tensor]:
    """Invert ``to_layer``; views. A dict of gradients by the names of parameters is converted in the same way.

    Raises:
        ValueError: another family, or an entry of another name.
    """
    found = _family(family)
    rest = dict(state)
    packed = to_transformers(_part(rest, "experts."), transposed=found.transposed)
    made = {f"experts.{name}": t for name, t in packed.items()}
    if found.shared:
        (first,), (second,) = rest.pop("shared.fc1.weight"), rest.pop("shared.fc2.weight")
        made |= dict(zip(_SHARED, (*first.chunk(2), second), strict=True))
    names = {ours: theirs for theirs, ours in found.names.items()}
    _check_names(rest, names)
    return {**{names[name]: t for name, t in rest.items()}, **made}


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take the entries with ``prefix`` out of ``state``, and return them without it."""
    return {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}


def _check_names(state: State, names: Mapping[str, str]) -> None:
    others = sorted(set(state) - set(names))
    if others:
        raise ValueError(f"`state` must hold experts and {', '.join(names)} only, but has {', '.join(others)}")
