"""Grouped GEMM with swap AB for sm_90a, for packed experts and few rows per group.

Groups of a few rows fill a small part of the 64 rows of a wide MMA, but its 8 to 64 columns much better. So B is the
first operand, which MMAs read from registers: a lane decodes what it multiplies, and decoded values never go through
shared memory.

=====================  ==========================================================================
warps                  role
=====================  ==========================================================================
0 to 4 W - 1           W warpgroups of consumers, 2 or 3, see ``swap_ab_mma``: each a part of a tile's columns
4 W to 4 W + 3         load: the first warp codes and rows by TMA, each lane scales by ``cp.async``; for MXFP4 lanes
                       store up to 16 rows themselves, in another order, see ``swap_ab_rows``
=====================  ==========================================================================

Two CTAs share a multiprocessor. A stage has 64 or 128 bytes of codes per column, and their scales. Rows of one-byte
scales begin and end at any byte, so a lane copies the words that hold a row's scales of the stage.

The sums equal those of the other sm_90 kernels to the bit: the same steps of the contraction in the same order.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute, memory
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ...config import LINE, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.vectors import EpilogueArgs
from ...runtime.elements import TYPES
from ...scheduler import Tile, ceil_div
from ...scheduler.groups import clamp
from ...scheduler.problem import Problem, Share, VarlenM
from ..copies import WORD, copy_word
from ..mma_sync.packed import PackedKernelCall
from ..mma_sync.packed_load import Matrices, PackedOperands, scale_address
from ..mma_sync.packed_tilings import PackedSpec
from ..ring import RingBarriers, advance, allocate_ring, open_ring
from .load import TmaOperand, boxes
from .swap_ab_dequantize import STEP, has_powers
from .swap_ab_mma import Stages, SwapAbOutput, consume_tiles
from .swap_ab_rows import ATOM, PERMUTED_ROWS, STEPS, read_step, write_step
from .tilings import MMA_ROWS, SHARED, cut_of, scale_pitch, scale_words, swapped_stages

WARPGROUP = 128
ALIGNED = 1024
SWIZZLES = {64: warpgroup.SmemLayoutAtomKind.K_SW64, 128: warpgroup.SmemLayoutAtomKind.K_SW128}


class ScaleCopies(NamedTuple):
    """State of a lane's copies of the scales of a column."""

    source: Int64  # in global memory
    left: Int32  # bytes that remain from there on; negative for a column that does not exist


class Sm90SwapAbGemmKernel(PackedKernelCall):
    """A kernel of one packing, tiling, epilogue and type of output; A is bfloat16, B is packed along the contraction.

    Attributes:
        packed: how B is packed.
        blocks: blocks of 64 columns per warpgroup.
        width: bytes of codes per column in a stage.
        part: elements of a column that are decoded at a time.
        lines: lines per row of A in a stage.
        words, pitch: words of scales per column, and their pitch, see ``tilings``.
        permuted: whether lanes store A with the elements of each MMA in the order ``swap_ab_rows`` describes.
    """

    def __init__(self, config: GemmConfig, spec: EpilogueSpec, element: type[cutlass.Numeric], packed: PackedSpec):
        self.config, self.spec, self.element, self.packed = config, spec, element, packed
        self.out_element = TYPES[spec.out]
        self.policy: Any = VarlenM(config.tile_m, config.tile_n, config.band, spec.tail)
        groups, self.consumer_registers, self.width, self.part = cut_of(config, packed)
        self.load_registers = 40  # of 80 each, or of 64 if three warpgroups are consumers
        self.blocks, self.consumers = config.tile_n // (groups * MMA_ROWS), groups * WARPGROUP
        self.lines = config.tile_k // LINE
        self.words, self.pitch = scale_words(packed, config.tile_k), scale_pitch(packed, config.tile_k)
        self.stages = swapped_stages(config, packed)
        self.permuted = has_powers(packed) and config.tile_m <= PERMUTED_ROWS and config.tile_k == STEPS * STEP

    def begin(
        self, operands: PackedOperands, offs: cute.Tensor, out: cute.Tensor, args: EpilogueArgs, ctas: Int32, stream
    ):
        """Launch up to ``ctas`` CTAs."""
        a, b = operands
        columns, config = Int32(out.shape[1]), self.config
        tiles = ceil_div(columns, config.tile_n)
        problem = Problem(offs, Int32(a.shape[0]), Int32(a.shape[1]), columns, Int32(0), tiles)
        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            self.element,
            self.element,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (MMA_ROWS, config.tile_m),
            warpgroup.OperandSource.RMEM,
        )
        a_smem = hopper_helpers.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (MMA_ROWS, config.tile_m, LINE), self.element, self.lines * self.stages
        )
        atom = warpgroup.make_smem_layout_atom(SWIZZLES[self.width], Uint8)
        b_smem = cute.tile_to_shape(atom, (config.tile_n, self.width, self.stages), order=(0, 1, 2))
        load = cpasync.CopyBulkTensorTileG2SOp()
        codes = cute.make_tensor(b.data.iterator, cute.select(b.data.layout, [1, 2, 0]))
        a_map, a_coords = cpasync.make_tiled_tma_atom(load, a, a_smem, (config.tile_m, LINE))
        b_map, b_coords = cpasync.make_tiled_tma_atom(load, codes, b_smem, (config.tile_n, self.width))
        running = cutlass.max(cutlass.min(self.policy.tiles_at_most(problem), ctas), 1)
        self.kernel(
            tiled_mma, (a_map, a_coords, a_smem), (b_map, b_coords, b_smem), operands, out, args, problem
        ).launch(
            grid=(running, 1, 1),
            block=(self.consumers + WARPGROUP, 1, 1),
            min_blocks_per_mp=SHARED,
            preferred_smem_carveout=100,  # in %
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, tiled_mma: cute.TiledMma, a, b, operands: PackedOperands, out: cute.Tensor, args: EpilogueArgs, problem
    ):
        """Set up what the roles share, then branch into them."""
        a_map, a_coords, a_smem = a
        b_map, b_coords, b_smem = b
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        warp, load_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()), self.consumers // 32
        allocator = memory.SmemAllocator()
        ring = allocate_ring(allocator, self.stages)
        a_buffers = allocator.allocate_tensor(self.element, a_smem.outer, ALIGNED, swizzle=a_smem.inner)
        b_buffers = allocator.allocate_tensor(Uint8, b_smem.outer, ALIGNED, swizzle=b_smem.inner)
        count = max(self.stages * self.config.tile_n * self.pitch, 1)
        words = allocator.allocate_array(Int32, num_elems=count, byte_alignment=16).toint()
        if warp == load_warp:
            cpasync.prefetch_descriptor(a_map)
            cpasync.prefetch_descriptor(b_map)
            with cute.arch.elect_one():
                arrivals = 1 + WARPGROUP + (WARPGROUP // 32 if self.permuted else 0)
                open_ring(ring, self.stages, arrivals, self.consumers // 32)
        cute.arch.sync_threads()
        share = Share(problem, Int32(0), first, step)
        if warp >= load_warp:
            cute.arch.setmaxregister_decrease(self.load_registers)
            of_a, of_b = TmaOperand(a_map, a_coords, a_buffers), TmaOperand(b_map, b_coords, b_buffers)
            load_tiles(self, operands, of_a, of_b, words, ring, share)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            stages = Stages(a_buffers, b_buffers.iterator.toint(), words, ring)
            consume_tiles(self, tiled_mma, stages, operands.b, SwapAbOutput(out, args), share)


@cute.jit
def load_tiles(
    gemm: cutlass.Constexpr,
    operands: PackedOperands,
    a: TmaOperand,
    b: TmaOperand,
    words: Int32,
    ring: RingBarriers,
    share: Share,
):
    """Load the stages of every tile of a share; the load warps call it.

    Args:
        gemm: the ``Sm90SwapAbGemmKernel``.
        operands: both in global memory, for rows that lanes store and for scales.
        a, b: rows and codes, and their parts of the ring.
        words: address of the ring's scales.
        ring: its barriers.
        share: the CTA's share of the problem.
    """
    policy, config = gemm.policy, gemm.config
    problem, _, first, step = share
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % WARPGROUP
    leads = cute.arch.make_warp_uniform(lane // 32) == 0
    stage_bytes = (0 if gemm.permuted else gemm.lines * config.tile_m * LINE * 2) + config.tile_n * gemm.width
    stage, phase = Int32(0), Int32(0)
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    while tile.valid:
        rows = cute.local_tile(policy.a(a.coords, tile), (config.tile_m, LINE), (tile.m, None))
        codes = cute.local_tile(policy.matrix(b.coords, tile), (config.tile_n, gemm.width), (tile.n, None))
        a_to, a_from = boxes(a, rows, 0, 1)
        b_to, b_from = boxes(b, codes, 0, 1)
        scales = begin_scales(gemm, operands.b, tile, lane)
        for k in cutlass.range(ceil_div(problem.depth, config.tile_k), unroll=1):
            if cutlass.const_expr(gemm.permuted):
                words_of_a = read_step(gemm, operands.a, tile, lane, k, 0)
            cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
            if leads:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, stage_bytes)
                cute.copy(b.map, b_from[None, k], b_to[None, stage], tma_bar_ptr=ring.full + stage)
                for part in cutlass.range_constexpr(0 if gemm.permuted else gemm.lines):
                    to = a_to[None, gemm.lines * stage + part]
                    cute.copy(a.map, a_from[None, gemm.lines * k + part], to, tma_bar_ptr=ring.full + stage)
            scales = copy_scales(gemm, scales, words + stage * config.tile_n * (gemm.pitch * WORD), lane, k)
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + stage)
            if cutlass.const_expr(gemm.permuted):
                for turn in cutlass.range_constexpr(config.tile_m // ATOM):
                    if cutlass.const_expr(turn > 0):
                        words_of_a = read_step(gemm, operands.a, tile, lane, k, turn)
                    write_step(gemm, words_of_a, a.buffers.iterator.toint(), lane, stage, turn)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ring.full + stage)
            stage, phase = advance(stage, phase, gemm.stages)
        first += step
        search, tile = policy.find(search, first, problem)


@cute.jit
def begin_scales(gemm: cutlass.Constexpr, matrices: Matrices, tile: Tile, lane: Int32):
    """Return a lane's ``ScaleCopies`` for a tile, one per 128 columns; () where a group shares one scale."""
    scale, columns, packed = matrices.scale, matrices.data.shape[1], gemm.packed
    found: tuple = ()
    for turn in cutlass.range_constexpr(ceil_div(gemm.config.tile_n, WARPGROUP) if gemm.words else 0):
        column = tile.n * gemm.config.tile_n + turn * WARPGROUP + lane
        source = scale_address(packed, scale, tile.group, column, Int32(0))
        end = scale.iterator.toint() + Int64(scale.shape[0]) * scale.stride[0] * packed.scale_bytes
        left = Int32(cutlass.min(end - source, Int64(1 << 30)))
        if column >= columns:
            left = Int32(-(1 << 30))
        found = (*found, ScaleCopies(source, left))
    return found


@cute.jit
def copy_scales(gemm: cutlass.Constexpr, scales: Any, stage: Int32, lane: Int32, k: Int32):
    """Start a lane's copies of stage ``k``, whose words begin at the address ``stage``; return the new state."""
    found: tuple = ()
    for turn, (source, left) in enumerate(scales):
        column = turn * WARPGROUP + lane
        if column < gemm.config.tile_n:
            start = Int32(source) & WORD - 1
            if left >= gemm.words * WORD:
                for word in cutlass.range_constexpr(gemm.words):
                    copy_word(source - start + word * WORD, stage + (column * gemm.pitch + word) * WORD, Int32(WORD))
            else:
                for word in cutlass.range_constexpr(gemm.words):
                    count = clamp(left + start - word * WORD, Int32(0), Int32(WORD))
                    copy_word(source - start + word * WORD, stage + (column * gemm.pitch + word) * WORD, count)
        further = passed(gemm, k)
        found = (*found, ScaleCopies(source + further, left - further))
    return found


def passed(gemm: Any, k: Int32) -> Any:
    """Return the bytes of a column's scales by which the source advances after stage ``k``."""
    block, depth = gemm.packed.decoding.block, gemm.config.tile_k
    if depth >= block:
        return depth // block * gemm.packed.scale_bytes
    stages = block // depth  # that share a scale
    return ((k & stages - 1) == stages - 1).to(Int32) * gemm.packed.scale_bytes
