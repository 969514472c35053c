"""The GEMM kernels of sm_100, by the names that ``archs.Arch.kernel`` asks for."""

from ..mma_sync.packed import PackedGroupedGemm
from .gathered import GatheredActivatedGroupedGemm, GatheredGradientGroupedGemm, GatheredGroupedGemm
from .gradient import GradientGroupedGemm
from .kernel import ActivatedGroupedGemm, GroupedGemm
from .paired import PairedActivatedGroupedGemm, PairedGroupedGemm
from .scaled import QuantizingGroupedGemm, ScaledGroupedGemm

__all__ = [
    "ActivatedGroupedGemm",
    "GatheredActivatedGroupedGemm",
    "GatheredGradientGroupedGemm",
    "GatheredGroupedGemm",
    "GradientGroupedGemm",
    "GroupedGemm",
    "PackedGroupedGemm",
    "PairedActivatedGroupedGemm",
    "PairedGroupedGemm",
    "QuantizingGroupedGemm",
    "ScaledGroupedGemm",
]
