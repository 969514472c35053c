"""The two GEMMs of a block of few rows, whose launches overlap: the next one begins while this one runs.

Reading weights is what takes time, so a launch should ask for its own while the one in front still waits for its last.
A CTA has all shared memory of its multiprocessor, for as much of B on the way as can be: eight stages of 16 KiB, 17 MB
of 132. CTAs of the next launch come where one of this has left or none has been, while others still work.
They wait for all of these, and these for none of them, nor has the next launch begun before all of these have: so the
one in front always ends. In half of the shared memory, where two CTAs stand beside each other, a block takes as long
or up to 10 % longer.

The rules of ``overlap`` hold, with one exception that the host has to allow, ``settled``. All that the second GEMM
reads but A was there before the launch in front of it began: that is the first GEMM, which has waited before it let
this one begin. So the load warp finds its first tile and asks for B without waiting. Whoever reads A or vectors, or
writes anything, waits first.

What keeps memory at work besides:

- Consumers give a stage back when its own MMAs have ended, not behind those of the next one, for which they wait.
- Values per row and column lie beside the barriers, where they take no stage.
- L2 is asked for weights ahead of the ring, see ``decode_load``.
- The next launch may begin when a CTA has asked for its last weights, and not earlier, see there.

Values per row are not copied in the order of rows: an epilogue finds them by ``source``.
"""

from typing import Any

from cutlass import Int32, cute

from ...epilogue.vectors import EpilogueArgs
from .kernel import Sm90GemmActivationKernel, Sm90GemmKernel


class Sm90DecodeGemmActivationKernel(Sm90GemmActivationKernel):
    """With an activation as a second output, on rows of ``a [S, K]`` that an index finds."""

    start: Any

    @cute.jit
    def __call__(
        self, a: cute.Tensor, b: cute.Tensor, places: tuple, outputs: tuple, vectors: Any, clusters: Int32, stream
    ):
        """Launch.

        Args:
            places: ends of groups, int32 ``[G]``, and the row of ``a`` of every row, int32 ``[T]``.
            outputs: h, or None where the epilogue does not keep it, and y.
            vectors: None; or bias, the values ``[n]`` among which every row has its probability, and which one it has,
                int32 ``[T]``, or Nones.
            clusters: how many may run at once.
        """
        (offs, index), (h, y) = places, outputs
        bias, probs, source = vectors if vectors is not None else (None, None, None)
        args = EpilogueArgs(bias, None, probs=probs, source=source)
        self.start(a, b, None, offs, h, args, clusters, stream, y, index=index)


class Sm90DecodeGemmKernel(Sm90GemmKernel):
    """On rows in order."""

    start: Any

    @cute.jit
    def __call__(
        self, a: cute.Tensor, b: cute.Tensor, groups: tuple, out: cute.Tensor, vectors: Any, clusters: Int32, stream
    ):
        """Launch.

        Args:
            groups: their ends, int32 ``[G]``, and 1 if all but ``a`` was there before the launch in front began, or 0.
            vectors: None; or bias, the values among which every row has its factor of the bias, and which one it has,
                or Nones.
            clusters: how many may run at once.
        """
        offs, settled = groups
        bias, scale, source = vectors if vectors is not None else (None, None, None)
        args = EpilogueArgs(bias, scale, source=source)
        self.start(a, b, None, offs, out, args, clusters, stream, settled=settled)
