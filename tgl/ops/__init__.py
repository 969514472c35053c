"""The ops of ``torch.ops.tgl``, one file each: schema, check and allocation, fake, formula, public function.

``tgl``, ``tgl.nn`` and the packages above import the public functions from here. Nothing here imports implementations:
ops look them up in ``tgl.backends``.
"""

from . import after, expert_parallel, moe, offload, permutation, route, same_offs, topk_router  # noqa: F401 (register)
from ._properties import SAC_SAVE_LIST
from .allocate_wgrad import allocate_wgrad
from .batched_syrk import batched_syrk
from .fp8_history import fp8_scale_from_history, fp8_update_history_
from .group_dequantize import group_dequantize
from .group_quantize import group_quantize
from .group_requantize import group_requantize
from .grouped_activation import grouped_activation
from .grouped_activation_quantize import grouped_activation_quantize
from .grouped_dbias import grouped_dbias
from .grouped_dbias_dscales import grouped_dbias_dscales
from .grouped_gemm import grouped_gemm
from .grouped_gemm_activation import grouped_gemm_activation
from .grouped_gemm_dactivation import grouped_gemm_dactivation
from .grouped_gemm_low_rank import grouped_gemm_low_rank
from .grouped_gemm_low_rank_activation import grouped_gemm_low_rank_activation
from .grouped_gemm_packed import grouped_gemm_packed
from .grouped_gemm_row_scaled import grouped_gemm_row_scaled, grouped_gemm_row_scaled_wgrad
from .grouped_gemm_scaled import grouped_gemm_scaled
from .grouped_gemm_scaled_activation_quantize import grouped_gemm_scaled_activation_quantize
from .grouped_gemm_scaled_wgrad import grouped_gemm_scaled_wgrad, grouped_gemm_scaled_wgrad_accumulate_
from .grouped_gemm_wgrad import grouped_gemm_wgrad, grouped_gemm_wgrad_accumulate_
from .grouped_mlp import grouped_mlp
from .scale_layout import (
    from_blocked_scale,
    from_te_scale_layout,
    from_torch_scale_layout,
    to_blocked_scale,
    to_te_scale_layout,
    to_torch_scale_layout,
)
from .splits_to_offsets import splits_to_offsets
from .wgrad_stash import wgrad_stash_

__all__ = [
    "SAC_SAVE_LIST",
    "allocate_wgrad",
    "batched_syrk",
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
    "splits_to_offsets",
    "to_blocked_scale",
    "to_te_scale_layout",
    "to_torch_scale_layout",
    "wgrad_stash_",
]
