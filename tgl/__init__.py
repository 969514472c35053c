"""torch grouped linear: the expert layers of Mixture-of-Experts models as ``torch.library`` ops.

The names in ``__all__`` are public, and users import them from here. ``tgl.distributed``, ``tgl.integrations``,
``tgl.testing`` and ``tgl.optim`` are public too, and imported on first use. ``docs/architecture.md`` has a map of
the packages.
"""

import importlib as _importlib
from types import ModuleType as _ModuleType

from . import backends, ops, recipes  # noqa: F401 (declares the ops, before their implementations)
from .backends import GraphCaptureError, NoImplementationError, explain, register_implementation, warmup
from .backends.composite import register as _composite  # noqa: F401 (registers implementations, as the next ones do)
from .backends.cpu import register as _cpu  # noqa: F401
from .backends.portable import register as _portable  # noqa: F401
from .cutlass_kernels import register as _cutlass_kernels  # noqa: F401
from .debug import debug_checks
from .meta.components import Components
from .moe_layer import MoELayer
from .nn import (
    GroupedActivation,
    GroupedLinear,
    GroupedLoRALinear,
    GroupedMLP,
    GroupedPackedLinear,
    MoE,
    RouterOutput,
    Routing,
    Sequential,
    combine,
    dispatch,
    dispatch_weights,
    moe,
    round_tokens,
    route,
    topk_router,
)
from .offload import cpu_offload
from .ops import (
    SAC_SAVE_LIST,
    allocate_wgrad,
    batched_syrk,
    fp8_scale_from_history,
    fp8_update_history_,
    from_blocked_scale,
    from_te_scale_layout,
    from_torch_scale_layout,
    group_dequantize,
    group_quantize,
    group_requantize,
    grouped_activation,
    grouped_activation_quantize,
    grouped_dbias,
    grouped_dbias_dscales,
    grouped_gemm,
    grouped_gemm_activation,
    grouped_gemm_dactivation,
    grouped_gemm_low_rank,
    grouped_gemm_low_rank_activation,
    grouped_gemm_packed,
    grouped_gemm_row_scaled,
    grouped_gemm_row_scaled_wgrad,
    grouped_gemm_scaled,
    grouped_gemm_scaled_activation_quantize,
    grouped_gemm_scaled_wgrad,
    grouped_gemm_scaled_wgrad_accumulate_,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_accumulate_,
    grouped_mlp,
    splits_to_offsets,
    to_blocked_scale,
    to_te_scale_layout,
    to_torch_scale_layout,
    wgrad_stash_,
)
from .tensor import (
    DenseGroupedTensor,
    FP8BlockGroupedTensor,
    FP8TensorGroupedTensor,
    GroupedTensor,
    MXFP4GroupedTensor,
    MXFP8GroupedTensor,
    NVFP4GroupedTensor,
    quantize,
)
from .utils import compile_cache_key as _compile_cache_key  # noqa: F401 (changes the keys)

__version__ = "0.2.0"

__all__ = [
    "SAC_SAVE_LIST",
    "Components",
    "DenseGroupedTensor",
    "FP8BlockGroupedTensor",
    "FP8TensorGroupedTensor",
    "GraphCaptureError",
    "GroupedActivation",
    "GroupedLinear",
    "GroupedLoRALinear",
    "GroupedMLP",
    "GroupedPackedLinear",
    "GroupedTensor",
    "MXFP4GroupedTensor",
    "MXFP8GroupedTensor",
    "MoE",
    "MoELayer",
    "NVFP4GroupedTensor",
    "NoImplementationError",
    "RouterOutput",
    "Routing",
    "Sequential",
    "allocate_wgrad",
    "backends",
    "batched_syrk",
    "combine",
    "cpu_offload",
    "debug_checks",
    "dispatch",
    "dispatch_weights",
    "explain",
    "fp8_scale_from_history",
    "fp8_update_history_",
    "from_blocked_scale",
    "from_te_scale_layout",
    "from_torch_scale_layout",
    "group_dequantize",
    "group_quantize",
    "group_requantize",
    "grouped_activation",
    "grouped_activation_quantize",
    "grouped_dbias",
    "grouped_dbias_dscales",
    "grouped_gemm",
    "grouped_gemm_activation",
    "grouped_gemm_dactivation",
    "grouped_gemm_low_rank",
    "grouped_gemm_low_rank_activation",
    "grouped_gemm_packed",
    "grouped_gemm_row_scaled",
    "grouped_gemm_row_scaled_wgrad",
    "grouped_gemm_scaled",
    "grouped_gemm_scaled_activation_quantize",
    "grouped_gemm_scaled_wgrad",
    "grouped_gemm_scaled_wgrad_accumulate_",
    "grouped_gemm_wgrad",
    "grouped_gemm_wgrad_accumulate_",
    "grouped_mlp",
    "moe",
    "quantize",
    "recipes",
    "register_implementation",
    "round_tokens",
    "route",
    "splits_to_offsets",
    "to_blocked_scale",
    "to_te_scale_layout",
    "to_torch_scale_layout",
    "topk_router",
    "warmup",
    "wgrad_stash_",
]

_LAZY = ("distributed", "integrations", "optim", "testing")  # imported on first use


def __getattr__(name: str) -> _ModuleType:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted([*__all__, *_LAZY, "__version__"])
