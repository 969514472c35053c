"""GEMMs of ``kernel`` and ``dactivation_kernel`` that gather rows of an operand by an index; see ``gather_load``."""

from ..gather_call import GatheredActivatedCall, GatheredCall, GatheredGradientCall
from .dactivation_kernel import Sm90GemmDactivationKernel
from .kernel import Sm90GemmActivationKernel, Sm90GemmKernel


class Sm90GatherGemmKernel(GatheredCall, Sm90GemmKernel):
    """A kernel whose operand ``gathered`` is ``[S, ...]``; row t of the grouped order is its row ``index[t]``."""


class Sm90GatherGemmActivationKernel(GatheredActivatedCall, Sm90GemmActivationKernel):
    """A gathering kernel with an activation as a second output, on rows of ``a [S, K]``."""


class Sm90GatherGemmDactivationKernel(GatheredGradientCall, Sm90GemmDactivationKernel):
    """A gathering kernel with a dactivation epilogue, on rows of ``a [S, N]``."""
