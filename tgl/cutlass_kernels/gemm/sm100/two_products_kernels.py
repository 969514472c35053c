"""The grouped GEMM of ``kernel`` with two pairs of operands; see ``gemm.two_products_call``."""

from ..two_products_call import TwoProductsActivationCall, TwoProductsCall
from .kernel import Sm100GemmKernel


class Sm100TwoProductsGemmKernel(TwoProductsCall, Sm100GemmKernel):
    """A kernel that adds ``low x up`` to the product."""


class Sm100TwoProductsGemmActivationKernel(TwoProductsActivationCall, Sm100GemmKernel):
    """A kernel that adds ``low x up`` to the product, with an activation as a second output."""
