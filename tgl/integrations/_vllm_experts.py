"""The classes by which vLLM runs experts on the grouped ops; imported where vLLM is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from ..nn.moe import moe
from ..nn.routing import route

# vLLM's activations in terms of ``grouped_activation``.
ACTIVATIONS: dict[MoEActivation, dict[str, Any]] = {
    MoEActivation.SILU: {"kind": "swiglu"},
    MoEActivation.GELU: {"kind": "geglu"},
    MoEActivation.GELU_TANH: {"kind": "geglu_tanh"},
    MoEActivation.SWIGLUOAI: {
        "kind": "clamped_qgeglu",
        "interleaved": True,
        "limit": 7.0,
        "alpha": 1.702,
        "offset": 1.0,
    },
    MoEActivation.SILU_NO_MUL: {"kind": "silu"},
    MoEActivation.GELU_NO_MUL: {"kind": "gelu"},
    MoEActivation.GELU_TANH_NO_MUL: {"kind": "gelu_tanh"},
    MoEActivation.RELU2_NO_MUL: {"kind": "srelu"},
}


class ExpertsConfig(QuantizationConfig):
    """vLLM's configuration of a model whose experts run on the grouped ops, while all other layers are vLLM's own."""

    def get_name(self) -> str:
        return "tgl"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ExpertsConfig:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts):
            if layer.apply_router_weight_on_input:
                raise NotImplementedError(
                    f'quantization="tgl" does not serve {prefix}, whose router weights multiply the tokens'
                )
            return ExpertsMethod(layer.moe_config)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class ExpertsMethod(FusedMoEMethodBase):
    """The experts of a layer by ``tgl.moe``, on the parameters that vLLM loads, without a copy in another layout."""

    supports_pre_processed_weights = True
    create_weights = UnquantizedFusedMoEMethod.create_weights

    def __init__(self, config: FusedMoEConfig):
        super().__init__(config)
        served = config.activation in ACTIVATIONS
        if not served or (config.activation is MoEActivation.SILU and config.swiglu_limit is not None):
            clamped = "" if config.swiglu_limit is None else f" clamped at {config.swiglu_limit}"
            raise NotImplementedError(
                f'quantization="tgl" serves the activations {", ".join(a.value for a in ACTIVATIONS)}, '
                f"but got {config.activation.value}{clamped}"
            )
        self.activation = ACTIVATIONS[config.activation]

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: nn.Module | None,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return ``[S, H]``: what the experts on this rank add to the tokens. vLLM runs shared experts by itself."""
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids]  # experts of other ranks are -1, which is a dropped slot
        routing = route(topk_ids, layer.local_num_experts, sentinels=True)
        w1, w2 = layer.w13_weight.transpose(1, 2), layer.w2_weight.transpose(1, 2)
        biases = (layer.w13_bias, layer.w2_bias) if self.moe.has_bias else (None, None)
        return moe(x, routing, topk_weights, w1, w2, *biases, **self.activation)
