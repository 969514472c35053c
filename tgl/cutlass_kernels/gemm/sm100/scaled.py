"""The grouped GEMM of ``kernel`` on quantised operands: the same warps, pipelines and epilogue."""

import cutlass
from cutlass import Int32, cute

from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.vectors import EpilogueArgs
from ...tiles.policy import Problem
from ...tiles.scaled_operands import GatedScaledVarlenM, ScaledVarlenK, ScaledVarlenM
from ..scaling import OperandFormat
from .kernel import GroupedGemm
from .quantize import Quantized, quantized_outputs


def _elements(tensor: cute.Tensor, element: type[cutlass.Numeric]) -> cute.Tensor:
    """The same memory as elements of another type."""
    return tensor if tensor.element_type is element else cute.recast_tensor(tensor, element)


def _exchanged(tensor: cute.Tensor, modes: list[int]) -> cute.Tensor:
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, modes))


class ScaledGroupedGemm(GroupedGemm):
    """A kernel on quantised operands; ``b_rows_first`` tells B ``[G, N, K]`` from ``[G, K, N]`` (``varlen_m``)."""

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
        """Launch. Operands are components as ``group_quantize`` makes them, block scales in the blocked layout."""
        a, b, scales = self.operands(a, a_scale, b, b_scale)
        factors: tuple = (None, None)
        if cutlass.const_expr(self.spec.alpha is not None):
            factors = (a_amax, b_amax) if cutlass.const_expr(self.form.vector) else (a_scale, b_scale)
        self.start(a, b, scales, offs, out, EpilogueArgs(bias, bias_scale, *factors), clusters, stream, slots=slots)

    def operands(self, a: cute.Tensor, a_scale: cute.Tensor, b: cute.Tensor, b_scale: cute.Tensor) -> tuple:
        """A, B and both operands' scales of blocks, None without, as a policy takes them."""
        a, b = _elements(a, self.a_element), _elements(b, self.b_element)
        if self.kind == VARLEN_M and self.b_rows_first:
            b = _exchanged(b, [0, 2, 1])
        if self.kind != VARLEN_M and self.form.placed:
            a, b = _exchanged(a, [1, 0]), _exchanged(b, [1, 0])
        if self.form.block:
            return a, b, (a_scale, b_scale)
        if not self.form.vector:
            return a, b, None
        scale = getattr(cutlass, self.form.scale)
        return a, b, (_elements(a_scale, scale), _elements(b_scale, scale))


class QuantizingGroupedGemm(ScaledGroupedGemm):
    """A kernel with an activation that leaves quantised, as operand of the next GEMM; see ``quantize``."""

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
        """Launch. Tensors are those of the op; both of a direction are None if it is not wanted."""
        a, b, scales = self.operands(a, a_scale, b, b_scale)
        args = EpilogueArgs(bias, None, probs=probs)
        components = (data, scale, columnwise_data, columnwise_scale)
        self.start(a, b, scales, offs, h, args, clusters, stream, components)

    def second(self, components: tuple, store, problem: Problem) -> Quantized:
        """The components in memory."""
        return quantized_outputs(self, store, components, problem)
