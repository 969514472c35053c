"""Grouped GEMM with a dactivation epilogue."""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ...activation.activation_spec import ActivationSpec
from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.dactivation import COLUMNS, Preactivation, buffers_per_chunk, buffers_per_warp
from ...scheduler.halves import HalvesVarlenM, ragged_halves
from ..activation_call import DactivationKernelCall
from .kernel import Sm100GemmKernel
from .store import WARP_ROWS


class Sm100GemmDactivationKernel(DactivationKernelCall, Sm100GemmKernel):
    """``dh = dA(h) (a b)``; with ``probs`` also the sums of rows of ``(a b) A(h)`` per tile.

    ``result``: the activation ``probs A(h)`` is an output, too.
    """

    chunk = WARP_ROWS, COLUMNS

    def __init__(
        self,
        config: GemmConfig,
        element: type[cutlass.Numeric],
        out: str,
        activation: ActivationSpec,
        result: bool = False,
        gathered: str | None = None,
        tail: bool = True,
    ):
        self.gradient = activation
        self.parts = buffers_per_chunk(activation)
        self.result = result
        self.buffers = buffers_per_warp(activation, result)
        super().__init__(VARLEN_M, config, EpilogueSpec(out, tail=tail), element, gathered=gathered)
        self.side_by_side = activation.gated and not activation.interleaved
        self.policy = HalvesVarlenM(config.tile_m, config.tile_n, config.band, tail, self.side_by_side)

    def hidden(self, h: cute.Tensor, probs: Any, sums: Any) -> Preactivation:
        """Return the operands of the epilogue, before it has barriers."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        source = ragged_halves(h, self.side_by_side)
        h_map, coords = cpasync.make_tiled_tma_atom(load, source, self.warp_layout(), self.chunk)
        return Preactivation(h_map, coords, probs, sums)
