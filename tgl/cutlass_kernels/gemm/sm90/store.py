"""From accumulator registers to memory: epilogue arithmetic, rounding, staging, TMA store.

A warpgroup works through its rows in chunks of 64 rows x 128 bytes. Register ``(e, h, j)`` of thread ``t`` holds row
``16 (t / 32) + t % 32 / 4 + 8 h`` and column ``8 j + 2 (t % 4) + e`` of its 64 rows. A chunk is staged in shared memory
with the 128-byte swizzle (16-byte piece ``p`` of row ``r`` at ``p ^ r % 8``), which both keeps the register stores free
of bank conflicts and is what the tensor map expects. Two buffers per warpgroup alternate: one fills while the store of
the other reads.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

CHUNK_ROWS = 64
CHUNK_BYTES = 128
BUFFERS = 2


class Output(NamedTuple):
    """Where results go, and on which way."""

    atom: cute.CopyAtom  # TMA store, plain or adding
    target: cute.Tensor  # coordinates: ragged [rows, columns, shift, start], or [rows, columns, groups]
    staging: cute.Tensor  # shared memory [64, columns of a chunk, buffers of all warpgroups]
    out: cute.Tensor  # global memory


def chunk_columns(element: type[cutlass.Numeric]) -> int:
    """Columns of a chunk."""
    return CHUNK_BYTES * 8 // element.width


def staging_bytes(warpgroups: int) -> int:
    """Shared memory for the chunks of all warpgroups."""
    return warpgroups * BUFFERS * CHUNK_ROWS * CHUNK_BYTES


def chunk_layout(element: type[cutlass.Numeric], count: int) -> cute.ComposedLayout:
    """Shared-memory layout of ``count`` chunks, ``[64, columns, count]``."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element)
    return cute.tile_to_shape(atom, (CHUNK_ROWS, chunk_columns(element), count), order=(0, 1, 2))


@cute.jit
def stage_chunk(values: cute.Tensor, buffer: cute.Tensor, element: cutlass.Constexpr, thread: Int32):
    """Round a chunk's registers and write them to ``buffer [64, columns]``.

    Args:
        values: float32 ``(2, 2, columns / 8)``.
        buffer: shared memory, swizzled.
        element: dtype of the output.
        thread: index in the warpgroup.
    """
    lane = thread % 32
    first_row = thread // 32 * 16
    pieces = cute.size(values, mode=[2])
    if cutlass.const_expr(element.width == 16):
        # One stmatrix stores 16 x 16: lanes 0-15 name the rows of the left 8 columns, lanes 16-31 those of the right.
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), element)
        row = first_row + lane % 16
        for pair in cutlass.range_constexpr(pieces // 2):
            packed = cute.make_rmem_tensor((2, 2, 2), element)
            for i in cutlass.range_constexpr(8):
                packed[i] = values[pair * 8 + i].to(element)
            target = cute.local_tile(buffer, (1, 8), (row, 2 * pair + lane // 16))
            cute.copy(atom, cute.make_tensor(packed.iterator, (8, 1)), cute.make_tensor(target.iterator, (8, 1)))
    else:
        row = first_row + lane // 4
        for piece in cutlass.range_constexpr(pieces):
            for half in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(2, element)
                for i in cutlass.range_constexpr(2):
                    pair[i] = values[i, half, piece].to(element)
                target = cute.local_tile(buffer, (1, 2), (row + 8 * half, 4 * piece + lane % 4))
                cute.autovec_copy(pair, cute.make_tensor(target.iterator, 2))


@cute.jit
def add_old(values: cute.Tensor, out: cute.Tensor, row: Int32, column: Int32, rows: Int32, columns: Int32):
    """``values += out`` for accumulation into 16 bits, which must be rounded after the sum and not before.

    Args:
        values: float32 ``(2, 2, columns / 8)``.
        out: this group's ``[M, N]`` in global memory.
        row, column: the thread's first element there.
        rows, columns: M and N; nothing beyond is read. N is even, so a pair is inside or outside as a whole.
    """
    for half in cutlass.range_constexpr(2):
        base = out.iterator + (Int64(row + 8 * half) * out.stride[0] + column)
        for piece in cutlass.range_constexpr(cute.size(values, mode=[2])):
            if row + 8 * half < rows and column + 8 * piece < columns:
                pair = cute.make_rmem_tensor(2, out.element_type)
                source = (base + 8 * piece).align(4)
                cute.autovec_copy(cute.make_tensor(source, 2), pair)
                for i in cutlass.range_constexpr(2):
                    values[i, half, piece] += pair[i].to(Float32)


@cute.jit
def store_chunk(
    atom: cute.CopyAtom, buffer: cute.Tensor, target: cute.Tensor, row: Int32, column: Int32, rest: cutlass.Constexpr
):
    """Store one staged chunk to ``(row, column)`` of ``target`` by TMA; one warp calls it.

    Args:
        atom: TMA store, plain or adding.
        buffer: shared memory ``[64, columns]``.
        target: coordinates ``[rows, columns, ...]``, moved so that the modes behind the first two are at 0.
        row, column: where; what lies beyond the bounds of the tensor map is not stored.
        rest: how many modes ``target`` has behind the first two.
    """
    moved = cute.domain_offset((row, column, *([0] * rest)), target)
    tile = cute.local_tile(moved[(None, None, *([0] * rest))], buffer.shape, (0, 0))
    source, sink = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(buffer, 0, 2), cute.group_modes(tile, 0, 2)
    )
    cute.copy(atom, source, sink)
