"""From accumulator registers to memory where the result is symmetric; the counterpart of ``store``.

A warp stages a chunk of 16 rows x 64 columns as other kernels do, and behind it, where the tile lies below the
diagonal, its transpose: 64 rows x 16 columns, of 32 bytes each, in a buffer of the same size whose swizzle is that of
such rows. ``stmatrix`` transposes, and a map of its own stores. Both come of one rounding, so the result is symmetric;
on the diagonal it is as its products are, whose factors an MMA may take in either order.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warp, warpgroup

from ...tiles import Tile
from . import store
from .tilings import MMA_ROWS


class Terms(NamedTuple):
    """Of ``alpha x x^T + beta c``; ``c`` is None where nothing is added."""

    alpha: Float32
    beta: Float32
    c: Any  # [M, M, G]


def mirror_layout(gemm: Any, count: int) -> cute.ComposedLayout:
    """Shared-memory layout of ``count`` transposed chunks, ``[64, 16, count]``."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, gemm.out_element)
    rows, columns = gemm.chunk
    return cute.tile_to_shape(atom, (columns, rows, count), order=(0, 1, 2))


@cute.jit
def store_symmetric(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    output: store.Output,
    terms: Terms,
    tile: Tile,
    turn: Int32,
) -> Int32:
    """``store.store_tile`` for a tile that is stored twice where it lies below the diagonal.

    What ``c`` adds to a chunk is asked for before the chunk in front of it is stored.
    """
    config, element = gemm.config, gemm.out_element
    columns = gemm.chunk[1]
    layout = mirror_layout(gemm, 4 * gemm.warpgroups * gemm.buffers)
    mirrors = cute.make_tensor(cute.recast_ptr(output.buffers.iterator, layout.inner), layout.outer)
    second_map, second_coords = output.second
    target, mirrored = gemm.policy.out(output.coords, tile), gemm.policy.out(second_coords, tile)
    size = Int32(target.shape[0])
    across = config.tile_n // columns
    blocks = cute.size(acc, mode=[1])
    thread, _, _ = cute.arch.thread_idx()
    which = cute.arch.make_warp_uniform(thread // 128)
    warp_index = cute.arch.make_warp_uniform(thread // 32)
    lane = thread % 32
    first_column = tile.n * config.tile_n
    top = tile.m * config.tile_m + which % gemm.sharing * MMA_ROWS + warp_index % 4 * store.CHUNK_ROWS
    below = gemm.policy.below(top, first_column)
    added: Any = None
    if cutlass.const_expr(terms.c is not None):
        added = terms.c[None, None, tile.group]
        coming = cute.make_rmem_tensor((2, 2, columns // 8), element)
        load_chunk(coming, added, top, first_column, lane)
    for chunk in cutlass.range_constexpr(blocks * across):
        block, part = chunk // across, chunk % across
        row, column = top + block * gemm.sharing * MMA_ROWS, first_column + part * columns
        values = cute.make_rmem_tensor((2, 2, columns // 8), Float32)
        for i in cutlass.range_constexpr(columns // 2):
            values[i] = acc[(i % 2, i // 2 % 2, part * columns // 8 + i // 4), block, 0]
        values.store(values.load() * terms.alpha)
        if cutlass.const_expr(terms.c is not None):
            values.store(values.load() + coming.load().to(Float32) * terms.beta)
            if cutlass.const_expr(chunk + 1 < blocks * across):
                next_row = top + (chunk + 1) // across * gemm.sharing * MMA_ROWS
                load_chunk(coming, added, next_row, first_column + (chunk + 1) % across * columns, lane)
        rounded = cute.make_rmem_tensor((2, 2, columns // 8), element)
        rounded.store(values.load().to(element))
        buffer = store.next_buffer(gemm, output, warp_index, turn)
        turn = (turn + 1) % gemm.buffers
        store.write_chunk(rounded, buffer, element, lane)
        store.send_chunk(output.map, buffer, target, row, column, size, False)
        if below:
            store.next_buffer(gemm, output, warp_index, turn)
            mirror = mirrors[None, None, warp_index * gemm.buffers + turn]
            turn = (turn + 1) % gemm.buffers
            write_mirror(rounded, mirror, element, lane)
            store.send_chunk(second_map, mirror, mirrored, column, row, size, False)
    return turn


@cute.jit
def write_mirror(rounded: cute.Tensor, mirror: cute.Tensor, element: cutlass.Constexpr, lane: Int32):
    """Write a chunk's registers transposed.

    Args:
        rounded: ``(2, 2, columns / 8)``.
        mirror: shared memory ``[columns, 16]``, swizzled.
        lane: index in the warp.
    """
    # One stmatrix stores four matrices of 8 x 8: the upper and the lower rows of 8 columns, then of the next 8. Each
    # lane names a row of one as it lies transposed, which is a column of the chunk.
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), element)
    row = lane // 16 * 8 + lane % 8
    for pair in cutlass.range_constexpr(cute.size(rounded, mode=[2]) // 2):
        packed = cute.make_rmem_tensor((2, 2, 2), element)
        for i in cutlass.range_constexpr(8):
            packed[i] = rounded[pair * 8 + i]
        target = cute.local_tile(mirror, (1, 8), (pair * 16 + row, lane // 8 % 2))
        cute.copy(atom, cute.make_tensor(packed.iterator, (8, 1)), cute.make_tensor(target.iterator, (8, 1)))


@cute.jit
def load_chunk(held: cute.Tensor, matrix: cute.Tensor, row: Int32, column: Int32, lane: Int32):
    """A thread's elements of a chunk of ``matrix`` whose first element is at ``(row, column)``.

    In place of what lies beyond the matrix it is something of its edge, whose sums are not stored: without branches,
    all loads are on their way at once.

    Args:
        held: registers ``(2, 2, columns / 8)``.
        matrix: global memory, row-major, of whole pieces of 8 columns.
    """
    element = matrix.element_type
    # As a lane's own: taken with that of the stores, these would be loops over lanes.
    column, own = cute.arch.shuffle_sync(column, 0), lane % 4 * 2
    last_row, last = Int32(matrix.shape[0]) - 1, Int32(matrix.shape[1]) - 8 + own
    for half in cutlass.range_constexpr(2):
        down = cutlass.min(row + lane // 4 + 8 * half, last_row)
        base = matrix.iterator + Int64(down) * matrix.stride[0]
        for piece in cutlass.range_constexpr(cute.size(held, mode=[2])):
            place = (base + cutlass.min(column + own + 8 * piece, last)).align(element.width // 4)
            pair = cute.make_rmem_tensor(2, element)
            cute.autovec_copy(cute.make_tensor(place, cute.make_layout(2)), pair)
            for i in cutlass.range_constexpr(2):
                held[i, half, piece] = pair[i]
