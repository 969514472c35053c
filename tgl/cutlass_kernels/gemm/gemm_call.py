"""Entry point, on any architecture, of GEMM kernels without further operands."""

from typing import Any

from cutlass import Int32, cute

from ..epilogue.vectors import EpilogueArgs


class GemmKernelCall:
    """Base of a GEMM kernel: ``__call__``, which its ``start`` serves."""

    start: Any

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
        begin: cute.Tensor | None,
        clusters: Int32,
        stream,
    ):
        """Launch. Tensors have the shapes of the op.

        Args:
            slots: group g has the matrix ``slots[g]`` of B (``varlen_m``) or of the output (``varlen_k``); None: g.
            begin: int32 ``[1]``, the row offset of the first group (``varlen_m``); None: row 0.
            clusters: how many clusters, or CTAs of a kernel without clusters, may run at once.
        """
        args = EpilogueArgs(bias, bias_scale)
        self.start(a, b, None, offs, out, args, clusters, stream, slots=slots, begin=begin)
