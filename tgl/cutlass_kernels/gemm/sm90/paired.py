"""The grouped GEMM of ``kernel`` on two pairs of operands; see ``gemm.paired``."""

from ..paired import PairedActivatedCall, PairedCall
from .kernel import GroupedGemm


class PairedGroupedGemm(PairedCall, GroupedGemm):
    """A kernel that adds ``low x up`` to the product."""


class PairedActivatedGroupedGemm(PairedActivatedCall, GroupedGemm):
    """One whose sum goes through an activation, which is a second output."""
