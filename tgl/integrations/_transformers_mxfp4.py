"""Checkpoints of gpt-oss, whose experts' weights stay in MXFP4 when transformers loads them.

transformers gives such a model experts of its own (``Mxfp4GptOssExperts``), which no experts implementation can
replace, because their weights have the layout of kernels from the hub. So the quantizer that ``from_pretrained`` uses
is replaced by one that inserts ``PackedExperts``, if the model is loaded with ``experts_implementation="tgl"``.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers import auto
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationMethod

from ..nn.layouts import mxfp4_to_gpt_oss
from ..tensor import GroupedTensor
from ._packed_experts import PARTS, PackedExperts

_names: set[str] = set()


def register(name: str) -> None:
    """Keep MXFP4 experts packed in models that are loaded with ``experts_implementation=name``."""
    _names.add(name)
    auto.AUTO_QUANTIZER_MAPPING[QuantizationMethod.MXFP4.value] = PackedQuantizer


class PackedQuantizer(Mxfp4HfQuantizer):
    """transformers' quantizer of MXFP4 checkpoints, except for models whose experts stay packed by tgl."""

    packed = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Defer the check until the model's experts implementation is known: tgl needs no hub kernels or Triton."""
        self._environment = args, kwargs

    def _process_model_before_weight_loading(self, model: Any, use_kernels: bool = False, **kwargs: Any) -> Any:
        self.packed = not self.quantization_config.dequantize and model.config._experts_implementation in _names
        if not self.packed:
            args, named = self._environment
            super().validate_environment(*args, **named)
            return super()._process_model_before_weight_loading(model, use_kernels=use_kernels, **kwargs)
        if not self.pre_quantized:
            raise NotImplementedError(
                f"tgl: a checkpoint that is not in MXFP4 is not quantised with experts_implementation="
                f"{model.config._experts_implementation!r}; load it without a `quantization_config`"
            )
        kept = self.quantization_config.modules_to_not_convert
        found = [name for name, module in model.named_modules() if isinstance(module, GptOssExperts)]
        if not found:
            raise NotImplementedError(f"tgl: MXFP4 stays packed in experts of gpt-oss; {type(model).__name__} has none")
        for name in found:
            if should_convert_module(name, kept):
                model.set_submodule(name, PackedExperts(model.get_submodule(name)))
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for experts in _packed(model):
            experts.join()
        return super()._process_model_after_weight_loading(model, **kwargs)

    def get_weight_conversions(self) -> list:
        """Return no conversions: parameters have the checkpoint's names."""
        return [] if self.packed else super().get_weight_conversions()

    def get_state_dict_and_metadata(self, model: Any, **kwargs: Any) -> Any:
        """Return blocks and scales by their names in a checkpoint."""
        if not self.packed:
            return super().get_state_dict_and_metadata(model, **kwargs)
        state = model.state_dict()
        for name in [name for name, t in state.items() if isinstance(t, GroupedTensor)]:
            data, scale, *_ = state.pop(name).components()
            state.update(zip((f"{name}_{part}" for part in PARTS), mxfp4_to_gpt_oss(data, scale)))
        return state, {}

    @property
    def is_trainable(self) -> bool:
        """True: adapters and layers around frozen experts are trainable."""
        return self.packed or super().is_trainable

    @property
    def is_compileable(self) -> bool:
        """The same as without quantisation."""
        return self.packed or super().is_compileable


def _packed(model: nn.Module) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]
