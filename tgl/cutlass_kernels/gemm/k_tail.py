"""Clear the K tail: a neighbour's elements in a stage of an operand that is contiguous along the contraction.

A tensor map reads from multiples of 16 bytes along its contiguous dimension and ends where the operand ends, not where
a group does. So the first stage of a group begins up to 15 bytes before it, and its last MMA reads up to 31 bytes past
it. These bytes belong to a neighbour, whose NaN a zero in the other operand would not stop: they are overwritten by
zeros in both operands, in shared memory, before they are multiplied.

Stages are rows of 128 bytes with the 128-byte swizzle: 16-byte piece ``p`` of row ``r`` is at ``p ^ r % 8``.
"""

import cutlass
from cutlass import Int32, cute

from .copies import LINE, PIECE

STEP = 32  # bytes along the contraction of one MMA


@cute.jit
def is_cut(before: Int32, end: Int32) -> cutlass.Boolean:
    """Return whether MMAs would read other bytes of a stage than ``[before, end)``, which are the group's."""
    return before > 0 or end % STEP > 0


@cute.jit
def clear_edges(
    stage: Int32, rows: cutlass.Constexpr, before: Int32, end: Int32, thread: Int32, threads: cutlass.Constexpr
):
    """Clear the bytes before ``before`` and, up to the end of the MMA, from ``end`` on; ``threads`` threads call it.

    The writes are fenced for MMAs, which are issued once all threads have synchronised.

    Args:
        stage: address in shared memory.
        rows: rows of the stage.
        before: less than a piece.
    """
    for i in cutlass.range_constexpr((rows + threads - 1) // threads):
        row = thread + i * threads
        line, turn = stage + row * LINE, row % 8
        if row < rows:
            if before > 0:
                _keep(line + turn * PIECE, before, PIECE)
            if end % STEP > 0:
                piece = end // PIECE
                _keep(line + (piece ^ turn) * PIECE, 0, end % PIECE)
                if piece % 2 == 0:
                    _keep(line + ((piece + 1) ^ turn) * PIECE, 0, 0)
    cute.arch.fence_view_async_shared()


@cute.jit
def clear_start(stage: Int32, rows: cutlass.Constexpr, before: Int32, thread: Int32, threads: cutlass.Constexpr):
    """Clear the bytes before ``before``, as ``clear_edges`` does, without a fence.

    This is enough where everything past the end of a group is filled up with zeros instead of copied.
    """
    for i in cutlass.range_constexpr((rows + threads - 1) // threads):
        row = thread + i * threads
        if row < rows:
            _keep(stage + row * LINE + row % 8 * PIECE, before, PIECE)


def _keep(address: Int32, first: Int32 | int, end: Int32 | int):
    """Clear a piece except for the bytes ``[first, end)``."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=PIECE)
    piece, words = cute.make_tensor(pointer, cute.make_layout(4)), cute.make_rmem_tensor(4, Int32)
    cute.autovec_copy(piece, words)
    for i in range(4):
        words[i] = words[i] & (_lower(end - 4 * i) & ~_lower(first - 4 * i))
    cute.autovec_copy(words, piece)


def _lower(count: Int32 | int) -> Int32 | int:
    """Return a word whose lowest ``count`` bytes, of 4, have all bits set."""
    if isinstance(count, int):
        return -1 if count >= 4 else (1 << 8 * max(count, 0)) - 1
    half = cutlass.max(cutlass.min(count, Int32(4)), Int32(0)) * 4
    return ((Int32(1) << half) << half) - 1
