"""Producers of a kernel that gathers rows of one operand: TMA copies of four rows each.

The load warp loads the tiles of the other operand, and two more copy half of the gathered operand's lines each. More
warps would leave those of the epilogue fewer than 255 registers. A line is one span of the swizzle, and a stage is
lines in one or more columns:

=============  ============================  =================  =============================================
kind           a line is                     lines of a column  columns of a stage
=============  ============================  =================  =============================================
``varlen_m``   a k tile of a row of A        the CTA's rows     1
``varlen_k``   up to 64 elements of a token  ``tile_k``         one per 64 of the CTA's rows or columns of the
                                                                output's tile
=============  ============================  =================  =============================================

TMA fills lines of rows that the operand does not have with zeros, as well as bytes past the end of a row, and counts
them among the bytes of the stage: -1 stands for every row to be left out. Both CTAs of a pair gather their own half of
the operand, and all copies count on the even CTA's barrier, as TMA loads of whole tiles do.
"""

from typing import Any

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from ...config import VARLEN_K, VARLEN_M
from ...scheduler import ceil_div
from ...scheduler.problem import Share
from ..gather_call import Gathered, find_rows, read_index

WARPS = 2
LANES = 32
ROWS = 4  # of a copy


def extent(gemm: Any) -> int:
    """Return how many rows or columns of the output one CTA gathers the operand for."""
    of_operand = {"a": gemm.config.cta_m, "b": gemm.config.tile_n // gemm.config.ctas}
    return of_operand[gemm.gathered]


def gather_map(gemm: Any, source: Gathered, smem: cute.ComposedLayout) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Return ``(map, coordinate tensor of the map)`` of the gathered operand.

    Args:
        gemm: the GEMM kernel.
        source: what is gathered.
        smem: layout of its stages.
    """
    columns, width = source.values.shape[1], line_width(gemm)
    # A tensor map has no dimension of 0. For an operand without rows it has one, which is never loaded.
    shape = cutlass.max(source.values.shape[0], 1), columns
    values = cute.make_tensor(source.values.iterator, cute.make_layout(shape, stride=source.values.stride))
    box = cute.make_composed_layout(smem.inner, 0, cute.make_layout((ROWS, width), stride=(width, 1)))
    rows = cute.make_tensor(source.index.iterator, cute.make_layout(shape, stride=(1, 0)))
    load = cpasync.CopyBulkTensor2DGather4G2SOp(gemm.cta_group)
    return cpasync.make_tiled_tma_atom(load, values, box, (ROWS, width), gmem_coord_tensor=rows)


def line_width(gemm: Any) -> int:
    """Return the elements of a swizzle span: 128 bytes, as many as ``tile_k``, or fewer if the CTA has no more."""
    return min(gemm.config.tile_k, extent(gemm))


def gathered_bytes(gemm: Any) -> int:
    """Return the bytes of the gathered operand in a stage, of both CTAs of a pair."""
    return extent(gemm) * gemm.config.tile_k * gemm.a_element.width // 8 * gemm.config.ctas


@cute.jit
def gather_tiles(
    gemm: cutlass.Constexpr,
    source: Gathered,
    operand,
    loads: pipeline.PipelineTmaUmma,
    warp: Int32,
    share: Share,
):
    """Load the operand's part of the share's tiles; each of ``WARPS`` warps calls it.

    Args:
        gemm: the GEMM kernel.
        source: the gathered operand and its index.
        operand: (map, coordinate tensor of the map, buffers ``[..., stages]``).
        loads: pipeline to the MMA warp.
        warp: index of this warp among them.
        share: the CTA's share of the problem.
    """
    problem, rank, first, step = share
    policy, config = gemm.policy, gemm.config
    part = extent(gemm)
    lines = (config.tile_k if cutlass.const_expr(policy.kind == VARLEN_K) else part) // WARPS  # of a column and warp
    expected = Int32(gathered_bytes(gemm) // WARPS)
    found, named = (cute.make_rmem_tensor(lines // LANES, Int32) for _ in range(2))  # of every 32nd line
    rows = cute.make_rmem_tensor(lines, Int32)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, gemm.stages)
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    while tile.valid:
        line, end = tile.start + warp * lines + cute.arch.lane_idx(), tile.start + tile.length
        along = ({"a": tile.m, "b": tile.n}[gemm.gathered] * config.ctas + rank) * part
        column = Int32(0)
        if cutlass.const_expr(policy.kind == VARLEN_M):
            line += along
        else:
            column = along
        read_index(source, line, LANES, found)
        if cutlass.const_expr(policy.kind == VARLEN_M):
            find_rows(source, found, line, LANES, end, named)
            spread(named, rows)
        for _ in cutlass.range(ceil_div(policy.depth(tile, problem), config.tile_k), unroll=1):
            if cutlass.const_expr(policy.kind == VARLEN_K):  # the next ones are on their way while these are copied
                find_rows(source, found, line, LANES, end, named)
                line += config.tile_k
                read_index(source, line, LANES, found)
                spread(named, rows)
            loads.producer_acquire(state, expected_tx=expected)
            copy_lines(gemm, operand, rows, column, warp, state.index, loads.producer_get_barrier(state))
            if cutlass.const_expr(policy.kind == VARLEN_M):
                column += config.tile_k
            state.advance()
        first += step
        search, tile = policy.find(search, first, problem)


def spread(named: cute.Tensor, rows: cute.Tensor):
    """Write to ``rows``, in every lane, what the lanes have as ``named``: row i is the one of lane i % 32."""
    for i in range(cute.size(rows)):
        rows[i] = cute.arch.shuffle_sync(named[i // LANES], i % LANES)


def copy_lines(gemm: Any, operand, rows: cute.Tensor, column: Int32, warp: Int32, stage: Int32, barrier: cute.Pointer):
    """Start a warp's copies of lines of every column of a stage.

    Args:
        gemm: the GEMM kernel.
        operand: (map, coordinate tensor of the map, buffers).
        rows: which rows its lines are of.
        column: where in a row the stage begins.
        warp: which of the gathering ones.
        stage: of the buffers.
        barrier: the stage's.
    """
    load, coords, buffers = operand
    width, lines = line_width(gemm), cute.size(rows)
    size = WARPS * lines * width  # of a column of the stage
    columns = extent(gemm) * gemm.config.tile_k // size
    copies = ROWS * width, lines // ROWS, columns
    start = cute.domain_offset((0, column), coords).iterator
    source = cute.make_tensor(start, cute.make_layout(copies, stride=(cute.E(0), 0, width * cute.E(0))))
    index = cute.make_tensor(rows.iterator, cute.make_layout(copies, stride=(1, ROWS, 0)))
    target = buffers.iterator + stage * (columns * size) + warp * (lines * width)
    to = cute.make_tensor(target, cute.make_layout(copies, stride=(1, ROWS * width, size)))
    cute.copy(load, [source, index], to, tma_bar_ptr=barrier)
