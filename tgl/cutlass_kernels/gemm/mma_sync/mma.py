"""The mainloop: ldmatrix and mma.sync over the stages of the ring.

A stage is four steps of 32 bytes of the depth: of 16 elements, or of 32 of 8 bits. In a step a warp multiplies all its
rows of A with 16 columns of B after the other. Meanwhile the next 16 columns are loaded to registers, and the rows of
the next step, also across stages; all columns of two steps would leave no registers for the sums of 64 x 64. A stage is
overwritten after the barrier at which all warps have read it and know that the next one has arrived: one barrier per k
tile.

Tensor cores of Ada and of Hopper add FP8 products with fewer bits than float32 has; for later ones without wider MMAs
this is not known. Where a kernel ``promotes``, they sum only the products of a stage, and all further additions are
done in float32 registers, where block scales are applied as well.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warp

from ...config import VARLEN_M
from ...epilogue.vectors import EpilogueArgs
from ...scheduler import ceil_div
from ...scheduler.problem import Problem, Share
from ..copies import LINE, PIECE, STEPS
from ..k_tail import clear_start
from .factors import make_factors, promote, read_factors
from .load import (
    GemmOperands,
    LoadState,
    StageLayout,
    begin_copies,
    copy_next,
    copy_pieces,
    end_copies,
    follow,
    next_tile,
    parts_of,
)
from .mapped import BARRIER, StageAddress, barrier
from .narrow import read_bytes
from .scales import make_scales, read_scales
from .store import GlobalOutput

MMA = 16, 8, 16
STEP = MMA[2]  # of the depth, of elements of 16 bits
STEP_BITS = STEP * 16
BLOCK = 16  # rows, or columns, that one ldmatrix reads for an MMA or two


class RingAddresses(NamedTuple):
    """Addresses of stages in shared memory: the first one, and the one being read.

    Where operands are mapped, also those of these stages' barriers, and the phase that ends when the one being read is
    full.
    """

    first: Int32
    read: Int32
    first_full: Any = None
    full: Any = None
    phase: Any = None


def tiled_mma(element: type[cutlass.Numeric]) -> cute.TiledMma:
    """Return the MMA of a warp."""
    return cute.make_tiled_mma(warp.MmaF16BF16Op(element, Float32, MMA))


def lane_place(part: StageLayout, rows: bool, begin: Int32) -> Int32:
    """Return the offset, in a stage, of a lane's line of the first ldmatrix, for a warp whose part begins at ``begin``.

    Four matrices of 8 x 8 are read by one. Those of A are ordered by rows first, those of B by depth. Of bytes across
    the depth two of 16 x 16 are, one for either half of the depth.

    Args:
        rows: whether the operand is A.
    """
    lane = cute.arch.lane_idx()
    if not part.along and part.bits == 8:
        above, piece = begin // part.elements * part.elements + lane, begin % part.elements // PIECE
        return part.offset + above * LINE + (piece ^ lane % 8) * PIECE
    matrix, line = lane // 8, lane % 8
    down, across = (matrix % 2, matrix // 2) if rows == part.along else (matrix // 2, matrix % 2)
    above = (begin if part.along else begin // part.elements * part.elements) + down * 8 + line
    piece = across if part.along else begin % part.elements // 8 + across
    return part.offset + above * LINE + (piece ^ line) * PIECE


def address(part: StageLayout, at: Int32, block: int, step: Any) -> Int32:
    """Return the address of ``lane_place`` for 16 rows and a step of the depth; ``at`` includes the stage's address."""
    if part.along:
        return (at ^ step * (2 * PIECE)) + block * (BLOCK * LINE)
    return (at ^ block * (BLOCK * part.bits // 8)) + step * (STEP_BITS // part.bits * LINE)


def read_matrices(part: StageLayout, rows: bool, at: Int32, block: int, step: Any, target: Any):
    """Load four matrices, of 16 rows (or columns) and a step, to 8 registers of 16 bits at the pointer ``target``."""
    if not part.along and part.bits == 8:
        read_bytes(address(part, at, block, step), rows, target)
        return
    element = target.dtype
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(not part.along, 4), element)
    place = cute.make_ptr(element, address(part, at, block, step), cute.AddressSpace.smem, assumed_align=PIECE)
    layout = cute.make_layout((8, 1))
    cute.copy(atom, cute.make_tensor(place, layout), cute.make_tensor(target, layout))


class WarpFragments(NamedTuple):
    """A warp's operands: the places of its lines in a stage, and two alternating sets of matrices in registers.

    They are ``((2, 2, 2), M)`` of A, of all rows and a step, and ``((2, 2), 2)`` of B, of 16 columns and a step, in
    elements of 16 bits: two of 8 bits count as one.
    """

    a_place: Int32
    b_place: Int32
    a: tuple[cute.Tensor, cute.Tensor]
    b: tuple[cute.Tensor, cute.Tensor]
    scales: Any


def make_own(gemm: Any, operands: Any) -> WarpFragments:
    """Return the fragments of this warp."""
    (rows, columns), across = gemm.warp_tile, gemm.warps[1]
    index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    a, b = parts_of(gemm, operands)
    return WarpFragments(
        lane_place(a, True, index // across * rows),
        lane_place(b, False, index % across * (columns // gemm.halves)),
        tuple(cute.make_rmem_tensor(((2, 2, 2), rows // MMA[0]), gemm.pair) for _ in range(2)),
        tuple(cute.make_rmem_tensor(((2, 2), BLOCK // MMA[1]), gemm.pair) for _ in range(2)),
        make_scales(gemm),
    )


def read_rows(gemm: Any, operands: Any, own: WarpFragments, stage: Int32, step: Any, turn: int):
    """Load the matrices of A of a step, and what scales of blocks MMAs take in it."""
    read_scales(gemm, own.scales, stage, step, turn)
    part, _ = parts_of(gemm, operands)
    for block in range(gemm.warp_tile[0] // BLOCK):
        read_matrices(part, True, stage + own.a_place, block, step, own.a[turn].iterator + 8 * block)


def read_columns(gemm: Any, operands: Any, own: WarpFragments, stage: Int32, step: Any, block: int, turn: int):
    """Load the matrices of B of 16 columns and a step."""
    _, part = parts_of(gemm, operands)
    half, within = divmod(block, gemm.warp_tile[1] // gemm.halves // BLOCK)
    place = stage + own.b_place + half * part.extent * LINE
    read_matrices(part, False, place, within, step, own.b[turn].iterator)


def multiply_columns(gemm: Any, own: WarpFragments, acc: cute.Tensor, block: int, a_turn: int, b_turn: int):
    """Add the product of all rows and 16 columns, by the kernel's MMAs."""
    first = cute.crd2idx(((0, 0), 0, block * (BLOCK // MMA[1])), acc.layout)
    shape, stride = (*acc.shape[:2], BLOCK // MMA[1]), acc.stride
    part = cute.make_tensor(acc.iterator + first, cute.make_layout(shape, stride=stride))
    scales: Any = None
    if own.scales is not None:
        columns = cute.make_tensor(own.scales.columns[a_turn].iterator + block * (BLOCK // MMA[1]), BLOCK // MMA[1])
        scales = own.scales.rows[a_turn], columns
    gemm.multiply(gemm, part, own.a[a_turn], own.b[b_turn], scales)


def multiply_halves(gemm: Any, sums: cute.Tensor, a: cute.Tensor, b: cute.Tensor, scales: None) -> None:
    """Add ``A B`` to ``sums`` for a step of the depth, with 16-bit elements.

    Args:
        sums: float32 registers ``((2, 2), M, N)``.
        a, b: matrices in registers, ``((2, 2, 2), M)`` and ``((2, 2), N)``.
        scales: None, as there are no block scales.
    """
    cute.gemm(tiled_mma(gemm.element), sums, a, b, sums)


@cute.jit
def advance(gemm: cutlass.Constexpr, ring: RingAddresses) -> RingAddresses:
    """Return the ring at its next stage."""
    following, full, phase = ring.read + gemm.stage_bytes, ring.full, ring.phase
    if cutlass.const_expr(gemm.mapped):
        full += BARRIER
    if following == ring.first + gemm.config.stages * gemm.stage_bytes:
        following = ring.first
        if cutlass.const_expr(gemm.mapped):
            full, phase = ring.first_full, phase ^ 1
    return ring._replace(read=following, full=full, phase=phase)


@cute.jit
def behind(gemm: cutlass.Constexpr, ring: RingAddresses) -> StageAddress:
    """Return the stage before the one being read, which may be overwritten."""
    before, full = ring.read - gemm.stage_bytes, ring.full
    if cutlass.const_expr(gemm.mapped):
        full -= BARRIER
    if before < ring.first:
        before += gemm.config.stages * gemm.stage_bytes
        if cutlass.const_expr(gemm.mapped):
            full += gemm.config.stages * BARRIER
    return StageAddress(before, full)


@cute.jit
def arrive(gemm: cutlass.Constexpr, ring: RingAddresses):
    """Wait until the k tile that ``ring`` reads has arrived, and all warps have read what they multiply before it."""
    if cutlass.const_expr(gemm.mapped):
        cute.arch.mbarrier_wait(barrier(ring.full), ring.phase)
    if cutlass.const_expr(gemm.copies):
        cute.arch.cp_async_wait_group(gemm.config.stages - 2)
    cute.arch.sync_threads()


@cute.jit
def clear(gemm: cutlass.Constexpr, stage: Int32, before: Int32):
    """Clear the bytes of the depth before ``before`` in a stage that has arrived."""
    if before > 0:
        thread, _, _ = cute.arch.thread_idx()
        clear_start(stage, gemm.config.tile_m + gemm.config.tile_n, before, thread, gemm.threads)
        cute.arch.sync_threads()


@cute.jit
def multiply(
    gemm: cutlass.Constexpr,
    operands: GemmOperands,
    own: WarpFragments,
    acc: cute.Tensor,
    feed: LoadState,
    ring: RingAddresses,
    extent: Int32,
    before: Int32,
    problem: Problem,
    step: Int32,
) -> tuple[LoadState, RingAddresses]:
    """Add ``A B`` over ``extent`` of the depth to ``acc``; no MMA is issued past it.

    All k tiles but a partial last one are multiplied in one loop, since a branch in it would cost registers.

    What is ``before`` the group in its first stage, in bytes, is none of it, where the policy ``clears``.
    """
    tile_k, sums, factors = gemm.config.tile_k, acc, make_factors(gemm)
    steps, depth, blocks = STEPS, tile_k // STEPS, gemm.warp_tile[1] // BLOCK
    places = steps if gemm.kind == VARLEN_M else 1  # of copies; more make a weight gradient slower
    if cutlass.const_expr(gemm.promotes):
        sums = cute.make_rmem_tensor(acc.shape, Float32)
    if extent > 0:
        arrive(gemm, ring)
        if cutlass.const_expr(gemm.policy.clears):
            clear(gemm, ring.read, before)
        read_rows(gemm, operands, own, ring.read, 0, 0)
        read_columns(gemm, operands, own, ring.read, 0, 0, 0)
    while extent > tile_k - depth:
        following = advance(gemm, ring)
        if cutlass.const_expr(gemm.promotes):
            sums.fill(0.0)
        for turn in cutlass.range_constexpr(steps * blocks):
            i, block = turn // blocks, turn % blocks
            if cutlass.const_expr(block == 0 and i + 1 < steps):
                read_rows(gemm, operands, own, ring.read, i + 1, (i + 1) % 2)
            if cutlass.const_expr(turn + 1 < steps * blocks):
                after = (turn + 1) // blocks, (turn + 1) % blocks
                read_columns(gemm, operands, own, ring.read, after[0], after[1], (turn + 1) % 2)
            else:
                if cutlass.const_expr(factors is not None):
                    read_factors(gemm, ring.read, factors)
                # After the last k tile this stage is read once more and the fragments are not used: if the reads were
                # conditional, ptxas would keep several copies of every fragment, and spill on sm_120.
                upcoming = ring.read
                if extent > tile_k:
                    arrive(gemm, following)
                    upcoming = following.read
                read_rows(gemm, operands, own, upcoming, 0, 0)
                read_columns(gemm, operands, own, upcoming, 0, 0, 0)
            if cutlass.const_expr(turn == 0):
                feed, pieces = begin_copies(gemm, operands, feed, behind(gemm, ring))
            if cutlass.const_expr(block == 0 and i < places):
                copy_pieces(pieces, i, places)
            if cutlass.const_expr(turn == blocks * (places - 1)):
                end_copies(gemm)
            multiply_columns(gemm, own, sums, block, i % 2, turn % 2)
        if cutlass.const_expr(gemm.promotes):
            promote(acc, sums, factors)
        feed = follow(gemm, operands, feed, problem, step)
        ring = following
        extent -= tile_k
    if extent > 0:
        if cutlass.const_expr(gemm.promotes):
            sums.fill(0.0)
        feed = copy_next(gemm, operands, feed, behind(gemm, ring))
        for i in cutlass.range(ceil_div(extent, depth), unroll=1):
            read_rows(gemm, operands, own, ring.read, i, 0)
            for block in cutlass.range_constexpr(blocks):
                read_columns(gemm, operands, own, ring.read, i, block, block % 2)
                multiply_columns(gemm, own, sums, block, 0, block % 2)
        if cutlass.const_expr(factors is not None):
            read_factors(gemm, ring.read, factors)
        if cutlass.const_expr(gemm.promotes):
            promote(acc, sums, factors)
        feed = follow(gemm, operands, feed, problem, step)
        ring = advance(gemm, ring)
    return feed, ring


def finish_tile(gemm: Any, *args: Any) -> None:
    """Store by the kernel's epilogue; calling the kernel's own method would make it a variable of the loop."""
    gemm.store(gemm, *args)


@cute.jit
def multiply_tiles(
    gemm: cutlass.Constexpr,
    operands: GemmOperands,
    ring: RingAddresses,
    output: GlobalOutput,
    args: EpilogueArgs,
    share: Share,
):
    """Multiply, finish and store every tile of a share, the tail's included.

    Args:
        gemm: the GEMM kernel.
        operands: both.
        ring: at its first stage.
        output, args: the outputs, and the epilogue's operands.
        share: sizes and offsets, and the tiles of this CTA.
    """
    policy, last = gemm.policy, gemm.config.stages - 1
    problem, _, first, step = share
    own = make_own(gemm, operands)
    feed = next_tile(gemm, operands, policy.start(problem), first, problem, step)
    for stage in cutlass.range(last, unroll=1):
        place: Any = StageAddress(ring.first + stage * gemm.stage_bytes)
        if cutlass.const_expr(gemm.mapped):
            place = place._replace(full=ring.first_full + stage * BARRIER)
        feed = copy_next(gemm, operands, feed, place)
        feed = follow(gemm, operands, feed, problem, step)
    search = policy.start(problem, True)
    search, tile = policy.find(search, first, problem, True)
    while tile.valid:
        product = policy.is_product(tile, problem)
        extent, before = Int32(0), Int32(0)
        if product:
            extent = policy.depth(tile, problem)
        if cutlass.const_expr(policy.clears):
            before = policy.before(tile)
        rows, columns = gemm.warp_tile
        acc = cute.make_rmem_tensor(((2, 2), rows // MMA[0], columns // MMA[1]), Float32)
        acc.fill(0.0)
        feed, ring = multiply(gemm, operands, own, acc, feed, ring, extent, before, problem, step)
        if cutlass.const_expr(gemm.spec.accumulate):
            if product:
                finish_tile(gemm, acc, output, args, tile, problem, product)
        else:
            finish_tile(gemm, acc, output, args, tile, problem, product)
        first += step
        search, tile = policy.find(search, first, problem, True)
    if cutlass.const_expr(gemm.copies):
        cute.arch.cp_async_wait_group(0)
