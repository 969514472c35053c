"""The dactivation epilogue: accumulators through the activation backward to memory; the counterpart of ``store``.

A thread has a row of the accumulator, and reads its row of the pre-activation in shared memory: see
``epilogue.gradient`` for the pipeline of chunks. Rows are 128 bytes and swizzled, so the 16-byte accesses of eight
lanes have no bank conflicts.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from ...epilogue.dactivation import (
    SLOTS,
    Preactivation,
    Result,
    chunks_of,
    clear_chunk,
    differentiate,
    load_first_chunks,
    load_next_chunk,
    next_slot,
    rounded,
    slot_of,
    store_chunk,
    wait_chunk,
    wait_result,
)
from ...scheduler import Tile
from ...scheduler.problem import Share
from .store import WARP_ROWS, Outputs

PIECE = 8  # columns whose input is 16 bytes of a half
TOGETHER = 4  # pieces
TOGETHER_WITH_RESULT = 2  # more would not fit the registers


@cute.jit
def finish_tiles(
    gemm: cutlass.Constexpr,
    accumulators: cute.Tensor,
    outputs: Outputs,
    hidden: Preactivation,
    results: pipeline.PipelineUmmaAsync,
    share: Share,
):
    """Apply the activation backward and store the share's tiles; those of the tail become zeros.

    Args:
        gemm: the kernel with the dactivation epilogue.
        accumulators: tensor memory ``[..., ACCUMULATORS]``.
        outputs: the gradient, and as the second the activation or None.
        hidden: source of the pre-activation.
        results: pipeline from the MMA warp.
        share: the CTA's share of the problem.
    """
    out, second, _ = outputs
    problem, rank, first, step = share
    policy, config = gemm.policy, gemm.config
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = thread % 32
    out_map, out_coords, out_buffers = out
    buffers = warp_buffers(gemm, out_buffers)[None, None, None, None, warp]
    hidden = hidden._replace(full=hidden.full + warp * SLOTS)
    across = config.tile_n // gemm.chunk[1]

    # [rows, columns, accumulators], cut into pieces: [epi_m, epi_n, 1, pieces, accumulators]
    pieces = cute.flat_divide(accumulators[((None, None), 0, 0, None)], gemm.epi_tile)
    load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(gemm.epi_tile[1])), Float32)
    tiled_load = tcgen05.make_tmem_copy(load_atom, pieces[None, None, 0, 0, 0])
    thread_load = tiled_load.get_slice(thread)
    acc_part = thread_load.partition_S(pieces)
    places = thread_load.partition_D(cute.make_identity_tensor(gemm.epi_tile))
    acc = cute.make_rmem_tensor(places.shape, Float32)

    made = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, cute.size(accumulators, mode=[3]))
    state = Int32(0)
    search = policy.start(problem, True)
    search, tile = policy.find(search, first, problem, True)
    while tile.valid:
        product = policy.is_product(tile, problem)
        row = tile.m * config.tile_m + rank * config.cta_m + warp * WARP_ROWS
        column = tile.n * config.tile_n
        chunks = chunks_of(row, column, WARP_ROWS, 1, across, tile.length, problem.columns)
        target = policy.out(out_coords, tile)
        result = own_result(gemm, second, out_buffers, tile, warp)
        probs = row_prob(hidden, tile.start + row + lane, product and row + lane < tile.length)
        total = cute.make_rmem_tensor(1, Float32)
        total.fill(0.0)
        if product:
            load_first_chunks(gemm, hidden, buffers, tile, chunks, state)
            results.consumer_wait(made)
        for piece in cutlass.range(chunks.count, unroll=1):  # else the arithmetic would not fit the instruction cache
            slot = slot_of(state)
            if product:
                cute.copy(tiled_load, acc_part[None, None, None, 0, piece, made.index], acc)
                cute.arch.fence_view_async_tmem_load()
                if piece + 1 == chunks.count:
                    with cute.arch.elect_one():
                        results.consumer_release(made)
                state = wait_chunk(hidden, state)
                change_row(gemm, acc, buffers[None, None, None, slot], probs, total, result, lane)
                load_next_chunk(gemm, hidden, buffers, tile, chunks, piece, state)
            else:
                clear_chunk(buffers[None, None, None, slot], result, lane)
            across_columns = column + piece * gemm.chunk[1]
            store_chunk(gemm, out_map, target, buffers[None, None, None, slot], result, row, across_columns)
            state = next_slot(state)
        if product:
            if chunks.count == 0:
                with cute.arch.elect_one():
                    results.consumer_release(made)
            made.advance()
        if cutlass.const_expr(hidden.sums is not None):  # noqa: SIM102 - decided while tracing
            if row + lane < tile.length:
                hidden.sums[tile.n, tile.start + row + lane] = total[0]
        first += step
        search, tile = policy.find(search, first, problem, True)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def warp_buffers(gemm, buffers: cute.Tensor) -> cute.Tensor:
    """Return ``[32, 64, parts, SLOTS, warps]`` of the epilogue's buffers, whose rows are 128 bytes apart."""
    rows, columns = gemm.epi_tile
    stage = rows * columns
    shape = (*gemm.chunk, gemm.parts, SLOTS, rows // WARP_ROWS)
    stride = (columns, 1, stage, stage * gemm.parts, WARP_ROWS * columns)
    return cute.make_tensor(buffers.iterator, cute.make_layout(shape, stride=stride))


def own_result(gemm, second: Any, buffers: cute.Tensor, tile: Tile, warp: Int32) -> Any:
    """Return where the activation itself is stored, through a warp's rows of the last buffer; None if not requested."""
    if not gemm.result:
        return None
    second_map, second_coords = second
    buffer = cute.local_tile(buffers[None, None, gemm.buffers - 1], gemm.chunk, (warp, 0))
    return Result(second_map, gemm.policy.rows(second_coords, tile), buffer)


@cute.jit
def row_prob(hidden: Preactivation, row: Int32, wanted: cutlass.Boolean) -> Any:
    """Return the probability of a thread's row, or None."""
    held: Any = None
    if cutlass.const_expr(hidden.probs is not None):
        held = cute.make_rmem_tensor(1, Float32)
        held.fill(0.0)
        if wanted:
            held[0] = hidden.probs[row].to(Float32)
    return held


def same(value: Any) -> Any:
    """Return a row's value, broadcast to every column of a piece."""
    return None if value is None else cute.make_tensor(value.iterator, cute.make_layout(PIECE, stride=0))


@cute.jit
def change_row(
    gemm: cutlass.Constexpr,
    values: cute.Tensor,
    buffers: cute.Tensor,
    probs: Any,
    total: cute.Tensor,
    result: Any,
    lane: Int32,
):
    """Replace a row of the pre-activation in ``buffers [32, 64, parts]`` by its gradient.

    Some pieces are read before any of them is written, so that the compiler may interleave their arithmetic. The
    activation itself is stored with them: all of a row would not fit the registers.

    Args:
        values: float32 registers, 64 columns of the accumulator.
        probs, total: the row's probability, and its sum, which is added to.
        result: where the activation itself is stored, or None.
    """
    element, spec, parts = gemm.out_element, gemm.gradient, gemm.parts
    together = TOGETHER if result is None else TOGETHER_WITH_RESULT
    held = cute.make_rmem_tensor((PIECE, parts, together), element)
    results = cute.make_rmem_tensor((PIECE, together), element)
    for first in cutlass.range_constexpr(0, gemm.chunk[1] // PIECE, together):
        for i in cutlass.range_constexpr(together):
            for part in cutlass.range_constexpr(parts):
                cute.autovec_copy(sixteen_bytes(spec, buffers, lane, first + i, part), held[None, part, i])
        for i in cutlass.range_constexpr(together):
            product = cute.make_rmem_tensor(PIECE, Float32)
            for k in cutlass.range_constexpr(PIECE):
                product[k] = values[(first + i) * PIECE + k]
            flat = cute.make_tensor(held[None, None, i].iterator, cute.make_layout(PIECE * parts))
            wide = cute.make_rmem_tensor(PIECE * parts, Float32)
            wide.store(flat.load().to(Float32))
            step, to_linear = (2, 1) if spec.interleaved else (1, PIECE)
            gate = cute.make_tensor(wide.iterator, cute.make_layout(PIECE, stride=step))
            linear: Any = None
            if cutlass.const_expr(spec.gated):
                linear = cute.make_tensor(wide.iterator + to_linear, cute.make_layout(PIECE, stride=step))
            made: Any = None
            if cutlass.const_expr(result is not None):
                made = results[None, i]
            differentiate(spec, gate, linear, rounded(product, element), same(probs), same(total), made)
            flat.store(wide.load().to(element))
        for i in cutlass.range_constexpr(together):
            for part in cutlass.range_constexpr(parts):
                cute.autovec_copy(held[None, part, i], sixteen_bytes(spec, buffers, lane, first + i, part))
        if cutlass.const_expr(result is not None):
            if cutlass.const_expr(first == 0):
                wait_result(result)
            for i in cutlass.range_constexpr(together):
                place = cute.local_tile(result.buffer, (1, PIECE), (lane, first + i))
                cute.autovec_copy(results[None, i], cute.make_tensor(place.iterator, PIECE))


def sixteen_bytes(spec, buffers: cute.Tensor, lane: Int32, piece: int, part: int) -> cute.Tensor:
    """Return the ``part``-th eight elements of the pre-activation of a row's 8-column ``piece``."""
    if spec.interleaved:
        part, piece = piece // 4, piece % 4 * 2 + part
    place = cute.local_tile(buffers[None, None, part], (1, PIECE), (lane, piece))
    return cute.make_tensor(place.iterator, PIECE)
