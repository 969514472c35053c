"""Grouped GEMM by MMAs of warps, for sm_80 and later: persistent, accumulators in registers.

All warps do all there is to do. They copy both operands of a k tile to shared memory by ``cp.async``, each a part of
it, some k tiles before they multiply it; every warp multiplies its part of the tile by ``ldmatrix`` and ``mma.sync``,
finishes it and stores it. They meet once per k tile. Nothing depends on the architecture but the tiling, which is
chosen for its shared memory.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute, memory

from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.vectors import EpilogueArgs
from ...tiles.policy import Problem, VarlenK, VarlenM
from ..copies import LANES_OF_LINE
from ..gathered import Gathered, GatheredCall, check
from .load import Operands
from .mma import multiply_tiles
from .tilings import WARPS, gathering_reason, stage_bytes

ALIGNED = 1024


class GroupedGemm:
    """A kernel of one kind, tiling, epilogue and element type; layouts come with the tensors it is compiled on.

    Attributes:
        gathered: the operand whose rows are found by an index, ``"a"`` or ``"b"``, or None.
        line_step: how many lines of 128 bytes all threads copy at a time.
    """

    def __init__(
        self,
        kind: str,
        config: GemmConfig,
        spec: EpilogueSpec,
        element: type[cutlass.Numeric],
        gathered: str | None = None,
    ):
        check(kind, gathered, gathering_reason(config))
        self.config, self.spec, self.element, self.gathered = config, spec, element, gathered
        self.warps = WARPS[config.tile_m, config.tile_n]
        self.threads = 32 * self.warps[0] * self.warps[1]
        self.line_step = self.threads // LANES_OF_LINE
        self.warp_tile = config.tile_m // self.warps[0], config.tile_n // self.warps[1]
        self.stage_bytes = stage_bytes(config)
        tiles = config.tile_m, config.tile_n, config.band
        self.policy: Any = VarlenM(*tiles, spec.tail) if kind == VARLEN_M else VarlenK(*tiles, config.longest_first)

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
        clusters: Int32,
        stream,
    ):
        """Launch. Tensors have the shapes of the op.

        Args:
            slots: group g has the matrix ``slots[g]`` of B (``varlen_m``) or of the output (``varlen_k``); None: g.
            clusters: how many CTAs may run at once.
        """
        self.start(a, b, None, offs, out, EpilogueArgs(bias, bias_scale), clusters, stream, slots=slots)

    @cute.jit
    def start(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        scales: None,
        offs: cute.Tensor,
        out: cute.Tensor,
        args: EpilogueArgs,
        clusters: Int32,
        stream,
        slots: cute.Tensor | None = None,
        index: cute.Tensor | None = None,
    ):
        """Launch.

        Args:
            scales: those of blocks of A and B, which operands of 16 bits have not.
            index: which rows of what is ``gathered``; None if nothing is.
        """
        problem = self.policy.problem(a, b, offs, out, slots)
        source: Any = None
        if cutlass.const_expr(self.gathered is not None):
            source = Gathered(a if cutlass.const_expr(self.gathered == "a") else b, index)
            problem = problem._replace(rows=Int32(source.index.shape[0]))
        a, b, out = self.policy.plain(a, b, out)
        running = cutlass.max(cutlass.min(self.policy.tiles_at_most(problem), clusters), 1)
        self.kernel(a, b, source, out, args, problem).launch(
            grid=(running, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        source: Gathered | None,
        out: cute.Tensor,
        args: EpilogueArgs,
        problem: Problem,
    ):
        """Set up shared memory, then work on tiles."""
        config = self.config
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = memory.SmemAllocator()
        problem = self.policy.arrange(problem, allocator, warp, self.threads // 32, first, step)
        ring = allocator.allocate_array(Int64, num_elems=config.stages * self.stage_bytes // 8, byte_alignment=ALIGNED)
        found: Any = None
        if cutlass.const_expr(source is not None):
            lines = config.tile_m if self.policy.kind == VARLEN_M else config.tile_k
            found = cute.make_rmem_tensor(lines // self.line_step, Int32)
        multiply_tiles(self, Operands(a, b, source, found), ring.toint(), out, args, problem, first, step)


class GatheredGroupedGemm(GatheredCall, GroupedGemm):
    """A kernel whose operand ``gathered`` is ``[S, ...]``; row t of the grouped order is its row ``index[t]``."""
