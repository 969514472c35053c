"""The GEMM kernels of warps, by the names that ``archs.Arch.kernel`` asks for."""

from .gathered import GatheredActivatedGroupedGemm, GatheredGradientGroupedGemm, GatheredGroupedGemm
from .gradient import GradientGroupedGemm
from .kernel import ActivatedGroupedGemm, GroupedGemm
from .packed import PackedGroupedGemm
from .scaled import ScaledGroupedGemm

__all__ = [
    "ActivatedGroupedGemm",
    "GatheredActivatedGroupedGemm",
    "GatheredGradientGroupedGemm",
    "GatheredGroupedGemm",
    "GradientGroupedGemm",
    "GroupedGemm",
    "PackedGroupedGemm",
    "ScaledGroupedGemm",
]
