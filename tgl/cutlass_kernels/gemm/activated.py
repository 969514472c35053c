"""How a kernel with an activation as a second output is called, on any architecture."""

from typing import Any

from cutlass import Int32, cute

from ..epilogue.vectors import EpilogueArgs


class Activated:
    """Goes before a ``GroupedGemm`` whose epilogue has an activation."""

    start: Any

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
        clusters: Int32,
        stream,
    ):
        """Launch. Tensors have the shapes of the op; ``clusters`` is how many clusters may run at once."""
        self.start(a, b, None, offs, h, EpilogueArgs(bias, None, probs=probs), clusters, stream, y)
