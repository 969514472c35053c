"""Entry point, on any architecture, of kernels on quantised operands."""

from typing import Any

import cutlass
from cutlass import Int32, cute

from ..config import VARLEN_M
from ..epilogue import EpilogueSpec
from ..epilogue.vectors import EpilogueArgs
from .operand_formats import OperandFormat


def _exchanged(tensor: cute.Tensor, modes: list[int]) -> cute.Tensor:
    """Return a tensor with its dimensions in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, modes))


def _elements(tensor: cute.Tensor, element: type[cutlass.Numeric]) -> cute.Tensor:
    """Return the same memory as elements of another type."""
    return tensor if tensor.element_type is element else cute.recast_tensor(tensor, element)


class ScaledCall:
    """Mixin before a GEMM kernel whose operands are quantised.

    Attributes:
        kind, spec, form, a_element, b_element: as in the GEMM kernel.
        b_rows_first: whether B is ``[G, N, K]`` instead of ``[G, K, N]`` where groups are rows.
        start: method of the GEMM kernel that launches.
    """

    kind: str
    spec: EpilogueSpec
    form: OperandFormat
    a_element: type[cutlass.Numeric]
    b_element: type[cutlass.Numeric]
    b_rows_first: bool
    start: Any

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
        """Return A, B and the block scales of both, None without, as a problem kind takes them."""
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
