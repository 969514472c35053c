"""The GEMM kernels of sm_90, by the names that ``archs.Arch.kernel`` takes."""

from typing import Any

from ..mma_sync.packed import MmaSyncPackedGemmKernel
from .dactivation_kernel import Sm90GemmDactivationKernel
from .decode_kernels import Sm90DecodeGemmActivationKernel, Sm90DecodeGemmKernel
from .gather_kernels import Sm90GatherGemmActivationKernel, Sm90GatherGemmDactivationKernel, Sm90GatherGemmKernel
from .kernel import Sm90GemmActivationKernel, Sm90GemmKernel
from .packed_kernel import Sm90PackedGemmKernel
from .scaled_kernel import Sm90ScaledGemmKernel
from .swap_ab_kernel import Sm90SwapAbGemmKernel
from .syrk_kernel import Sm90SyrkKernel
from .two_products_kernels import Sm90TwoProductsGemmActivationKernel, Sm90TwoProductsGemmKernel

KERNELS: dict[str, Any] = {
    "ActivatedGroupedGemm": Sm90GemmActivationKernel,
    "DecodingGroupedGemm": Sm90PackedGemmKernel,
    "FewActivatedGroupedGemm": Sm90DecodeGemmActivationKernel,
    "FewGroupedGemm": Sm90DecodeGemmKernel,
    "GatheredActivatedGroupedGemm": Sm90GatherGemmActivationKernel,
    "GatheredGradientGroupedGemm": Sm90GatherGemmDactivationKernel,
    "GatheredGroupedGemm": Sm90GatherGemmKernel,
    "GradientGroupedGemm": Sm90GemmDactivationKernel,
    "GroupedGemm": Sm90GemmKernel,
    "PackedGroupedGemm": MmaSyncPackedGemmKernel,
    "PairedActivatedGroupedGemm": Sm90TwoProductsGemmActivationKernel,
    "PairedGroupedGemm": Sm90TwoProductsGemmKernel,
    "ScaledGroupedGemm": Sm90ScaledGemmKernel,
    "SwappedGroupedGemm": Sm90SwapAbGemmKernel,
    "SymmetricGemm": Sm90SyrkKernel,
}
