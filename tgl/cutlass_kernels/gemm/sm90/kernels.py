"""The GEMM kernels of sm_90, by the names that ``archs.Arch.kernel`` asks for."""

from ..mma_sync.packed import PackedGroupedGemm
from .decode import DecodingGroupedGemm
from .few import FewActivatedGroupedGemm, FewGroupedGemm
from .gathered import GatheredActivatedGroupedGemm, GatheredGradientGroupedGemm, GatheredGroupedGemm
from .gradient import GradientGroupedGemm
from .kernel import ActivatedGroupedGemm, GroupedGemm
from .paired import PairedActivatedGroupedGemm, PairedGroupedGemm
from .scaled import ScaledGroupedGemm
from .swapped import SwappedGroupedGemm
from .symmetric import SymmetricGemm

__all__ = [
    "ActivatedGroupedGemm",
    "DecodingGroupedGemm",
    "FewActivatedGroupedGemm",
    "FewGroupedGemm",
    "GatheredActivatedGroupedGemm",
    "GatheredGradientGroupedGemm",
    "GatheredGroupedGemm",
    "GradientGroupedGemm",
    "GroupedGemm",
    "PackedGroupedGemm",
    "PairedActivatedGroupedGemm",
    "PairedGroupedGemm",
    "ScaledGroupedGemm",
    "SwappedGroupedGemm",
    "SymmetricGemm",
]
