"""The grouped GEMM of ``kernel`` with two pairs of operands; see ``gemm.two_products_call``."""

from ..two_products_call import TwoProductsActivationCall, TwoProductsCall
from .kernel import Sm90GemmKernel


class Sm90TwoProductsGemmKernel(TwoProductsCall, Sm90GemmKernel):
    """A kernel that adds ``low x up`` to the product."""


class Sm90TwoProductsGemmActivationKernel(TwoProductsActivationCall, Sm90GemmKernel):
    """A kernel that adds ``low x up`` to the product, with an activation as a second output."""
