"""The two GEMMs of a decode block (small M), whose launches overlap: the next one begins while this one runs.

The time goes into reading weights, so a launch should issue its loads while the launch before it still waits for its
last ones. A CTA has all shared memory of its multiprocessor, to keep as much of B in flight as possible: eight stages
of 16 KiB, 17 MB on 132 multiprocessors. CTAs of the next launch start on multiprocessors that have no CTA of this one,
or no longer have one, while others still work. They wait for all CTAs of this launch, never the reverse, and the next
launch does not begin before all CTAs of this one have begun, so this one always ends. With half of the shared memory,
where two CTAs run side by side, a block takes as long or up to 10 % longer.

The rules of ``overlap`` hold, with one exception that the host has to allow, ``settled``. Everything that the second
GEMM reads except A was ready before the launch before it began: that is the first GEMM, which has waited before it let
this one begin. So the load warp finds its first tile and loads B without waiting. Every access to A or to vectors, and
every write, waits first.

What else keeps memory busy:

- Consumers release a stage when its own MMAs have ended, instead of after those of the next one, which they wait for.
- Values per row and column are beside the barriers, where they take no stage.
- Weights are prefetched to L2 ahead of the ring, see ``decode_load``.
- The next launch may begin when a CTA has issued the loads of its last weights, and not earlier, see there.

Values per row are not copied into row order: an epilogue finds them by ``source``.
"""

from typing import Any

from cutlass import Int32, cute

from ...epilogue.vectors import EpilogueArgs
from .kernel import Sm90GemmActivationKernel, Sm90GemmKernel


class Sm90DecodeGemmActivationKernel(Sm90GemmActivationKernel):
    """The first GEMM, with an activation as a second output, on gathered rows of ``a [S, K]``."""

    start: Any

    @cute.jit
    def __call__(
        self, a: cute.Tensor, b: cute.Tensor, places: tuple, outputs: tuple, vectors: Any, clusters: Int32, stream
    ):
        """Launch.

        Args:
            places: group ends, int32 ``[G]``, and the row of ``a`` of every row, int32 ``[T]``.
            outputs: h, or None where the epilogue does not keep it, and y.
            vectors: None; or bias, probabilities ``[n]``, and the index of each row's probability among them, int32
                ``[T]``, or Nones.
            clusters: how many may run at once.
        """
        (offs, index), (h, y) = places, outputs
        bias, probs, source = vectors if vectors is not None else (None, None, None)
        args = EpilogueArgs(bias, None, probs=probs, source=source)
        self.start(a, b, None, offs, h, args, clusters, stream, y, index=index)


class Sm90DecodeGemmKernel(Sm90GemmKernel):
    """The second GEMM, whose rows are not gathered."""

    start: Any

    @cute.jit
    def __call__(
        self, a: cute.Tensor, b: cute.Tensor, groups: tuple, out: cute.Tensor, vectors: Any, clusters: Int32, stream
    ):
        """Launch.

        Args:
            groups: group ends, int32 ``[G]``, and 1 if everything except ``a`` was ready before the launch before this
                one began, or 0.
            vectors: None; or bias, factors of the bias, and the index of each row's factor among them, or Nones.
            clusters: how many may run at once.
        """
        offs, settled = groups
        bias, scale, source = vectors if vectors is not None else (None, None, None)
        args = EpilogueArgs(bias, scale, source=source)
        self.start(a, b, None, offs, out, args, clusters, stream, settled=settled)
