"""The GEMMs of ``kernel`` and ``dactivation_kernel`` that read rows of an operand by an index; see ``gather_load``."""

from ..gather_call import GatheredActivatedCall, GatheredCall, GatheredGradientCall
from .dactivation_kernel import Sm100GemmDactivationKernel
from .kernel import Sm100GemmActivationKernel, Sm100GemmKernel


class Sm100GatherGemmKernel(GatheredCall, Sm100GemmKernel):
    """A kernel whose operand ``gathered`` is ``[S, ...]``; row t of the grouped order is its row ``index[t]``."""


class Sm100GatherGemmActivationKernel(GatheredActivatedCall, Sm100GemmActivationKernel):
    """One with an activation as a second output, on rows of ``a [S, K]``."""


class Sm100GatherGemmDactivationKernel(GatheredGradientCall, Sm100GemmDactivationKernel):
    """One that goes back through the activation, on rows of ``a [S, N]``."""
