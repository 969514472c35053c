"""Store accumulators of a symmetric result, each tile twice; the counterpart of ``store``.

A warp stages a chunk of 16 rows x 64 columns as other kernels do. If the tile is below the diagonal, it then stages the
transpose: 64 rows x 16 columns, of 32 bytes each, in a buffer of the same size with the swizzle of such rows.
``stmatrix`` transposes, and a second tensor map stores. Both come from one rounding, so the result is symmetric; on the
diagonal it is as symmetric as its products, whose factors an MMA may take in either order.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warp, warpgroup

from ...scheduler import Tile
from . import store
from .tilings import MMA_ROWS


class Terms(NamedTuple):
    """Operands of ``alpha x x^T + beta c``; ``c`` is None where nothing is added."""

    alpha: Float32
    beta: Float32
    c: Any  # [M, M, G]


def mirror_layout(gemm: Any, count: int) -> cute.ComposedLayout:
    """Return the shared-memory layout of ``count`` transposed chunks, ``[64, 16, count]``."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, gemm.out_element)
    rows, columns = gemm.chunk
    return cute.tile_to_shape(atom, (columns, rows, count), order=(0, 1, 2))


@cute.jit
def corner(gemm: cutlass.Constexpr, tile: Tile) -> tuple[Int32, Int32]:
    """Return the first row and column of a warp's part of a tile."""
    thread, _, _ = cute.arch.thread_idx()
    member = cute.arch.make_warp_uniform(thread // 128) % gemm.sharing
    down = member * MMA_ROWS + cute.arch.make_warp_uniform(thread // 32) % 4 * store.CHUNK_ROWS
    return tile.m * gemm.config.tile_m + down, tile.n * gemm.config.tile_n


def across(gemm: Any) -> int:
    """Return the number of chunks side by side in a tile."""
    return int(gemm.config.tile_n // gemm.chunk[1])


@cute.jit
def load_added(gemm: cutlass.Constexpr, terms: Terms, tile: Tile) -> tuple:
    """Return the part of ``c`` for each of a warp's chunks, loaded before the tile is multiplied; () without ``c``."""
    if cutlass.const_expr(terms.c is None):
        return ()
    row, column = corner(gemm, tile)
    thread, _, _ = cute.arch.thread_idx()
    count = gemm.config.tile_m // (gemm.sharing * MMA_ROWS) * across(gemm)
    held = tuple(cute.make_rmem_tensor((8, 4), gemm.out_element) for _ in range(count))
    for chunk in cutlass.range_constexpr(count):
        at = row + chunk // across(gemm) * gemm.sharing * MMA_ROWS, column + chunk % across(gemm) * gemm.chunk[1]
        load_chunk(held[chunk], terms.c[None, None, tile.group], *at, thread % 32)
    return held


@cute.jit
def store_symmetric(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    output: store.OutputTarget,
    terms: Terms,
    tile: Tile,
    held: tuple,
    turn: Int32,
) -> Int32:
    """Store a tile as ``store.store_tile`` does, and its mirror image if it is below the diagonal.

    Args:
        held: result of ``load_added``.
    """
    element, columns, width = gemm.out_element, gemm.chunk[1], across(gemm)
    layout = mirror_layout(gemm, 4 * gemm.warpgroups * gemm.buffers)
    mirrors = cute.make_tensor(cute.recast_ptr(output.buffers.iterator, layout.inner), layout.outer)
    second_map, second_coords = output.second
    target, mirrored = gemm.policy.out(output.coords, tile), gemm.policy.out(second_coords, tile)
    size = Int32(target.shape[0])
    chunks = cute.size(acc, mode=[1]) * width
    thread, _, _ = cute.arch.thread_idx()
    warp_index = cute.arch.make_warp_uniform(thread // 32)
    lane = thread % 32
    top, first_column = corner(gemm, tile)
    below = gemm.policy.below(top, first_column)
    for chunk in cutlass.range_constexpr(chunks):
        block, part = chunk // width, chunk % width
        row, column = top + block * gemm.sharing * MMA_ROWS, first_column + part * columns
        buffer = store.next_buffer(gemm, output, warp_index, turn)
        turn = (turn + 1) % gemm.buffers
        values = cute.make_rmem_tensor((2, 2, columns // 8), Float32)
        for i in cutlass.range_constexpr(columns // 2):
            values[i] = acc[(i % 2, i // 2 % 2, part * columns // 8 + i // 4), block, 0]
        values.store(values.load() * terms.alpha)
        if cutlass.const_expr(terms.c is not None):
            values.store(values.load() + spread(held[chunk], buffer, lane).load().to(Float32) * terms.beta)
        rounded = cute.make_rmem_tensor((2, 2, columns // 8), element)
        rounded.store(values.load().to(element))
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
    # lane addresses a row of one transposed matrix, which is a column of the chunk.
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
    """Load a warp's part of ``matrix`` whose first element is at ``(row, column)``, a line of 128 bytes per 8 lanes.

    Addresses beyond the matrix are clamped to its edge; those sums are not stored. Without branches, all loads are in
    flight at once.

    Args:
        held: registers ``(8, 4)``: pieces of 8 columns, of every fourth row.
        matrix: global memory, row-major, of whole pieces.
    """
    # A lane's own copy: with the value that the stores use, the stores would become loops over lanes.
    column = cute.arch.shuffle_sync(column, 0)
    last_row, last_piece = Int32(matrix.shape[0]) - 1, Int32(matrix.shape[1]) - 8
    piece = cutlass.min(column + lane % 8 * 8, last_piece)
    for i in cutlass.range_constexpr(4):
        down = cutlass.min(row + lane // 8 + 4 * i, last_row)
        place = (matrix.iterator + (Int64(down) * matrix.stride[0] + piece)).align(16)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(8)), held[None, i])


@cute.jit
def spread(held: cute.Tensor, buffer: cute.Tensor, lane: Int32) -> cute.Tensor:
    """Return the values of ``load_chunk`` in the layout of accumulators ``(2, 2, columns / 8)``, via a free buffer."""
    element = held.element_type
    for i in cutlass.range_constexpr(4):
        target = cute.local_tile(buffer, (1, 8), (lane // 8 + 4 * i, lane % 8))
        cute.autovec_copy(held[None, i], cute.make_tensor(target.iterator, 8))
    cute.arch.sync_warp()
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), element)
    columns = cute.size(buffer, mode=[1])
    found = cute.make_rmem_tensor((2, 2, columns // 8), element)
    for pair in cutlass.range_constexpr(columns // 16):
        source = cute.local_tile(buffer, (1, 8), (lane % 16, 2 * pair + lane // 16))
        part = cute.make_rmem_tensor((2, 2, 2), element)
        cute.copy(atom, cute.make_tensor(source.iterator, (8, 1)), cute.make_tensor(part.iterator, (8, 1)))
        for i in cutlass.range_constexpr(8):
            found[pair * 8 + i] = part[i]
    return found
