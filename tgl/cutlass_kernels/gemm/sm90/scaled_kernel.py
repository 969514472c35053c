"""The grouped GEMM of ``kernel`` on FP8 operands: the same warps and epilogue, another mainloop."""

import cutlass

from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...scheduler.scaled_operands import AnywhereVarlenK, ScaledVarlenK, ScaledVarlenM
from ..operand_formats import OperandFormat
from ..scaled_call import ScaledCall
from .kernel import Sm90GemmKernel


class Sm90ScaledGemmKernel(ScaledCall, Sm90GemmKernel):
    """A kernel on FP8 operands, both contiguous along the contraction, as FP8 wgmma requires."""

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
        self.kind, self.b_rows_first = kind, b_rows_first
        tiles = (*config.cluster_tile, config.band)
        if kind == VARLEN_M:
            self.policy = ScaledVarlenM(*tiles, spec.tail, form=form)
        else:
            policy = AnywhereVarlenK if form.anywhere else ScaledVarlenK
            self.policy = policy(*tiles, config.longest_first, form=form)
