"""Grouped GEMM of dense rows and packed matrices by mma.sync, for every architecture: B is decoded on its way.

Packed bytes and scales are loaded to shared memory by ``cp.async``. There each piece is decoded once, to the lines of
16-bit elements that ``ldmatrix`` reads in either direction, a k tile before they are multiplied. The rest is as in
``kernel``.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute, memory

from ...config import LINE, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.vectors import EpilogueArgs
from ...runtime.elements import TYPES
from ...scheduler import ceil_div
from ...scheduler.problem import Problem, Share, VarlenM
from ..copies import LANES_OF_LINE, PIECE
from .kernel import ALIGNED
from .load import StageLayout
from .mma import multiply_halves
from .packed_load import Matrices, PackedOperands
from .packed_mma import multiply_tiles
from .packed_tilings import WARPS, PackedSpec, decoded_bytes, pieces, stage_bytes
from .store import GlobalOutput, store_tile


class PackedKernelCall:
    """Mixin before a kernel whose B is packed."""

    begin: Any

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        scale: cute.Tensor,
        amax: cute.Tensor | None,
        offs: cute.Tensor,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        ctas: Int32,
        stream,
    ):
        """Launch. Tensors have the shapes of the op; data is bytes.

        Args:
            ctas: how many may run at once.
        """
        self.begin(PackedOperands(a, Matrices(b, scale, amax)), offs, out, EpilogueArgs(bias, bias_scale), ctas, stream)


class MmaSyncPackedGemmKernel(PackedKernelCall):
    """A kernel of one packing, tiling, epilogue and element type of A.

    Attributes:
        packed: how B is packed.
        decoded: layout of its decoded columns in a buffer.
        decoders: threads that copy and decode pieces; a thread's index among them is its number modulo this.
        pieces_at, words_at: where in a stage pieces of B, and the words beside them, begin.
        shared: how many CTAs share a multiprocessor.
        halves, gathered, line_step, mapped, multiply, pair, scales_at, store: see ``kernel.GroupedGemm``.
    """

    halves, gathered, scales_at, mapped = 1, None, 0, ""
    multiply = staticmethod(multiply_halves)
    store = staticmethod(store_tile)

    def __init__(
        self,
        config: GemmConfig,
        spec: EpilogueSpec,
        element: type[cutlass.Numeric],
        packed: PackedSpec,
        shared: int = 1,
    ):
        self.config, self.spec, self.element, self.packed, self.shared = config, spec, element, packed, shared
        self.out_element, self.pair = TYPES[spec.out], element
        self.warps = WARPS[config.tile_m, config.tile_n]
        self.threads = self.decoders = 32 * self.warps[0] * self.warps[1]
        self.line_step = self.threads // LANES_OF_LINE
        self.warp_tile = config.tile_m // self.warps[0], config.tile_n // self.warps[1]
        self.decoded = StageLayout(not packed.over_rows, config.tile_n, 0)
        self.stage_bytes, self.decoded_bytes = stage_bytes(packed, config), decoded_bytes(config)
        self.pieces_at = config.tile_m * LINE * 2
        self.words_at = self.pieces_at + pieces(packed, config) * PIECE
        self.policy: Any = VarlenM(config.tile_m, config.tile_n, config.band, spec.tail)

    def begin(
        self, operands: PackedOperands, offs: cute.Tensor, out: cute.Tensor, args: EpilogueArgs, ctas: Int32, stream
    ):
        """Launch as many CTAs as there are tiles for, up to ``ctas``."""
        a, columns = operands.a, Int32(out.shape[1])
        tiles = ceil_div(columns, self.config.tile_n)
        problem = Problem(offs, Int32(a.shape[0]), Int32(a.shape[1]), columns, Int32(0), tiles)
        running = cutlass.max(cutlass.min(self.policy.tiles_at_most(problem), ctas), 1)
        self.kernel(operands, GlobalOutput(out), args, problem).launch(
            grid=(running, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=self.shared,
            preferred_smem_carveout=100,  # in %
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands: PackedOperands, output: GlobalOutput, args: EpilogueArgs, problem: Problem):
        """Set up shared memory, then work on tiles."""
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        size = self.config.stages * self.stage_bytes + 2 * self.decoded_bytes
        ring = memory.SmemAllocator().allocate_array(Int64, num_elems=size // 8, byte_alignment=ALIGNED)
        multiply_tiles(self, operands, ring.toint(), output, args, Share(problem, Int32(0), first, step))
