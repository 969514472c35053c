"""The grouped GEMM of ``kernel`` on two pairs of operands; see ``gemm.paired``."""

from ..paired import PairedCall
from .kernel import GroupedGemm


class PairedGroupedGemm(PairedCall, GroupedGemm):
    """A kernel that adds ``low x up`` to the product."""
