"""torch grouped linear: the expert layers of Mixture-of-Experts models as ``torch.library`` ops."""

from . import backends, recipes
from .backends import GraphCaptureError, NoImplementationError, explain, register_implementation, warmup
from .debug import debug_checks
from .nn import (
    GroupedActivation,
    GroupedLinear,
    GroupedMLP,
    Routing,
    Sequential,
    combine,
    dispatch,
    dispatch_weights,
    route,
)
from .ops import (
    SAC_SAVE_LIST,
    allocate_wgrad,
    from_blocked_scale,
    from_te_scale_layout,
    from_torch_scale_layout,
    group_dequantize,
    group_quantize,
    grouped_activation,
    grouped_activation_quantize,
    grouped_dbias,
    grouped_dbias_dscales,
    grouped_gemm,
    grouped_gemm_scaled,
    grouped_gemm_scaled_wgrad,
    grouped_gemm_scaled_wgrad_accumulate_,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_accumulate_,
    splits_to_offsets,
<<<<<<< HEAD
    update_amax_history_,
    wgrad_stash_,
=======
    to_blocked_scale,
    to_te_scale_layout,
    to_torch_scale_layout,
>>>>>>> bnvfp4
)

__version__ = "0.1.0"

__all__ = [
    "SAC_SAVE_LIST",
    "GraphCaptureError",
    "GroupedActivation",
    "GroupedLinear",
    "GroupedMLP",
    "NoImplementationError",
    "Routing",
    "Sequential",
    "allocate_wgrad",
    "backends",
    "combine",
    "debug_checks",
    "dispatch",
    "dispatch_weights",
    "explain",
    "from_blocked_scale",
    "from_te_scale_layout",
    "from_torch_scale_layout",
    "group_dequantize",
    "group_quantize",
    "grouped_activation",
    "grouped_activation_quantize",
    "grouped_dbias",
    "grouped_dbias_dscales",
    "grouped_gemm",
    "grouped_gemm_scaled",
    "grouped_gemm_scaled_wgrad",
    "grouped_gemm_scaled_wgrad_accumulate_",
    "grouped_gemm_wgrad",
    "grouped_gemm_wgrad_accumulate_",
    "recipes",
    "register_implementation",
    "route",
    "splits_to_offsets",
<<<<<<< HEAD
    "update_amax_history_",
=======
    "to_blocked_scale",
    "to_te_scale_layout",
    "to_torch_scale_layout",
>>>>>>> bnvfp4
    "warmup",
    "wgrad_stash_",
]
