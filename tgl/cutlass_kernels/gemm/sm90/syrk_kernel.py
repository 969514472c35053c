"""Symmetric product of one operand with its transpose: only a triangle of the result is computed.

See ``scheduler.triangle`` for the tiles, and ``mirror`` for how they are stored.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from ...config import VARLEN_K, GemmConfig
from ...epilogue import EpilogueSpec
from ...scheduler.triangle import Triangle
from .kernel import Sm90GemmKernel
from .mirror import Terms, mirror_layout


class Sm90SyrkKernel(Sm90GemmKernel):
    """``out[g] = alpha x[g] x[g]^T + beta c[g]``, summed in float32 and rounded once; ``c`` is symmetric."""

    symmetric = True

    def __init__(self, config: GemmConfig, element: type[cutlass.Numeric], out: str):
        super().__init__(VARLEN_K, config, EpilogueSpec(out), element)
        self.policy = Triangle(*config.cluster_tile)

    @cute.jit
    def __call__(  # type: ignore[override]
        self,
        x: cute.Tensor,
        c: Any,
        out: cute.Tensor,
        alpha: Float32,
        beta: Float32,
        clusters: Int32,
        stream,
    ):
        """Launch. Tensors have the shapes of the op."""
        if cutlass.const_expr(c is not None):
            c = cute.make_tensor(c.iterator, cute.select(c.layout, [1, 2, 0]))
        self.start(x, x, None, None, out, Terms(alpha, beta, c), clusters, stream)

    def second_map(self, save: Any, second: None, target: cute.Tensor, out_smem: Any) -> tuple:
        """Return the tensor map that stores transposed chunks."""
        rows, columns = self.chunk
        return cpasync.make_tiled_tma_atom(
            save, target, mirror_layout(self, 4 * self.warpgroups * self.buffers), (columns, rows)
        )
