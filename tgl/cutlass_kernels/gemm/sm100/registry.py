"""The GEMM kernels of sm_100, by the names that ``archs.Arch.kernel`` takes."""

from typing import Any

from ..mma_sync.packed import MmaSyncPackedGemmKernel
from .dactivation_kernel import Sm100GemmDactivationKernel
from .gather_kernels import Sm100GatherGemmActivationKernel, Sm100GatherGemmDactivationKernel, Sm100GatherGemmKernel
from .kernel import Sm100GemmActivationKernel, Sm100GemmKernel
from .scaled_kernel import Sm100QuantizingGemmKernel, Sm100ScaledGemmKernel
from .two_products_kernels import Sm100TwoProductsGemmActivationKernel, Sm100TwoProductsGemmKernel

KERNELS: dict[str, Any] = {
    "ActivatedGroupedGemm": Sm100GemmActivationKernel,
    "GatheredActivatedGroupedGemm": Sm100GatherGemmActivationKernel,
    "GatheredGradientGroupedGemm": Sm100GatherGemmDactivationKernel,
    "GatheredGroupedGemm": Sm100GatherGemmKernel,
    "GradientGroupedGemm": Sm100GemmDactivationKernel,
    "GroupedGemm": Sm100GemmKernel,
    "PackedGroupedGemm": MmaSyncPackedGemmKernel,
    "PairedActivatedGroupedGemm": Sm100TwoProductsGemmActivationKernel,
    "PairedGroupedGemm": Sm100TwoProductsGemmKernel,
    "QuantizingGroupedGemm": Sm100QuantizingGemmKernel,
    "ScaledGroupedGemm": Sm100ScaledGemmKernel,
}
