"""The grouped GEMM of ``kernel`` on quantised operands: the same warps, pipelines and epilogue."""

import cutlass
from cutlass import Int32, cute

from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.vectors import EpilogueArgs
from ...scheduler.problem import Problem
from ...scheduler.scaled_operands import AnywhereVarlenK, GatedScaledVarlenM, ScaledVarlenK, ScaledVarlenM
from ..operand_formats import OperandFormat
from ..scaled_call import ScaledCall
from .kernel import Sm100GemmKernel
from .quantize import QuantizedOutput, quantized_outputs


class Sm100ScaledGemmKernel(ScaledCall, Sm100GemmKernel):
    """A kernel on quantised operands; ``b_rows_first``: B is ``[G, N, K]`` instead of ``[G, K, N]`` (``varlen_m``)."""

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
        super().__init__(kind, config, spec, a_element, b_element, form)
        self.b_rows_first = b_rows_first
        tiles = (config.tile_m, config.tile_n, config.band)
        if kind == VARLEN_M:
            self.policy = ScaledVarlenM(*tiles, spec.tail, form=form)
        else:
            policy = AnywhereVarlenK if form.anywhere else ScaledVarlenK
            self.policy = policy(*tiles, config.longest_first, form=form)


class Sm100QuantizingGemmKernel(Sm100ScaledGemmKernel):
    """A kernel with a quantised activation as its output, an operand of the next GEMM; see ``quantize``."""

    def __init__(
        self,
        config: GemmConfig,
        spec: EpilogueSpec,
        a_element: type[cutlass.Numeric],
        b_element: type[cutlass.Numeric],
        codes: type[cutlass.Numeric],
        form: OperandFormat,
        b_rows_first: bool,
    ):
        super().__init__(VARLEN_M, config, spec, a_element, b_element, form, b_rows_first)
        assert spec.activation is not None
        self.codes = codes
        self.result_columns = config.tile_n // (2 if spec.activation.gated else 1)
        if spec.gated:
            tiles = (config.tile_m, config.tile_n, config.band)
            self.policy = GatedScaledVarlenM(*tiles, spec.tail, False, form=form)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        offs: cute.Tensor,
        h: cute.Tensor,
        bias: cute.Tensor | None,
        probs: cute.Tensor | None,
        data: cute.Tensor | None,
        scale: cute.Tensor | None,
        columnwise_data: cute.Tensor | None,
        columnwise_scale: cute.Tensor | None,
        clusters: Int32,
        stream,
    ):
        """Launch. Tensors are those of the op; both of a direction are None if it is not requested."""
        a, b, scales = self.operands(a, a_scale, b, b_scale)
        args = EpilogueArgs(bias, None, probs=probs)
        components = (data, scale, columnwise_data, columnwise_scale)
        self.start(a, b, scales, offs, h, args, clusters, stream, components)

    def second(self, components: tuple, store, problem: Problem) -> QuantizedOutput:
        """Return the components in memory."""
        return quantized_outputs(self, store, components, problem)
