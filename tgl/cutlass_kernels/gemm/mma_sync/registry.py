"""The mma.sync GEMM kernels, by the names that ``archs.Arch.kernel`` takes."""

from typing import Any

from .dactivation import MmaSyncGemmDactivationKernel
from .gather_kernels import (
    MmaSyncGatherGemmActivationKernel,
    MmaSyncGatherGemmDactivationKernel,
    MmaSyncGatherGemmKernel,
)
from .kernel import MmaSyncGemmActivationKernel, MmaSyncGemmKernel
from .packed import MmaSyncPackedGemmKernel
from .scaled_kernel import MmaSyncScaledGemmKernel

KERNELS: dict[str, Any] = {
    "ActivatedGroupedGemm": MmaSyncGemmActivationKernel,
    "GatheredActivatedGroupedGemm": MmaSyncGatherGemmActivationKernel,
    "GatheredGradientGroupedGemm": MmaSyncGatherGemmDactivationKernel,
    "GatheredGroupedGemm": MmaSyncGatherGemmKernel,
    "GradientGroupedGemm": MmaSyncGemmDactivationKernel,
    "GroupedGemm": MmaSyncGemmKernel,
    "PackedGroupedGemm": MmaSyncPackedGemmKernel,
    "ScaledGroupedGemm": MmaSyncScaledGemmKernel,
}
