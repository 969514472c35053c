"""Entry points, on any architecture, of kernels with an activation as a second output or a dactivation epilogue."""

from typing import Any

import cutlass
from cutlass import Int32, cute

from ..epilogue.vectors import EpilogueArgs
from ..reduce.partial_sums import PartialSumsKernel


class ActivationKernelCall:
    """Mixin before a GEMM kernel: ``__call__`` of kernels whose epilogue has an activation as a second output."""

    start: Any

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offs: cute.Tensor,
        h: cute.Tensor | None,
        y: cute.Tensor,
        bias: cute.Tensor | None,
        probs: cute.Tensor | None,
        clusters: Int32,
        stream,
    ):
        """Launch. Tensors have the shapes of the op, without ``h`` where the epilogue does not keep it.

        ``clusters`` is how many clusters may run at once.
        """
        self.start(a, b, None, offs, h, EpilogueArgs(bias, None, probs=probs), clusters, stream, y)


class DactivationKernelCall:
    """Mixin before a GEMM kernel: ``__call__`` of kernels with a dactivation epilogue."""

    start: Any

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
        dprobs: cute.Tensor | None,
        act: cute.Tensor | None,
        clusters: Int32,
        stream,
    ):
        """Launch the GEMM, then the kernel that adds up its partial sums.

        Args:
            h, dh: ``[T, 2 I]`` or ``[T, I]``.
            probs: ``[T]`` or None.
            sums: buffer for partial sums, float32 ``[parts across I, T]``, None without ``probs``; a part has
                ``tilings.sum_columns`` columns.
            dprobs: float32 ``[T]``, None without ``probs``.
            act: ``[T, I]`` for the activation's result, None without.
        """
        self.start(a, b, None, offs, dh, EpilogueArgs(None, None), clusters, stream, act, extra=(h, probs, sums))
        if cutlass.const_expr(sums is not None):
            PartialSumsKernel()(sums, dprobs, stream)
