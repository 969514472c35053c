"""The grouped GEMMs of ``kernel`` and ``gradient`` that read rows of an operand by an index; see ``gather``."""

from cutlass import Int32, cute

from ...epilogue.vectors import EpilogueArgs
from .gradient import GradientGroupedGemm
from .kernel import ActivatedGroupedGemm, GroupedGemm


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


class GatheredActivatedGroupedGemm(ActivatedGroupedGemm):
    """One with an activation as a second output, on rows of ``a [S, K]``."""

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offs: cute.Tensor,
        h: cute.Tensor,
        y: cute.Tensor,
        bias: cute.Tensor | None,
        probs: cute.Tensor | None,
        index: cute.Tensor,
        clusters: Int32,
        stream,
    ):
        """Launch; arguments of ``ActivatedGroupedGemm`` and ``index``, int32 ``[T]``."""
        args = EpilogueArgs(bias, None, probs=probs)
        self.start(a, b, None, offs, h, args, clusters, stream, y, index=index)


class GatheredGradientGroupedGemm(GradientGroupedGemm):
    """One that goes back through the activation, on rows of ``a [S, N]``."""

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offs: cute.Tensor,
        dh: cute.Tensor,
        h: cute.Tensor,
        probs: cute.Tensor | None,
        sums: cute.Tensor | None,
        index: cute.Tensor,
        clusters: Int32,
        stream,
    ):
        """Launch; arguments of ``GradientGroupedGemm`` and ``index``, int32 ``[T]``."""
        extra = (h, probs, sums)
        self.start(a, b, None, offs, dh, EpilogueArgs(None, None), clusters, stream, extra=extra, index=index)
