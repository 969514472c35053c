"""The grouped GEMM of ``kernel`` on FP8 operands: the same warps and epilogue, another mainloop."""

import cutlass
from cutlass import Int32, cute

from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.vectors import EpilogueArgs
from ...tiles.scaled_operands import ScaledVarlenK, ScaledVarlenM
from ..scaling import OperandFormat
from .kernel import GroupedGemm


def _exchanged(tensor: cute.Tensor, modes: list[int]) -> cute.Tensor:
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, modes))


class ScaledGroupedGemm(GroupedGemm):
    """A kernel on FP8 operands, both contiguous along the contraction: the MMA takes no others."""

    def __init__(
        self,
        kind: str,
        config: GemmConfig,
        spec: EpilogueSpec,
        a_element: type[cutlass.Numeric],
        b_element: type[cutlass.Numeric],
        form: OperandFormat,
        b_rows_first: bool,
    ):
        assert b_rows_first == (kind == VARLEN_M)
        super().__init__(kind, config, spec, a_element, b_element, form)
        self.kind = kind
        tiles = (config.tile_m, config.tile_n * config.ctas, config.band)  # of a cluster
        if kind == VARLEN_M:
            self.policy = ScaledVarlenM(*tiles, spec.tail, form=form)
        else:
            self.policy = ScaledVarlenK(*tiles, config.longest_first, form=form)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        offs: cute.Tensor,
        a_amax: cute.Tensor | None,
        b_amax: cute.Tensor | None,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        slots: cute.Tensor | None,
        clusters: Int32,
        stream,
    ):
        """Launch. Operands are components as ``group_quantize`` makes them."""
        a, b, scales, factors = self.operands(a, a_scale, b, b_scale)
        self.start(a, b, scales, offs, out, EpilogueArgs(bias, bias_scale, *factors), clusters, stream, slots=slots)

    def operands(self, a: cute.Tensor, a_scale: cute.Tensor, b: cute.Tensor, b_scale: cute.Tensor) -> tuple:
        """A, B, the scales of blocks of both or None, and factors of groups, as a policy and an epilogue take them."""
        if self.kind == VARLEN_M:
            b = _exchanged(b, [0, 2, 1])
        else:
            a, b = _exchanged(a, [1, 0]), _exchanged(b, [1, 0])
        return (a, b, (a_scale, b_scale), ()) if self.form.block else (a, b, None, (a_scale, b_scale))
