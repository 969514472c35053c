"""Grouped GEMMs of ``kernel`` and ``dactivation`` that gather rows of an operand by an index; see ``load``."""

from ..gather_call import GatheredActivatedCall, GatheredCall, GatheredGradientCall
from .dactivation import MmaSyncGemmDactivationKernel
from .kernel import MmaSyncGemmActivationKernel, MmaSyncGemmKernel


class MmaSyncGatherGemmKernel(GatheredCall, MmaSyncGemmKernel):
    """A kernel whose operand ``gathered`` is ``[S, ...]``; row t of the grouped order is its row ``index[t]``."""


class MmaSyncGatherGemmActivationKernel(GatheredActivatedCall, MmaSyncGemmActivationKernel):
    """A gathering kernel with an activation as a second output, on rows of ``a [S, K]``."""


class MmaSyncGatherGemmDactivationKernel(GatheredGradientCall, MmaSyncGemmDactivationKernel):
    """A gathering kernel with a dactivation epilogue, on rows of ``a [S, N]``."""
