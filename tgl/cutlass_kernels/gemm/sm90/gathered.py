"""The grouped GEMM of ``kernel`` that reads rows of an operand by an index; see ``gather``."""

from cutlass import Int32, cute

from ...epilogue.vectors import EpilogueArgs
from .kernel import GroupedGemm


class GatheredGroupedGemm(GroupedGemm):
    """A kernel whose operand ``gathered`` is ``[S, ...]``; row t of the grouped order is its row ``index[t]``."""

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offs: cute.Tensor,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        slots: cute.Tensor | None,
        index: cute.Tensor,
        clusters: Int32,
        stream,
    ):
        """Launch; arguments of ``GroupedGemm`` and ``index``, int32 ``[T]``."""
        self.start(a, b, None, offs, out, EpilogueArgs(bias, bias_scale), clusters, stream, slots=slots, index=index)
