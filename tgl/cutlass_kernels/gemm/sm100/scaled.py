"""The grouped GEMM of ``kernel`` with scales along the contraction: the same warps, pipelines and epilogue."""

import cutlass
from cutlass import Int32, cute

from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.vectors import EpilogueArgs
from ...varlen.scaled import ScaledVarlenK, ScaledVarlenM
from ..scaling import BlockScaling
from .kernel import GroupedGemm


def _elements(tensor: cute.Tensor, element: type[cutlass.Numeric]) -> cute.Tensor:
    """The same memory as elements of another type."""
    return tensor if tensor.element_type is element else cute.recast_tensor(tensor, element)


class ScaledGroupedGemm(GroupedGemm):
    """A kernel on block-scaled operands."""

    def __init__(
        self,
        kind: str,
        config: GemmConfig,
        spec: EpilogueSpec,
        a_element: type[cutlass.Numeric],
        b_element: type[cutlass.Numeric],
        scaling: BlockScaling,
        b_rows_first: bool,
    ):
        super().__init__(kind, config, spec, a_element, b_element, scaling)
        self.b_rows_first = b_rows_first
        tiles = (config.tile_m, config.tile_n, config.band)
        if kind == VARLEN_M:
            self.policy = ScaledVarlenM(*tiles, spec.tail, scaling=scaling)
        else:
            self.policy = ScaledVarlenK(*tiles, scaling=scaling)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        offs: cute.Tensor,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        clusters: Int32,
        stream,
    ):
        """Launch. Tensors are components as ``group_quantize`` makes them, scales blocked."""
        scale = getattr(cutlass, self.scaling.scale)
        a, b = _elements(a, self.a_element), _elements(b, self.b_element)
        if cutlass.const_expr(self.b_rows_first):
            b = cute.make_tensor(b.iterator, cute.select(b.layout, [0, 2, 1]))
        scales = (_elements(a_scale, scale), _elements(b_scale, scale))
        self.start(a, b, scales, offs, out, EpilogueArgs(bias, bias_scale), clusters, stream)
