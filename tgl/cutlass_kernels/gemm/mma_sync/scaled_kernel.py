"""The grouped GEMM of ``kernel`` on quantised operands: the same warps, mainloop and epilogue, other MMAs."""

from typing import Any

import cutlass

from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...scheduler.scaled_operands import AnywhereVarlenK, ScaledVarlenK, ScaledVarlenM
from ..operand_formats import OperandFormat
from ..scaled_call import ScaledCall
from .kernel import MmaSyncGemmKernel
from .narrow import multiply_by_one, multiply_fp8, multiply_scaled
from .tilings import stage_bytes


class MmaSyncScaledGemmKernel(ScaledCall, MmaSyncGemmKernel):
    """A kernel on quantised operands; ``b_rows_first``: B is ``[G, N, K]`` instead of ``[G, K, N]`` (``varlen_m``).

    Block-scaled MMAs take the scales, or get scales of one; other MMAs take FP8 alone, contiguous along the
    contraction.
    """

    form: OperandFormat
    multiply: Any

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
        super().__init__(kind, config, spec, a_element)
        self.a_element, self.b_element, self.form, self.b_rows_first = a_element, b_element, form, b_rows_first
        self.stage_bytes, self.promotes = stage_bytes(config, kind, form), not form.vector
        unscaled = multiply_by_one if config.unit_scales else multiply_fp8
        self.multiply = multiply_scaled if form.vector else unscaled
        lines = stage_bytes(config)
        self.factors_at, self.scales_at = (lines if form.block else 0), (lines if form.vector else 0)
        tiles = (config.tile_m, config.tile_n, config.band)
        if kind == VARLEN_M:
            self.policy = ScaledVarlenM(*tiles, spec.tail, form=form)
        else:
            policy = AnywhereVarlenK if form.anywhere else ScaledVarlenK
            self.policy = policy(*tiles, config.longest_first, form=form)
