"""Producers of a kernel whose B is packed: eight warps decode it into the swizzled ring, one of them loads A by TMA.

Two warps per scheduler hide each other's instruction latencies.

Packed bytes and scales are loaded by ``cp.async`` to slots that every lane has for itself, ``SLOTS - 1`` k tiles ahead
of the one that is decoded, across the end of a tile. So no lane waits for another one, only for its own copies. Decoded
values are written where the MMA reads them, in the 128-byte swizzle.

These writes go through the generic proxy, and the MMA reads through the async proxy: each lane fences, then its warp
arrives at the barrier of the stage.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.vectors import EpilogueArgs
from ...scheduler import ceil_div
from ...scheduler.problem import Problem, Share
from ..copies import PIECE
from ..mma_sync.load import StageLayout
from ..mma_sync.packed import PackedKernelCall
from ..mma_sync.packed_decode import decode_piece
from ..mma_sync.packed_load import Matrices, PackedOperands, PackedTileStart, copy_matrices
from ..mma_sync.packed_tilings import WORD, PackedSpec, pieces
from ..ring import RingBarriers, advance
from .kernel import Sm90GemmKernel
from .load import TmaOperand, boxes

WARPGROUPS = 2
WARPS = 4 * WARPGROUPS
SLOTS = 4  # k tiles that a lane has in flight or decodes


class Front(NamedTuple):
    """State of the copies: a search, the index of the tile after the one being copied, and the rest of that one."""

    search: Any
    index: Int32
    spot: PackedTileStart
    left: Int32  # k tiles left, at least 1; negative past the last tile


def slot_bytes(packed: PackedSpec, config: GemmConfig) -> int:
    """Return the shared memory for the pieces of a k tile and the words beside them."""
    return pieces(packed, config) * (PIECE + packed.words * WORD)


class Sm90PackedGemmKernel(PackedKernelCall, Sm90GemmKernel):
    """A kernel of one packing of B, tiling, epilogue and element type of A.

    Attributes:
        packed: how B is packed.
        element, decoded, decoders, pieces_at, words_at: see ``mma_sync.packed``; a stage there is a slot here.
    """

    load_warpgroups = WARPGROUPS
    decoders = 32 * WARPS
    pieces_at = 0

    def __init__(self, config: GemmConfig, spec: EpilogueSpec, element: type[cutlass.Numeric], packed: PackedSpec):
        self.aside = SLOTS * slot_bytes(packed, config)
        super().__init__(VARLEN_M, config, spec, element)
        self.packed, self.element, self.by_lanes = packed, element, "b"
        self.decoded = StageLayout(not packed.over_rows, config.tile_n, 0)
        self.words_at = pieces(packed, config) * PIECE
        self.load_registers, self.consumer_registers = 64, 184  # of 64512 in all

    @property
    def arrivals(self) -> int:
        """Return the arrivals per stage, one of every warp."""
        return WARPS

    def begin(
        self, operands: PackedOperands, offs: cute.Tensor, out: cute.Tensor, args: EpilogueArgs, ctas: Int32, stream
    ):
        """Launch up to ``ctas`` CTAs."""
        a, b = operands
        groups, height, width = b.data.shape[0], b.data.shape[1], b.data.shape[2] * self.packed.per_byte
        modes, strides = (groups, width, height), (0, 1, 0)
        if self.packed.over_rows:
            modes, strides = (groups, height, width), (0, 0, 1)
        pointer = cute.recast_ptr(b.data.iterator, dtype=self.b_element)
        shape = cute.make_tensor(pointer, cute.make_layout(modes, stride=strides))
        self.start(a, shape, None, offs, out, args, ctas, stream, packed=b)

    def fill(self, source: Any, a: TmaOperand, b: TmaOperand, ring: RingBarriers, own: Any, share: Share):
        """Decode B, and load A."""
        decode_tiles(self, source, a, b, ring, own, share)


@cute.jit
def next_tile(gemm: cutlass.Constexpr, search: Any, index: Int32, problem: Problem, step: Int32) -> Front:
    """Return the state at the start of the copies of the tile ``index``."""
    search, tile = gemm.policy.find(search, index, problem)
    spot = PackedTileStart(tile.group, tile.n * gemm.config.tile_n, Int32(0))
    left = ceil_div(problem.depth, gemm.config.tile_k)
    if not tile.valid:
        spot, left = PackedTileStart(Int32(0), problem.columns, problem.depth), Int32(-1)
    return Front(search, index + step, spot, left)


@cute.jit
def copy_next(gemm: cutlass.Constexpr, b: Matrices, front: Front, slot: Int32, problem: Problem, step: Int32) -> Front:
    """Start a lane's copies of the next k tile to the slot at the address ``slot``; return the new state."""
    copy_matrices(gemm, b, front.spot, slot)
    cute.arch.cp_async_commit_group()
    spot, left = front.spot._replace(depth=front.spot.depth + gemm.config.tile_k), front.left - 1
    front = front._replace(spot=spot, left=left)
    if left == 0:
        front = next_tile(gemm, front.search, front.index, problem, step)
    return front


@cute.jit
def decode_tiles(
    gemm: cutlass.Constexpr,
    packed: Matrices,
    a: TmaOperand,
    b: TmaOperand,
    ring: RingBarriers,
    slots: Int32,
    share: Share,
):
    """Fill the ring with the k tiles of every tile of a share; the load warps call it.

    Args:
        gemm: the ``Sm90PackedGemmKernel``.
        packed: B in global memory.
        a, b: the operands; B has no tensor map.
        ring: its barriers.
        slots: address of the lanes' own shared memory.
        share: the CTA's share of the problem.
    """
    policy, config = gemm.policy, gemm.config
    problem, _, first, step = share
    thread, _, _ = cute.arch.thread_idx()
    leads = cute.arch.make_warp_uniform(thread // 32) % WARPS == 0
    into, b_bytes = b.buffers.iterator.toint(), config.tile_n * config.tile_k * 2
    size = slot_bytes(gemm.packed, config)
    stage, phase = Int32(0), Int32(0)
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    front = next_tile(gemm, policy.start(problem), first, problem, step)
    for number in cutlass.range_constexpr(SLOTS - 1):
        front = copy_next(gemm, packed, front, slots + number * size, problem, step)
    read, write = slots, slots + (SLOTS - 1) * size
    while tile.valid:
        part = cute.local_tile(policy.a(a.coords, tile), (config.tile_m, config.tile_k), (tile.m, None))
        to, parts = boxes(a, part, 0, 1)
        for k in cutlass.range(ceil_div(problem.depth, config.tile_k), unroll=1):
            front = copy_next(gemm, packed, front, write, problem, step)
            cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
            if leads:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, gemm.stage_bytes - b_bytes)
                cute.copy(a.map, parts[None, k], to[None, stage], tma_bar_ptr=ring.full + stage)
            cute.arch.cp_async_wait_group(SLOTS - 1)
            for turn in cutlass.range_constexpr(pieces(gemm.packed, config) // gemm.decoders):
                decode_piece(gemm, turn, read, into + stage * b_bytes)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(ring.full + stage)
            write = read
            read += size
            if read == slots + SLOTS * size:
                read = slots
            stage, phase = advance(stage, phase, gemm.stages)
        first += step
        search, tile = policy.find(search, first, problem)
    cute.arch.cp_async_wait_group(0)
