"""Store accumulators: epilogue arithmetic, rounding, staging, TMA store.

A warp holds 16 rows of every 64 of its warpgroup, and works through them in chunks of 16 rows x 128 bytes (64 where a
tile's halves are not whole lines): register ``(e, h, j)`` of lane ``l`` is row ``l / 4 + 8 h`` and column
``8 j + 2 (l % 4) + e``. A chunk is staged in shared memory with the 128-byte swizzle (16-byte piece ``p`` of row ``r``
at ``p ^ r % 8``), which keeps the register stores free of bank conflicts and is what the tensor map expects. The
buffers of a warp alternate: one fills while the stores of the others read. No warp waits for another.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from ...config import VARLEN_M, GemmConfig
from ...epilogue.vectors import TileVectors, add_bias, add_old, scale_lines
from ...scheduler import Tile
from .tilings import MMA_ROWS

CHUNK_ROWS = 16
LINE_BYTES = 128
TIGHT = 128 * 192  # elements of a warpgroup's own tile from which shared memory is short


class OutputTarget(NamedTuple):
    """Destination of results, and how they are stored."""

    map: cute.CopyAtom | None  # TMA store, plain or reducing; None if only an activation is stored
    coords: cute.Tensor | None  # the coordinate tensor of the map
    buffers: cute.Tensor  # shared memory [16, columns of a chunk, buffers of every warp]
    values: cute.Tensor | None  # the output in global memory if it is read
    second: Any = None  # (map, coordinate tensor) of the activation's output


def staging(config: GemmConfig, gated: bool) -> tuple[int, int]:
    """Return bytes of a row that a chunk holds, and chunks that a warp stages.

    Two chunks of whole lines, or half of that where the ring needs the space: one chunk, or, if a tile has halves, two
    of half a line, since a thread holds a chunk of both halves in registers. Halves shorter than a line are one chunk,
    and those that end in the middle of a line have chunks of half a line.
    """
    part = config.tile_n // (2 if gated else 1) * 2
    if part < LINE_BYTES:
        return part, 2
    tight = config.pingpong and config.tile_m * config.tile_n >= TIGHT
    if part % LINE_BYTES or (tight and gated):
        return LINE_BYTES // 2, 2
    return LINE_BYTES, 1 if tight else 2


def chunk_layout(element: type[cutlass.Numeric], chunk: tuple[int, int], count: int) -> cute.ComposedLayout:
    """Return the shared-memory layout of ``count`` chunks, ``[16, columns, count]``."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {LINE_BYTES: kinds.K_SW128, LINE_BYTES // 2: kinds.K_SW64}.get(chunk[1] * element.width // 8)
    if kind is None:  # no swizzle fits such rows
        rows, columns = chunk
        plain = cute.make_layout((rows, columns, count), stride=(columns, 1, rows * columns))
        return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, plain)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, element), (*chunk, count), order=(0, 1, 2))


@cute.jit
def write_chunk(values: cute.Tensor, buffer: cute.Tensor, element: cutlass.Constexpr, lane: Int32):
    """Round a chunk's registers and write them to ``buffer [64, columns]``.

    Args:
        values: ``(2, 2, columns / 8)``, float32 or rounded already.
        buffer: shared memory, swizzled.
        element: dtype of the output.
        lane: index in the warp.
    """
    pieces = cute.size(values, mode=[2])
    if cutlass.const_expr(element.width == 16):
        # One stmatrix stores 16 x 16: lanes 0-15 address the rows of the left 8 columns, lanes 16-31 those of the
        # right.
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), element)
        row = lane % 16
        for pair in cutlass.range_constexpr(pieces // 2):
            packed = cute.make_rmem_tensor((2, 2, 2), element)
            for i in cutlass.range_constexpr(8):
                packed[i] = values[pair * 8 + i].to(element)
            target = cute.local_tile(buffer, (1, 8), (row, 2 * pair + lane // 16))
            cute.copy(atom, cute.make_tensor(packed.iterator, (8, 1)), cute.make_tensor(target.iterator, (8, 1)))
    else:
        row = lane // 4
        for piece in cutlass.range_constexpr(pieces):
            for half in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(2, element)
                for i in cutlass.range_constexpr(2):
                    pair[i] = values[i, half, piece].to(element)
                target = cute.local_tile(buffer, (1, 2), (row + 8 * half, 4 * piece + lane % 4))
                cute.autovec_copy(pair, cute.make_tensor(target.iterator, 2))


@cute.jit
def add_vectors(values: cute.Tensor, vectors: TileVectors, row: Int32, column: Int32, product: cutlass.Boolean):
    """Add ``bias * scale`` to a thread's registers of a chunk, the first at ``(row, column)`` of the tile.

    Where the tile is no ``product``, the vectors hold another tile's values and nothing is added. Registers are
    selected, because behind branches the assembler turns TMA instructions into loops over lanes.
    """
    shape = values.shape
    plain = cute.make_rmem_tensor(shape, Float32)
    plain.store(values.load())
    bias = cute.make_tensor(vectors.bias.iterator + column, cute.make_layout(shape, stride=(1, 0, 8)))
    scale = None
    if cutlass.const_expr(vectors.bias_scale is not None):
        scale = cute.make_tensor(vectors.bias_scale.iterator + row, cute.make_layout(shape, stride=(0, 8, 0)))
    add_bias(values, bias, scale)
    for i in cutlass.range_constexpr(cute.size(shape)):
        values[i] = cutlass.select_(product, values[i], plain[i])


@cute.jit
def scale_chunk(values: cute.Tensor, vectors: TileVectors, row: Int32, column: Int32):
    """Multiply a thread's registers of a chunk, the first at ``(row, column)`` of the tile, by its factors."""
    shape = values.shape
    rows = cute.make_tensor(vectors.a_factor.iterator + row, cute.make_layout(shape, stride=(0, 8, 0)))
    columns = cute.make_tensor(vectors.b_factor.iterator + column, cute.make_layout(shape, stride=(1, 0, 8)))
    scale_lines(values, rows, columns)


@cute.jit
def store_tile(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    output: OutputTarget,
    vectors: TileVectors,
    factor: Float32,
    tile: Tile,
    first_column: Int32,
    product: cutlass.Boolean,
    which: Int32,
    thread: Int32,
    turn: Int32,
) -> Int32:
    """Apply the epilogue and store one warpgroup's rows of a tile; return the next turn of the buffers.

    Args:
        gemm: the GEMM kernel.
        acc: float32 registers ``((2, 2, N / 8), M, 1)``.
        output: destination of results.
        vectors: bias, row scale and factors of the tile.
        factor: alpha of its group.
        tile: the tile.
        first_column: where this CTA's part of it begins.
        product: whether the tile belongs to a group; the tail has no bias.
        which: index of the warpgroup.
        thread: index in the warpgroup.
        turn: buffer to begin with. A tile may have an odd number of chunks, so the next one may begin with another
            buffer.
    """
    config, element = gemm.config, gemm.out_element
    columns = gemm.chunk[1]
    pieces = columns // 8
    target = gemm.policy.out(output.coords, tile)
    height = tile.length if gemm.policy.kind == VARLEN_M else Int32(target.shape[0])
    warp = cute.arch.make_warp_uniform(thread // 32)
    lane = thread % 32
    thread_row, thread_column = lane // 4, lane % 4 * 2
    for block in cutlass.range_constexpr(cute.size(acc, mode=[1])):
        first_row = (block * gemm.sharing + which % gemm.sharing) * MMA_ROWS + warp * CHUNK_ROWS
        row = tile.m * config.tile_m + first_row
        for chunk in cutlass.range_constexpr(config.tile_n // columns):
            column = first_column + chunk * columns
            values = cute.make_rmem_tensor((2, 2, pieces), Float32)
            for i in cutlass.range_constexpr(4 * pieces):
                values[i] = acc[(i % 2, i // 2 % 2, chunk * pieces + i // 4), block, 0]
            if cutlass.const_expr(gemm.spec.group_factor):
                values.store(values.load() * factor)
            if cutlass.const_expr(gemm.spec.line_factors):  # noqa: SIM102 - the first is decided while tracing
                if product:  # otherwise the vectors hold another tile's values
                    scale_chunk(values, vectors, first_row + thread_row, chunk * columns + thread_column)
            if cutlass.const_expr(gemm.spec.bias):
                add_vectors(values, vectors, first_row + thread_row, chunk * columns + thread_column, product)
            if cutlass.const_expr(gemm.spec.reads_output):
                old = gemm.policy.old(output.values, tile)
                add_old(values, old, row + thread_row, column + thread_column)
            buffer = next_buffer(gemm, output, which * 4 + warp, turn)
            turn = (turn + 1) % gemm.buffers
            write_chunk(values, buffer, element, lane)
            send_chunk(output.map, buffer, target, row, column, height, gemm.spec.reduces)
    return turn


def next_buffer(gemm: Any, output: OutputTarget, warp: Int32, turn: Int32) -> cute.Tensor:
    """Return the next buffer, once no store reads it any more."""
    with cute.arch.elect_one():  # the lane that issues the stores must be the one that waits for them
        # Only the newest stores may still read: the one before them read this buffer.
        cute.arch.cp_async_bulk_wait_group(gemm.buffers - 1, read=True)
    cute.arch.sync_warp()
    return output.buffers[None, None, warp * gemm.buffers + turn]


@cute.jit
def send_chunk(
    store: cute.CopyAtom,
    buffer: cute.Tensor,
    target: cute.Tensor,
    row: Int32,
    column: Int32,
    height: Int32,
    adds: cutlass.Constexpr,
):
    """Store a warp's ``buffer`` at ``(row, column)`` of ``target``, of which only ``height`` rows are stored.

    The tensor map alone would drop what is out of bounds; chunks wholly outside need not be issued.
    """
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    chunk = cute.size(buffer, mode=[0]), cute.size(buffer, mode=[1])
    part = cute.local_tile(cute.domain_offset((row, column), target), chunk, (0, 0))
    source, sink = cpasync.tma_partition(
        store, 0, cute.make_layout(1), cute.group_modes(buffer, 0, 2), cute.group_modes(part, 0, 2)
    )
    if row < height and column < Int32(target.shape[1]):
        issue(store, source, sink, adds)
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def issue(store: cute.CopyAtom, source: cute.Tensor, sink: cute.Tensor, adds: cutlass.Constexpr):
    """Store by one lane. The reducing store elects it itself, and an election by one lane would never end."""
    if cutlass.const_expr(adds):
        cute.copy(store, source, sink)
    else:
        with cute.arch.elect_one():
            cute.copy(store, source, sink)
