"""The grouped GEMM of ``kernel`` with an epilogue that goes back through the activation; see ``finish``."""

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from ...activation.activation_spec import ActivationSpec
from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.gradient import Hidden, buffers_per_chunk, buffers_per_warp
from ...epilogue.vectors import EpilogueArgs
from ...tiles.halves import HalvesVarlenM, ragged_halves
from .kernel import GroupedGemm


class GradientGroupedGemm(GroupedGemm):
    """``dh = dA(h) (a b)``, the sums of rows of ``(a b) A(h)`` per tile if there are ``probs``, and with ``result`` the
    activation's own ``probs A(h)``."""

    def __init__(
        self,
        config: GemmConfig,
        element: type[cutlass.Numeric],
        out: str,
        activation: ActivationSpec,
        result: bool = False,
        gathered: str | None = None,
    ):
        self.gradient = activation
        self.parts = buffers_per_chunk(activation)
        self.result = result
        self.buffers = buffers_per_warp(activation, result)
        super().__init__(VARLEN_M, config, EpilogueSpec(out, tail=True), element, gathered=gathered)
        tiles = (config.tile_m, config.tile_n * config.ctas, config.band)  # of a cluster
        self.side_by_side = activation.gated and not activation.interleaved
        self.policy = HalvesVarlenM(*tiles, True, self.side_by_side)

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
        act: cute.Tensor | None,
        clusters: Int32,
        stream,
    ):
        """Launch.

        Args:
            h, dh: ``[T, 2 I]`` or ``[T, I]``.
            probs: ``[T]`` or None.
            sums: float32 ``[tiles across I, T]``, None without ``probs``.
            act: ``[T, I]`` for the activation's result, None without.
        """
        self.start(a, b, None, offs, dh, EpilogueArgs(None, None), clusters, stream, act, extra=(h, probs, sums))

    def hidden(self, h: cute.Tensor, probs: Any, sums: Any, out_smem) -> Hidden:
        """The operands of the epilogue, before it has barriers."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        h_map, coords = cpasync.make_tiled_tma_atom(load, ragged_halves(h, self.side_by_side), out_smem, self.chunk)
        return Hidden(h_map, coords, probs, sums)
