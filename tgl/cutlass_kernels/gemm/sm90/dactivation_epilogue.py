"""The dactivation epilogue: accumulators through the activation backward to memory; the counterpart of ``store``.

See ``epilogue.gradient`` for the pipeline of chunks, and ``store`` for the layout of registers.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warp as warp_ops

from ...epilogue.dactivation import (
    SLOTS,
    Chunks,
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
from ...epilogue.fragments import by_row, row_probs, write_sums
from ...scheduler import Tile
from . import store


def own(
    gemm, hidden: Preactivation, buffers: cute.Tensor, which: Int32, warp: Int32
) -> tuple[Preactivation, cute.Tensor]:
    """Return a warp's barriers and its buffers ``[16, 64, parts, SLOTS]``."""
    mine = which * 4 + warp
    size = gemm.chunk[0] * gemm.chunk[1]
    shape = (*gemm.chunk, gemm.parts, SLOTS, 4 * gemm.warpgroups)
    stride = (gemm.chunk[1], 1, size, size * gemm.parts, size * gemm.buffers)
    every = cute.make_tensor(buffers.iterator, cute.make_layout(shape, stride=stride))
    return hidden._replace(full=hidden.full + mine * SLOTS), every[None, None, None, None, mine]


def own_result(gemm, output: store.OutputTarget, tile: Tile, which: Int32, warp: Int32) -> Any:
    """Return where the activation itself is stored, through the last buffer of a warp; None if it is not requested."""
    if not gemm.result:
        return None
    second_map, second_coords = output.second
    buffer = output.buffers[None, None, (which * 4 + warp) * gemm.buffers + gemm.buffers - 1]
    return Result(second_map, gemm.policy.rows(second_coords, tile), buffer)


@cute.jit
def warp_chunks(
    gemm: cutlass.Constexpr, tile: Tile, first_column: Int32, columns: Int32, which: Int32, warp: Int32
) -> Chunks:
    """Return the chunks of a warp in a tile whose part for this CTA begins at ``first_column``."""
    config = gemm.config
    down = gemm.sharing * store.MMA_ROWS
    row = tile.m * config.tile_m + which % gemm.sharing * store.MMA_ROWS + warp * store.CHUNK_ROWS
    blocks = max(config.tile_m // down, 1)
    return chunks_of(row, first_column, down, blocks, config.tile_n // gemm.chunk[1], tile.length, columns)


@cute.jit
def begin_tile(
    gemm: cutlass.Constexpr,
    output: store.OutputTarget,
    hidden: Preactivation,
    tile: Tile,
    first_column: Int32,
    columns: Int32,
    which: Int32,
    thread: Int32,
    state: Int32,
):
    """Issue the first loads of the pre-activation for ``finish_tile``, which has the same arguments."""
    warp = cute.arch.make_warp_uniform(thread // 32)
    hidden, buffers = own(gemm, hidden, output.buffers, which, warp)
    chunks = warp_chunks(gemm, tile, first_column, columns, which, warp)
    load_first_chunks(gemm, hidden, buffers, tile, chunks, state)


@cute.jit
def finish_tile(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    output: store.OutputTarget,
    hidden: Preactivation,
    tile: Tile,
    first_column: Int32,
    columns: Int32,
    product: cutlass.Boolean,
    which: Int32,
    thread: Int32,
    state: Int32,
) -> Int32:
    """Finish and store one warpgroup's rows of a tile; returns the state of the warp's buffers.

    Args:
        gemm: the kernel with the dactivation epilogue.
        acc: float32 registers ``((2, 2, N / 8), M, 1)``.
        output, hidden: destination of results, and source of the pre-activation.
        tile: the tile.
        first_column: where this CTA's part of it begins.
        columns: columns of the product.
        product: whether the tile belongs to a group; the tail becomes zeros.
        which: index of the warpgroup.
        thread: index in the warpgroup.
    """
    config = gemm.config
    warp = cute.arch.make_warp_uniform(thread // 32)
    lane = thread % 32
    hidden, buffers = own(gemm, hidden, output.buffers, which, warp)
    chunks = warp_chunks(gemm, tile, first_column, columns, which, warp)
    target = gemm.policy.out(output.coords, tile)
    result = own_result(gemm, output, tile, which, warp)
    index = Int32(0)
    for block in cutlass.range_constexpr(cute.size(acc, mode=[1])):
        row = chunks.row + block * chunks.down
        probs = row_probs(hidden.probs, tile, row + lane // 4, product)
        sums = cute.make_rmem_tensor(2, Float32)
        sums.fill(0.0)
        for chunk in cutlass.range_constexpr(config.tile_n // gemm.chunk[1]):
            column = first_column + chunk * gemm.chunk[1]
            if row < tile.length and column < columns:
                slot = slot_of(state)
                if product:
                    state = wait_chunk(hidden, state)
                    part = cute.make_tensor(
                        acc.iterator + cute.crd2idx(((0, 0, chunk * 8), block, 0), acc.layout),
                        cute.make_layout((2, 2, 8), stride=(1, 2, 4)),
                    )
                    results = made_results(gemm)
                    change_chunk(gemm, part, buffers[None, None, None, slot], probs, sums, results, lane)
                    load_next_chunk(gemm, hidden, buffers, tile, chunks, index, state)
                    wait_result(result)
                    if cutlass.const_expr(result is not None):
                        store.write_chunk(results, result.buffer, gemm.out_element, lane)
                else:
                    clear_chunk(buffers[None, None, None, slot], result, lane)
                store_chunk(gemm, output.map, target, buffers[None, None, None, slot], result, row, column)
                state = next_slot(state)
                index += 1
        if cutlass.const_expr(hidden.sums is not None):
            write_sums(hidden.sums, sums, first_column, columns, config.tile_n, tile, row + lane // 4, lane)
    return state


def made_results(gemm) -> Any:
    """Return registers ``(2, 2, 8)`` for the activation values of a chunk, or None."""
    return cute.make_rmem_tensor((2, 2, 8), gemm.out_element) if gemm.result else None


def some(results: cute.Tensor | None, first: int, shape: tuple) -> cute.Tensor | None:
    """Return the part of ``results`` from number ``first`` on, in ``shape``."""
    return None if results is None else cute.make_tensor(results.iterator + first, cute.make_layout(shape))


@cute.jit
def change_chunk(
    gemm: cutlass.Constexpr,
    values: cute.Tensor,
    buffers: cute.Tensor,
    probs: Any,
    sums: cute.Tensor,
    results: Any,
    lane: Int32,
):
    """Replace the pre-activation in ``buffers [16, 64, parts]`` by its gradient.

    Args:
        values: float32 registers ``(2, 2, 8)`` of the accumulator.
        probs, sums: the values of the thread's two rows.
        results: see ``made_results``.
    """
    if cutlass.const_expr(gemm.gradient.interleaved):
        change_pairs(gemm, values, buffers, probs, sums, results, lane)
    else:
        change_matrices(gemm, values, buffers, probs, sums, results, lane)


@cute.jit
def change_matrices(
    gemm: cutlass.Constexpr,
    values: cute.Tensor,
    buffers: cute.Tensor,
    probs: Any,
    sums: cute.Tensor,
    results: Any,
    lane: Int32,
):
    """Handle halves in separate buffers: ldmatrix reads them in the accumulator's order."""
    element, spec, shape = gemm.out_element, gemm.gradient, (2, 2, 2)
    load = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 4), element)
    save = cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(False, 4), element)
    for pair in cutlass.range_constexpr(4):
        product = cute.make_rmem_tensor(shape, Float32)
        for i in cutlass.range_constexpr(8):
            product[i] = values[pair * 8 + i]
        packed, wide, places = [], [], []
        for part in cutlass.range_constexpr(gemm.parts):
            # Lanes 0-15 name the rows of the left 8 columns, lanes 16-31 those of the right.
            place = cute.local_tile(buffers[None, None, part], (1, 8), (lane % 16, 2 * pair + lane // 16))
            places.append(cute.make_tensor(place.iterator, (8, 1)))
            packed.append(cute.make_rmem_tensor(shape, element))
            cute.copy(load, places[part], cute.make_tensor(packed[part].iterator, (8, 1)))
            wide.append(cute.make_rmem_tensor(shape, Float32))
            wide[part].store(packed[part].load().to(Float32))
        linear = wide[1] if cutlass.const_expr(spec.gated) else None
        factors, totals, made = by_row(probs, shape), by_row(sums, shape), some(results, pair * 8, shape)
        differentiate(spec, wide[0], linear, rounded(product, element), factors, totals, made)
        for part in cutlass.range_constexpr(gemm.parts):
            packed[part].store(wide[part].load().to(element))
            cute.copy(save, cute.make_tensor(packed[part].iterator, (8, 1)), places[part])


def four(buffers: cute.Tensor, piece: int, half: int, lane: Int32) -> cute.Tensor:
    """Return the pre-activation of a thread's two columns of 8-column ``piece``, in row ``half`` of its two."""
    buffer = buffers[None, None, piece // 4]
    place = cute.local_tile(buffer, (1, 4), (lane // 4 + 8 * half, piece % 4 * 4 + lane % 4))
    return cute.make_tensor(place.iterator, 4)


@cute.jit
def change_pairs(
    gemm: cutlass.Constexpr,
    values: cute.Tensor,
    buffers: cute.Tensor,
    probs: Any,
    sums: cute.Tensor,
    results: Any,
    lane: Int32,
):
    """Handle interleaved halves: a thread's two neighbouring columns of the product are four of the pre-activation."""
    element, spec, shape = gemm.out_element, gemm.gradient, (2, 2)
    for piece in cutlass.range_constexpr(8):
        product = cute.make_rmem_tensor(shape, Float32)
        gate, linear = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        for half in cutlass.range_constexpr(2):
            held = cute.make_rmem_tensor(4, element)
            cute.autovec_copy(four(buffers, piece, half, lane), held)
            for i in cutlass.range_constexpr(2):
                product[i, half] = values[i, half, piece]
                gate[i, half], linear[i, half] = held[2 * i].to(Float32), held[2 * i + 1].to(Float32)
        factors, totals, made = by_row(probs, shape), by_row(sums, shape), some(results, piece * 4, shape)
        differentiate(spec, gate, linear, rounded(product, element), factors, totals, made)
        for half in cutlass.range_constexpr(2):
            held = cute.make_rmem_tensor(4, element)
            for i in cutlass.range_constexpr(2):
                held[2 * i], held[2 * i + 1] = gate[i, half].to(element), linear[i, half].to(element)
            cute.autovec_copy(held, four(buffers, piece, half, lane))
