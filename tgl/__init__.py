"""torch grouped linear: the expert layers of Mixture-of-Experts models as ``torch.library`` ops."""

from . import backends
from .backends import GraphCaptureError, NoImplementationError, explain, register_implementation, warmup
from .debug import debug_checks
from .nn import GroupedLinear, GroupedMLP, Routing, combine, dispatch, dispatch_weights, route
from .ops import (
    SAC_SAVE_LIST,
    allocate_wgrad,
    from_blocked_scale,
    from_te_scale_layout,
    from_torch_scale_layout,
    group_dequantize,
    group_quantize,
    grouped_activation,
    grouped_dbias,
    grouped_dbias_dscales,
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_accumulate_,
    splits_to_offsets,
    to_blocked_scale,
    to_te_scale_layout,
    to_torch_scale_layout,
)
from .tensor import (
    DenseGroupedTensor,
    FP8BlockGroupedTensor,
    FP8TensorGroupedTensor,
    GroupedTensor,
    MXFP8GroupedTensor,
    NVFP4GroupedTensor,
    quantize,
)

__version__ = "0.1.0"

__all__ = [
    "SAC_SAVE_LIST",
    "DenseGroupedTensor",
    "FP8BlockGroupedTensor",
    "FP8TensorGroupedTensor",
    "GraphCaptureError",
    "GroupedLinear",
    "GroupedMLP",
    "GroupedTensor",
    "MXFP8GroupedTensor",
    "NVFP4GroupedTensor",
    "NoImplementationError",
    "Routing",
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
    "grouped_dbias",
    "grouped_dbias_dscales",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "grouped_gemm_wgrad_accumulate_",
    "quantize",
    "register_implementation",
    "route",
    "splits_to_offsets",
    "to_blocked_scale",
    "to_te_scale_layout",
    "to_torch_scale_layout",
    "warmup",
]
