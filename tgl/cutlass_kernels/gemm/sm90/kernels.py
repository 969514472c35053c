"""The GEMM kernels of sm_90, by the names that ``archs.Arch.kernel`` asks for."""

from .gathered import GatheredActivatedGemm, GatheredGradientGemm, GatheredGroupedGemm
from .gradient import GradientGroupedGemm
from .kernel import ActivatedGroupedGemm, GroupedGemm
from .scaled import ScaledGroupedGemm

__all__ = [
    "ActivatedGroupedGemm",
    "GatheredActivatedGemm",
    "GatheredGradientGemm",
    "GatheredGroupedGemm",
    "GradientGroupedGemm",
    "GroupedGemm",
    "ScaledGroupedGemm",
]
