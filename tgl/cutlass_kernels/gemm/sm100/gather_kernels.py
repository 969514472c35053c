"""GEMMs of ``kernel`` and ``dactivation_kernel`` that gather rows of an operand by an index; see ``gather_load``."""

from ..gather_call import GatheredActivatedCall, GatheredCall, GatheredGradientCall
from .dactivation_kernel import Sm100GemmDactivationKernel
from .kernel import Sm100GemmActivationKernel, Sm100GemmKernel


class Sm100GatherGemmKernel(GatheredCall, Sm100GemmKernel):
    """A kernel whose operand ``gathered`` is ``[S, ...]``; row t of the grouped order is its row ``index[t]``."""


class Sm100GatherGemmActivationKernel(GatheredActivatedCall, Sm100GemmActivationKernel):
    """A gathering kernel with an activation as a second output, on rows of ``a [S, K]``."""


class Sm100GatherGemmDactivationKernel(GatheredGradientCall, Sm100GemmDactivationKernel):
    """A gathering kernel with a dactivation epilogue, on rows of ``a [S, N]``."""
