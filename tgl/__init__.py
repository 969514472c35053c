"""torch grouped linear: the expert layers of Mixture-of-Experts models as ``torch.library`` ops."""

from . import backends
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
from .offload import cpu_offload
from .ops import (
    SAC_SAVE_LIST,
    allocate_wgrad,
    grouped_activation,
    grouped_dbias,
    grouped_dbias_dscales,
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_accumulate_,
    splits_to_offsets,
    wgrad_stash_,
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
    "cpu_offload",
    "debug_checks",
    "dispatch",
    "dispatch_weights",
    "explain",
    "grouped_activation",
    "grouped_dbias",
    "grouped_dbias_dscales",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "grouped_gemm_wgrad_accumulate_",
    "register_implementation",
    "route",
    "splits_to_offsets",
    "warmup",
    "wgrad_stash_",
]
