"""The GEMM kernels of warps, by the names that ``archs.Arch.kernel`` asks for."""

from .kernel import GatheredGroupedGemm, GroupedGemm

__all__ = ["GatheredGroupedGemm", "GroupedGemm"]
