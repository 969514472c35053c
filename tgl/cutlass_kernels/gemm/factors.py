"""Block scales on their way to the accumulators: a warp loads them into a ring of stages in shared memory.

A stage has a factor for each of a CTA's rows of A and for each of its columns of B; where B is a matrix of square
blocks, one for all columns, or one for each ``PIECE`` of them if a tile is wider than a block. Scales are float32 and
begin anywhere, so no tensor map reads them: the warp copies them by cp.async, four bytes per lane, and its copies
arrive at the barrier of the stage.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from ..config import VARLEN_K, VARLEN_M, GemmConfig
from ..scheduler import Tile, ceil_div
from ..scheduler.problem import Share
from .operand_formats import OperandFormat
from .ring import RingBarriers, advance

LANES = 32
PIECE = 64  # columns: tiles begin at multiples of it, and so do blocks


def factor_count(kind: str, config: GemmConfig, form: OperandFormat) -> int:
    """Return the factors of a stage: of its rows, then of its columns, which take 16 bytes if B has square blocks."""
    if not form.block:
        return 0
    return config.cta_m + (config.tile_n if kind == VARLEN_K else 4)


def column_factors(config: GemmConfig, form: OperandFormat) -> int:
    """Return the number of factors of a tile's columns if B is a matrix of square blocks."""
    return 1 if config.tile_n <= form.block else config.tile_n // PIECE


@cute.jit
def load_factors(gemm: cutlass.Constexpr, scales: Any, buffers: cute.Tensor, ring: RingBarriers, share: Share):
    """Load the factors of the tiles of a share; one warp calls it.

    Args:
        gemm: the GEMM kernel.
        scales: the scales of A and of B, in global memory.
        buffers: shared memory ``[factors, stages]``.
        ring: its barriers.
        share: the CTA's share of the problem.
    """
    problem, rank, first, step = share
    policy, config = gemm.policy, gemm.config
    a, b = scales
    along = 1 if cutlass.const_expr(policy.kind == VARLEN_M) else 0
    lane = cute.arch.lane_idx()
    stage, phase = Int32(0), Int32(0)
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    while tile.valid:
        rows, columns = _lines(gemm, a, b, tile, _corner(config, tile, rank), lane)
        for k in cutlass.range(ceil_div(policy.depth(tile, problem), config.tile_k), unroll=1):
            cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
            into = buffers[None, stage].iterator + lane
            for i in cutlass.range_constexpr(len(rows)):
                _copy(rows[i] + Int64(k) * a.stride[along], into + i * LANES)
            if cutlass.const_expr(policy.kind == VARLEN_K):
                for i in cutlass.range_constexpr(len(columns)):
                    _copy(columns[i] + Int64(k) * b.stride[0], into + config.cta_m + i * LANES)
            else:
                if lane < column_factors(config, gemm.form):
                    _copy(columns[0] + k, into + config.cta_m)
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + stage)
            stage, phase = advance(stage, phase, cute.size(buffers, mode=[1]))
        first += step
        search, tile = policy.find(search, first, problem)


def _corner(config: GemmConfig, tile: Tile, rank: Int32) -> tuple[Int32, Int32]:
    """Return row and column, in the group's matrix, of a CTA's part of a tile: pairs share rows, others columns."""
    if config.two_cta:
        return tile.m * config.tile_m + rank * config.cta_m, tile.n * config.tile_n
    return tile.m * config.tile_m, (tile.n * config.ctas + rank) * config.tile_n


def _lines(gemm, a: cute.Tensor, b: cute.Tensor, tile: Tile, corner: tuple, lane: Int32) -> tuple[list, list]:
    """Return a lane's first factors of rows and of columns.

    Outside the operands it is the nearest factor, which affects no output.
    """
    config, block = gemm.config, gemm.form.block
    row, column = corner
    rows = [row + i * LANES + lane for i in range(config.cta_m // LANES)]
    if gemm.policy.kind == VARLEN_M:
        inside = [_inside(tile.start + at, a, 0) for at in rows]
        at = _inside((column + lane * PIECE) // block, b, 1)
        matrix = Int64(tile.group) * b.stride[0] + Int64(at) * b.stride[1]
        return [a.iterator + Int64(at) * a.stride[0] for at in inside], [b.iterator + matrix]
    place = Int64(tile.start // block + tile.group)  # the group's first row of [Tp / 128, features]
    columns = [column + i * LANES + lane for i in range(config.tile_n // LANES)]
    a_line, b_line = a.iterator + place * a.stride[0], b.iterator + place * b.stride[0]
    return [a_line + _inside(at, a, 1) for at in rows], [b_line + _inside(at, b, 1) for at in columns]


def _inside(at: Int32, tensor: cute.Tensor, mode: int) -> Int32:
    return cutlass.min(at, Int32(tensor.shape[mode]) - 1)


def _copy(source: cute.Pointer, target: cute.Pointer):
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=Float32.width)
    one = cute.make_layout(1)
    cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(target, one))
