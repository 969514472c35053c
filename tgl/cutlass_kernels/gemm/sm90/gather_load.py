"""Producers of a kernel that gathers rows of one operand: cp.async copies of 16 bytes into the swizzled ring.

A tensor map of sm_90 cannot permute rows, so four warps copy the gathered operand piece by piece, while the first of
them also issues TMA loads of the other operand. A stage is lines of 128 bytes, in one or more columns:

=============  ======================  ======================  =================================================
kind           a line is               lines of a column       columns of a stage
=============  ======================  ======================  =================================================
``varlen_m``   a k tile of a row of A  ``tile_m``              1
``varlen_k``   64 elements of a token  ``tile_k``              one per 64 rows or columns of the output's tile
=============  ======================  ======================  =================================================

Eight lanes copy a line, 16 bytes each, and the 128 lanes 16 lines at a time. Where lines are tokens, every stage has
other lines: a warp reads the index for its lines of two stages at once, one line per lane, while the lines of the two
stages before are copied, and lanes exchange the row numbers by shuffles. Piece ``c`` of line ``r`` is stored at piece
``c ^ r % 8``, the 128-byte swizzle in which the MMA reads either order of an operand. Zeros are written, and nothing is
read, for lines of rows past the group's end, for indices outside the operand and for bytes past the end of a row.

Copies write through the generic proxy, and the MMA reads through the async proxy. The copies of a lane arrive at the
barrier of the stage when they are done, and no lane waits for them; so the consumers execute the proxy fence after they
have waited for the stage: it may be anywhere between the writes and the reads that it orders.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from ... import instructions
from ...config import VARLEN_K, VARLEN_M
from ...scheduler import Tile, ceil_div
from ...scheduler.groups import clamp
from ...scheduler.problem import Share
from ..copies import LANES_OF_LINE, LINE, PIECE, copy_piece
from ..gather_call import Gathered, find_rows, index_at, read_index, row_at
from ..ring import RingBarriers, advance
from .decode_load import ahead_of, ask_l2
from .load import TmaOperand, boxes

LANES = 128
LINES = LANES // LANES_OF_LINE  # that all lanes copy at a time
WARP_LINES = 32 // LANES_OF_LINE  # that a warp copies at a time
STAGES_AHEAD = 2  # a warp has one lane for each of its lines of so many stages


@cute.jit
def gather_tiles(
    gemm: cutlass.Constexpr,
    source: Gathered,
    a: TmaOperand,
    b: TmaOperand,
    ring: RingBarriers,
    share: Share,
):
    """Load the k tiles of every tile of a share; a warpgroup calls it.

    Args:
        gemm: the GEMM kernel.
        source: the gathered operand and its index.
        a, b: the operands; the gathered one has no tensor map.
        ring: its barriers.
        share: the CTA's share of the problem.
    """
    problem, _, first, step = share
    policy, tile_k = gemm.policy, gemm.config.tile_k
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % LANES
    leads = cute.arch.make_warp_uniform(lane // 32) == 0
    own, other, extent = (a, b, gemm.tiler[0]) if gemm.gathered == "a" else (b, a, gemm.tiler[1])
    lines = tile_k if policy.kind == VARLEN_K else extent
    own_bytes = extent * LINE
    into = own.buffers.iterator.toint()
    found, rows = (cute.make_rmem_tensor(lines // LINES, Int32) for _ in range(2))
    stage, phase, asked = Int32(0), Int32(0), Int32(-1)
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    while tile.valid:
        to, parts = _boxes(gemm, other, tile)
        row, end = tile.start, tile.start + tile.length
        column = Int32(0)  # byte offset of the stage's first line
        along = tile.m if cutlass.const_expr(gemm.gathered == "a") else tile.n
        if cutlass.const_expr(policy.kind == VARLEN_M):
            row += along * extent
        else:
            column = along * (own_bytes // tile_k)
        end_k = ceil_div(policy.depth(tile, problem), tile_k)
        following = tile
        if cutlass.const_expr(gemm.config.few):  # noqa: SIM102 - decided while tracing
            if leads:
                if asked < 0:
                    asked = ask_ahead(gemm, other, parts, to, ring, end_k)
                ask_l2(other, parts, asked, cutlass.min(end_k, Int32(ahead_of(gemm))))
        held = ahead = Int32(-1)
        if cutlass.const_expr(policy.kind == VARLEN_M):
            row += lane // LANES_OF_LINE  # the lane's first line
            read_index(source, row, LINES, found)
            find_rows(source, found, row, LINES, end, rows)
        else:
            row += line_of_lane(lane, tile_k)
            ahead = index_at(source, row)
        if cutlass.const_expr(gemm.config.few):
            first += step
            search, following = policy.find(search, first, problem)
        for k in cutlass.range(end_k, unroll=1):
            if cutlass.const_expr(policy.kind == VARLEN_K):
                if k % STAGES_AHEAD == 0:
                    held = row_at(source, ahead, row, end)
                    row += STAGES_AHEAD * tile_k
                    ahead = index_at(source, row)
                pass_rows(held, k % STAGES_AHEAD, lane, rows)
            cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
            if leads:
                if cutlass.const_expr(gemm.config.few):
                    further = k + ahead_of(gemm)
                    ask_l2(other, parts, cutlass.max(asked, further), cutlass.min(end_k, further + 1))
                    if k >= asked:
                        ask(gemm, other, parts, to, ring, k, stage)
                    if k == cutlass.max(end_k - 1 - ahead_of(gemm), 0) and not following.valid:
                        instructions.launch_dependents()
                else:
                    ask(gemm, other, parts, to, ring, k, stage)
            for part in cutlass.range_constexpr(own_bytes // (lines * LINE)):
                target = into + stage * own_bytes + part * (lines * LINE)
                copy_lines(source, rows, column + part * LINE, target, lane)
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + stage)
            if cutlass.const_expr(policy.kind == VARLEN_M):
                column += LINE
            stage, phase = advance(stage, phase, gemm.stages)
        if cutlass.const_expr(gemm.config.few):
            asked, tile = Int32(0), following
        else:
            first += step
            search, tile = policy.find(search, first, problem)


@cute.jit
def ask(
    gemm: cutlass.Constexpr,
    other: TmaOperand,
    parts: cute.Tensor,
    to: cute.Tensor,
    ring: RingBarriers,
    k: Int32,
    stage: Int32,
):
    """Issue the TMA load of a k tile of the operand that is not gathered."""
    own_bytes = gemm.tiler[0 if cutlass.const_expr(gemm.gathered == "a") else 1] * LINE
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, gemm.stage_bytes - own_bytes)
    cute.copy(other.map, parts[None, k], to[None, stage], tma_bar_ptr=ring.full + stage)


@cute.jit
def ask_ahead(
    gemm: cutlass.Constexpr, other: TmaOperand, parts: cute.Tensor, to: cute.Tensor, ring: RingBarriers, end: Int32
) -> Int32:
    """Load as many of the first tile's k tiles as the ring holds, before the index is ready; return their number."""
    asked = cutlass.min(end, Int32(gemm.stages))
    for k in cutlass.range(asked, unroll=1):
        ask(gemm, other, parts, to, ring, k, k)
    return asked


def _boxes(gemm: Any, other: TmaOperand, tile: Tile) -> tuple[cute.Tensor, cute.Tensor]:
    """Return destination ``[box, stage]`` and source ``[box, k]`` of the operand that TMA loads."""
    policy, (tile_m, _, tile_k) = gemm.policy, gemm.tiler
    if gemm.gathered == "a":
        part = cute.local_tile(policy.b(other.coords, tile), gemm.b_tile, (tile.n, None))
    else:
        part = cute.local_tile(policy.a(other.coords, tile), (tile_m, tile_k), (tile.m, None))
    return boxes(other, part, 0, 1)


def line_of_lane(lane: Int32, tile_k: int) -> Int32:
    """Return the line of ``STAGES_AHEAD`` stages of ``tile_k`` whose index entry a lane reads."""
    at, stage_lines = lane % 32, 32 // STAGES_AHEAD
    line = at % stage_lines // WARP_LINES * LINES + lane // 32 * WARP_LINES + at % WARP_LINES
    return at // stage_lines * tile_k + line


def pass_rows(held: Int32, stage: Int32, lane: Int32, rows: cute.Tensor):
    """Write to ``rows`` the operand's rows of a lane's lines of a stage.

    Args:
        held: row of the line that ``line_of_lane`` returns.
        stage: which of ``STAGES_AHEAD``.
    """
    first = stage * (32 // STAGES_AHEAD) + lane % 32 // LANES_OF_LINE
    for i in range(cute.size(rows)):
        rows[i] = cute.arch.shuffle_sync(held, first + i * WARP_LINES)


@cute.jit
def copy_lines(source: Gathered, rows: cute.Tensor, column: Int32, target: Int32, lane: Int32):
    """Start a lane's copies of lines to the address ``target`` in shared memory, which is aligned to the swizzle.

    Args:
        rows: the rows that they belong to; negative ones are filled with zeros.
        column: byte offset of the lines in a row.
    """
    values = source.values
    line, piece = lane // LANES_OF_LINE, lane % LANES_OF_LINE
    size = values.element_type.width // 8
    column += piece * PIECE
    left = clamp(values.shape[1] * size - column, Int32(0), Int32(PIECE))
    pitch = Int64(values.stride[0]) * size
    start = values.iterator.toint() + Int64(column)
    target += line * LINE + (piece ^ line % 8) * PIECE
    for i in cutlass.range_constexpr(cute.size(rows)):
        row = rows[i]
        count = left
        if row < 0:
            row, count = Int32(0), Int32(0)
        copy_piece(start + Int64(row) * pitch, target + i * (LINES * LINE), count)
