"""The epilogue warps: accumulators to memory.

A warp can access only 32 rows of tensor memory, so it also stages and stores those rows alone: the warps of an epilogue
synchronise only where they share a tile's bias. Teams of four warps have equal parts of the columns.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import tcgen05

from ...config import VARLEN_M
from ...epilogue.vectors import EpilogueArgs, TileVectors, add_bias, add_output, alpha, load_vectors, scale_lines
from ...scheduler import ceil_div
from ...scheduler.problem import Share
from .activation_epilogue import Views, activated_sinks, store_activated
from .pieces import WARP_ROWS, accumulator_of, in_turn, piece_stores, send_piece
from .promote import Results, promote_tile
from .quantize import all_stores, clear_gaps, clear_scales

THREADS = 128  # of a team
BARRIER = 1  # named barrier of the epilogue warps


@cute.jit
def _meet(gemm: cutlass.Constexpr):
    cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS * gemm.teams)


def _part(gemm, load: Any, vector: Any, tile: tuple[int, int], team: Any) -> Any:
    """Return a thread's part of a vector of its team's ``tile``, by pieces; None of None."""
    if vector is None:
        return None
    return load.partition_D(cute.flat_divide(cute.local_tile(vector, tile, (0, team)), gemm.epi_tile))


class Outputs(NamedTuple):
    """Outputs of the epilogue.

    Attributes:
        out: (map, coordinate tensor of the map, buffers ``[epi_m, epi_n, stages]``).
        second: (map, coordinate tensor of the map) of the activation's output, ``QuantizedOutput``, or None.
        values: the output in global memory if it is read, else None.
    """

    out: Any
    second: Any
    values: Any


@cute.jit
def store_tiles(
    gemm: cutlass.Constexpr,
    made_by_mma: Results,
    outputs: Outputs,
    vectors: TileVectors,
    args: EpilogueArgs,
    share: Share,
):
    """Store the share's tiles, the tail's included.

    A tile goes through ``gemm.epi_stages`` buffers in pieces of ``gemm.epi_tile``, and lanes of a warp wait for each
    other once per piece: then all have written it, and the one that stores has waited for the store that used the next
    piece's buffer. A warp whose rows are all outside the output stores nothing, or zero scales if any belong there.

    Args:
        gemm: the GEMM kernel.
        made_by_mma: accumulators, their pipeline and factors.
        vectors, args: bias, row scale and factors in shared and in global memory.
        share: the CTA's share of the problem.
    """
    accumulators, results, factors = made_by_mma
    out, second, out_values = outputs
    problem, rank, first, step = share
    policy, spec, config = gemm.policy, gemm.spec, gemm.config
    every, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    thread, team = every, 0
    if cutlass.const_expr(gemm.teams > 1):
        thread, team, warp = every % THREADS, warp // (THREADS // 32), warp % (THREADS // 32)
    out_map, out_coords, out_buffers = out
    epi_n, columns = gemm.epi_tile[1], config.tile_n // gemm.teams
    pieces = columns // epi_n
    cta_tile = (config.cta_m, columns)
    accumulators = cute.local_tile(
        accumulators[((None, None), 0, 0, None)], (*cta_tile, gemm.accumulators), (0, team, 0)
    )
    out_buffers = cute.local_tile(out_buffers, (*gemm.epi_tile, gemm.epi_stages), (0, 0, team))

    # [rows, columns, accumulators], cut into pieces: [epi_m, epi_n, 1, pieces, accumulators]
    pieces_acc = cute.flat_divide(accumulators, gemm.epi_tile)
    load_atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(epi_n)), Float32)
    tiled_load = tcgen05.make_tmem_copy(load_atom, pieces_acc[None, None, 0, 0, 0])
    thread_load = tiled_load.get_slice(thread)
    acc_part = thread_load.partition_S(pieces_acc)
    coords = thread_load.partition_D(cute.flat_divide(cute.make_identity_tensor(cta_tile), gemm.epi_tile))
    acc = cute.make_rmem_tensor(coords[None, None, None, 0, 0].shape, Float32)
    rounded = acc
    if cutlass.const_expr(gemm.out_element is not Float32):
        rounded = cute.make_rmem_tensor(acc.shape, gemm.out_element)
    write_atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), gemm.out_element, num_bits_per_copy=128)
    tiled_write = cute.make_tiled_copy_D(write_atom, tiled_load)
    write_part = tiled_write.get_slice(thread).partition_D(out_buffers)
    write_from = tiled_write.retile(rounded)

    bias_part = _part(gemm, thread_load, vectors.bias, cta_tile, team)
    scale_part = _part(gemm, thread_load, vectors.bias_scale, cta_tile, team)
    row_part = _part(gemm, thread_load, vectors.a_factor, cta_tile, team)
    column_part = _part(gemm, thread_load, vectors.b_factor, cta_tile, team)

    turn = Int32(0), Int32(0)  # of the factors
    if cutlass.const_expr(gemm.promotes):
        sums = cute.make_rmem_tensor(columns, Float32)
    if cutlass.const_expr(spec.quantized is not None):
        clear_gaps(second, problem, THREADS // 32)
    made = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, gemm.hand_overs)
    buffer = Int32(0)
    factor, factor_group = Float32(1), Int32(-1)
    search = policy.start(problem, True)
    search, tile = policy.find(search, first, problem, True)
    while tile.valid:
        row = tile.m * config.tile_m + rank * config.cta_m
        column = tile.n * config.tile_n + team * columns
        target: Any = None
        if cutlass.const_expr(spec.keeps):
            target = policy.out(out_coords, tile)
        # The tensor map alone would drop rows out of bounds; those of a whole warp need not be computed.
        height = tile.length if policy.kind == VARLEN_M else Int32(target.shape[0])
        stores = row + warp * WARP_ROWS < height
        corner = row + warp * WARP_ROWS, column
        if cutlass.const_expr(spec.activation is not None):
            sinks = activated_sinks(gemm, (out_map, target), second, tile, out_buffers, warp, corner)
        else:
            stores_of = piece_stores(out_map, out_buffers, target, warp, corner, epi_n, columns)
            sinks = ((out_map, *stores_of),)
        if policy.is_product(tile, problem):
            if cutlass.const_expr(spec.vectors):
                _meet(gemm)  # all have read the vectors of the tile before
                start, end = policy.span(tile, row, out_coords)
                threads = THREADS * gemm.teams
                load_vectors(spec, vectors, args, tile.group, start, end, tile.n * config.tile_n, every, threads)
                _meet(gemm)
            if cutlass.const_expr(spec.group_factor):  # noqa: SIM102 - decided while tracing
                if tile.group != factor_group:
                    factor, factor_group = alpha(spec, args, tile.group), tile.group
            if cutlass.const_expr(gemm.promotes):
                depth = ceil_div(policy.depth(tile, problem), config.tile_k)
                made, turn = promote_tile(gemm, sums, Results(accumulators, results, factors), made, turn, depth)
            else:
                results.consumer_wait(made)
            if stores:
                if cutlass.const_expr(spec.activation is not None):
                    views = Views(tiled_load, acc_part, acc, bias_part, tiled_write, write_part)
                    probability: Any = None
                    if cutlass.const_expr(spec.probs):
                        probability = vectors.probs[thread, 0]
                    buffer = store_activated(gemm, views, sinks, probability, results, made, buffer)
                else:
                    _, store_from, store_to = sinks[0]
                    which = accumulator_of(gemm, made)
                    for nth in cutlass.range_constexpr(pieces):
                        piece = in_turn(gemm, made, nth, pieces)
                        if cutlass.const_expr(gemm.promotes):
                            acc.store(cute.make_tensor(sums.iterator + piece * epi_n, acc.layout).load())
                        else:
                            cute.copy(tiled_load, acc_part[None, None, None, 0, piece, which], acc)
                            cute.arch.fence_view_async_tmem_load()
                            if cutlass.const_expr(nth == gemm.read_first - 1):
                                with cute.arch.elect_one():
                                    results.consumer_release(made)
                        if cutlass.const_expr(spec.group_factor):
                            acc.store(acc.load() * factor)
                        if cutlass.const_expr(spec.line_factors):
                            here = (None, None, None, 0, piece)
                            scale_lines(acc, row_part[here], column_part[here])
                        if cutlass.const_expr(spec.bias):
                            scale = None
                            if cutlass.const_expr(spec.bias_scale):
                                scale = scale_part[None, None, None, 0, piece]
                            add_bias(acc, bias_part[None, None, None, 0, piece], scale)
                        if cutlass.const_expr(spec.reads_output):
                            values = cute.domain_offset((row, column), policy.old(out_values, tile))
                            values = cute.local_tile(values, cta_tile, (0, 0))
                            values = thread_load.partition_D(cute.flat_divide(values, gemm.epi_tile))
                            limit = (out_values.shape[0] - row, out_values.shape[1] - column)
                            add_output(
                                acc, values[None, None, None, 0, piece], coords[None, None, None, 0, piece], limit
                            )
                        if cutlass.const_expr(gemm.out_element is not Float32):
                            rounded.store(acc.load().to(gemm.out_element))
                        cute.copy(tiled_write, write_from, write_part[None, None, None, buffer])
                        send_piece(gemm, (out_map, store_from[None, buffer], store_to[None, 0, piece]))
                        buffer = (buffer + 1) % gemm.epi_stages
            else:
                if cutlass.const_expr(not gemm.promotes):
                    with cute.arch.elect_one():
                        results.consumer_release(made)
                if cutlass.const_expr(spec.quantized is not None):
                    clear_scales(gemm, sinks[-1])
            if cutlass.const_expr(not gemm.promotes):
                made.advance()
        elif cutlass.const_expr(not spec.accumulate):  # noqa: SIM102 - decided while tracing
            if stores:
                rounded.fill(0.0)
                buffer = clear_tile(gemm, tiled_write, write_from, write_part, all_stores(sinks), buffer)
        first += step
        search, tile = policy.find(search, first, problem, True)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def clear_tile(
    gemm: cutlass.Constexpr,
    write: cute.TiledCopy,
    zeros: cute.Tensor,
    buffers: cute.Tensor,
    sinks: Any,
    buffer: Int32,
) -> Int32:
    """Store zeros in one warp's rows of a tile; return the next turn of the buffers.

    Args:
        gemm: the GEMM kernel.
        write: to shared memory.
        zeros: registers of a piece.
        buffers: the thread's part of them, ``[..., buffer]``.
        sinks: ``(map, from [box, buffer], to [box, 1, piece])`` of every output.
        buffer: buffer to begin with.
    """
    for tma, source, sink in sinks:
        for piece in cutlass.range_constexpr(cute.size(sink, mode=[2])):
            cute.copy(write, zeros, buffers[None, None, None, buffer])
            send_piece(gemm, (tma, source[None, buffer], sink[None, 0, piece]))
            buffer = (buffer + 1) % gemm.epi_stages
    return buffer
