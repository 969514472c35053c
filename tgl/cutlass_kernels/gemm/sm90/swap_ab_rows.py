"""Rows of A in ``swap_ab_kernel`` with the 16 elements of each MMA in an order that makes E2M1 cheaper to decode.

A lane multiplies four of B's elements per MMA, two pairs. In the order of memory the pairs lie 8 elements apart: two
reads of one byte, whose nibbles are spread apart one by one. In the order below the lane reads its four elements as two
neighbouring bytes, and a pair consists of the same nibble of both, so that one product moves both to their places.
Tensor cores of sm_90 add the products of one MMA before they round, so that sums have the same bits in any order of its
elements:

======================  =======================================
of lane ``q`` of four   elements of a step
======================  =======================================
first pair              ``4 q`` and ``4 q + 2``
second pair             ``4 q + 1`` and ``4 q + 3``
======================  =======================================
"""

import cutlass
from cutlass import Int32, Int64, cute

from ...config import LINE
from ...scheduler import Tile
from ..copies import PIECE
from .swap_ab_dequantize import STEP

PERMUTED_ROWS = 16  # at most: lanes that load must not take longer than they save those that decode
ATOM = 8  # rows of a swizzle
STEPS = 128 // ATOM  # of a stage: each lane of the load warps stores one of a row of 8
WORDS = STEP // 2  # of a step of A
STEPS_OF_LINE = LINE // STEP


def place_of(lane: Int32) -> tuple[Int32, Int32]:
    """Return a lane's first row in a stage, and the number of its step."""
    return lane % ATOM, lane // ATOM


@cute.jit
def read_step(
    gemm: cutlass.Constexpr, rows: cute.Tensor, tile: Tile, lane: Int32, k: Int32, turn: cutlass.Constexpr
) -> cute.Tensor:
    """Return a lane's step of stage ``k``, of a row of the 8 of ``turn``; zeros past the end of the contraction."""
    row, step = place_of(lane)
    found = cute.make_rmem_tensor(WORDS, Int32)
    found.fill(Int32(0))
    along = k * gemm.config.tile_k + step * STEP
    if along < rows.shape[1]:
        line = cutlass.min(tile.start + tile.m * gemm.config.tile_m + turn * ATOM + row, rows.shape[0] - 1)
        source = rows.iterator.toint() + (Int64(line) * rows.stride[0] + along) * 2
        place = cute.make_ptr(Int32, source, cute.AddressSpace.gmem, assumed_align=PIECE)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(WORDS)), found)
    return found


@cute.jit
def write_step(
    gemm: cutlass.Constexpr, words: cute.Tensor, buffers: Int32, lane: Int32, stage: Int32, turn: cutlass.Constexpr
):
    """Store a lane's step to a stage in shared memory, in the order of the module's table and a 128-byte swizzle."""
    row, step = place_of(lane)
    line = (gemm.lines * stage + step // STEPS_OF_LINE) * gemm.config.tile_m + turn * ATOM + row
    for half in cutlass.range_constexpr(2):
        chosen = cute.make_rmem_tensor(WORDS // 2, Int32)
        for q in cutlass.range_constexpr(WORDS // 2):
            chosen[q] = Int32(cute.arch.prmt(words[2 * q], words[2 * q + 1], (0x5410, 0x7632)[half]))
        target = buffers + line * (2 * LINE) + ((step % STEPS_OF_LINE * 2 + half) ^ row) * PIECE
        place = cute.make_ptr(Int32, target, cute.AddressSpace.smem, assumed_align=PIECE)
        cute.autovec_copy(chosen, cute.make_tensor(place, cute.make_layout(WORDS // 2)))
