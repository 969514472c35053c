"""The grouped GEMMs of ``kernel`` and ``gradient`` that read rows of an operand by an index; see ``load``."""

from ..gathered import GatheredActivatedCall, GatheredCall, GatheredGradientCall
from .gradient import GradientGroupedGemm
from .kernel import ActivatedGroupedGemm, GroupedGemm


class GatheredGroupedGemm(GatheredCall, GroupedGemm):
    """A kernel whose operand ``gathered`` is ``[S, ...]``; row t of the grouped order is its row ``index[t]``."""


class GatheredActivatedGroupedGemm(GatheredActivatedCall, ActivatedGroupedGemm):
    """One with an activation as a second output, on rows of ``a [S, K]``."""


class GatheredGradientGroupedGemm(GatheredGradientCall, GradientGroupedGemm):
    """One that goes back through the activation, on rows of ``a [S, N]``."""
