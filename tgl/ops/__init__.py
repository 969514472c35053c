"""The ops of ``torch.ops.tgl``, one file each: schema, fake, CPU and CUDA implementations, autograd formula."""

from . import cuda_kernels, offload  # noqa: F401 (register)
from ._properties import SAC_SAVE_LIST
from .allocate_wgrad import allocate_wgrad
from .grouped_activation import grouped_activation
from .grouped_dbias import grouped_dbias, grouped_dbias_dscales
from .grouped_gemm import grouped_gemm
from .grouped_gemm_wgrad import grouped_gemm_wgrad, grouped_gemm_wgrad_accumulate_
from .splits_to_offsets import splits_to_offsets
from .wgrad_stash import wgrad_stash_

__all__ = [
    "SAC_SAVE_LIST",
    "allocate_wgrad",
    "grouped_activation",
    "grouped_dbias",
    "grouped_dbias_dscales",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "grouped_gemm_wgrad_accumulate_",
    "splits_to_offsets",
    "wgrad_stash_",
]
