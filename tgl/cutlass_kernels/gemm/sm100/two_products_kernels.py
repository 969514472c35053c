"""The grouped GEMM of ``kernel`` on two pairs of operands; see ``gemm.two_products_call``."""

from ..two_products_call import TwoProductsActivationCall, TwoProductsCall
from .kernel import Sm100GemmKernel


class Sm100TwoProductsGemmKernel(TwoProductsCall, Sm100GemmKernel):
    """A kernel that adds ``low x up`` to the product."""


class Sm100TwoProductsGemmActivationKernel(TwoProductsActivationCall, Sm100GemmKernel):
    """One whose sum goes through an activation, which is a second output."""
