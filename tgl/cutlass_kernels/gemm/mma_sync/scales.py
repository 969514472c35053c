"""Block scales that MMAs take themselves, from atoms in global memory to registers; see ``scheduler.scaled_operands``.

A stage has whole atoms of 128 rows x 4 scales, as in memory: those of a tile's rows, then those of its columns. Threads
copy them by 16 bytes, in the ``cp.async`` groups of the operands' lines. An MMA takes the scales of 16 rows from lanes
``4 (r % 8) + r // 8``, and those of 8 columns from lanes ``4 c``: one byte of E8M0 for 32 elements of 8 bits, a word of
four E4M3 for 64 elements of 4 bits. The other lanes read redundantly.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint8, cute

from ...config import VARLEN_M
from ...scheduler import Tile, ceil_div, quotient
from ...scheduler.problem import Problem
from ..copies import PIECE, STEPS, WORD, copy_piece
from ..operand_formats import ATOM_COLUMNS, ATOM_ROWS

ATOM = ATOM_ROWS * ATOM_COLUMNS  # bytes
PIECES = ATOM // PIECE  # of an atom


class ScaleSources(NamedTuple):
    """A thread's copies of the scales of the next k tile."""

    places: tuple[Int64, ...]  # in global memory
    left: tuple[Int32, ...]  # atoms along the depth from the piece's own on

    def none(self) -> "ScaleSources":
        """Return the sources with nothing to copy."""
        return self._replace(left=tuple(Int32(0) for _ in self.left))


class StepScales(NamedTuple):
    """A thread's scales of a step of the depth, for which there are two sets, and where they are in a stage."""

    rows: tuple[cute.Tensor, cute.Tensor]  # (M)
    columns: tuple[cute.Tensor, cute.Tensor]  # (N)
    a_place: Int32
    b_place: Int32


def across(gemm: Any) -> int:
    """Return the number of atoms side by side along the depth of a stage."""
    return gemm.config.tile_k // (gemm.form.vector * ATOM_COLUMNS)


def pieces_of_a(gemm: Any) -> int:
    """Return the number of pieces that scale the rows of a stage."""
    return gemm.config.tile_m // ATOM_ROWS * across(gemm) * PIECES


def indices(gemm: Any) -> list[Int32]:
    """Return which pieces of a stage a thread copies."""
    thread, _, _ = cute.arch.thread_idx()
    count = pieces_of_a(gemm) + gemm.config.tile_n // ATOM_ROWS * across(gemm) * PIECES
    return [thread + turn * gemm.threads for turn in range((count + gemm.threads - 1) // gemm.threads)]


@cute.jit
def begin_scales(
    gemm: cutlass.Constexpr, scales: tuple[cute.Tensor, cute.Tensor], tile: Tile, problem: Problem
) -> ScaleSources:
    """Return a thread's sources for a tile's first k tile; nothing is copied from outside the operands.

    Args:
        scales: of A and of B, bytes in global memory; one row of them for each group where B is matrices.
    """
    config, form = gemm.config, gemm.form
    a, b = scales[0].iterator.toint(), scales[1].iterator.toint()
    width = ceil_div(problem.depth, form.vector * ATOM_COLUMNS)  # atoms side by side
    first, last, above = Int32(0), width, quotient(tile.start, ATOM_ROWS) + tile.group
    rows, columns = ceil_div(tile.length, ATOM_ROWS), ceil_div(problem.columns, ATOM_ROWS)
    if cutlass.const_expr(gemm.kind == VARLEN_M):
        b += Int64(tile.group) * scales[1].stride[0]
    else:
        width, above = gemm.policy.places(problem), Int32(0)
        first = gemm.policy.first_place(tile)
        last = cutlass.min(first + ceil_div(tile.length, form.unit), width)
        rows = Int32(scales[0].shape[0]) // (width * ATOM)
    places: tuple = ()
    left: tuple = ()
    for index in indices(gemm):
        of_b = index - pieces_of_a(gemm)
        down, beside, piece = spot(gemm, index)
        down += tile.m * (config.tile_m // ATOM_ROWS)
        place, there = a + (Int64(above + down) * width + first + beside) * ATOM + piece * PIECE, last - first - beside
        if down >= rows:
            there = Int32(0)
        if of_b >= 0:
            down, beside, piece = spot(gemm, of_b)
            down += tile.n * (config.tile_n // ATOM_ROWS)
            place, there = b + (Int64(down) * width + first + beside) * ATOM + piece * PIECE, last - first - beside
            if down >= columns:
                there = Int32(0)
        places, left = (*places, place), (*left, there)
    return ScaleSources(places, left)


def spot(gemm: Any, index: Int32) -> tuple[Int32, Int32, Int32]:
    """Return the atom of an operand that a piece belongs to, down and across, and its number in there."""
    run = across(gemm) * PIECES
    return index // run, index % run // PIECES, index % PIECES


@cute.jit
def copy_scales(gemm: cutlass.Constexpr, sources: ScaleSources, stage: Int32) -> ScaleSources:
    """Start a thread's copies of the next k tile's scales to the stage at the address ``stage``."""
    atoms = (gemm.config.tile_m + gemm.config.tile_n) // ATOM_ROWS * across(gemm)
    target = stage + gemm.scales_at
    places: tuple = ()
    left: tuple = ()
    for i, index in enumerate(indices(gemm)):
        found = Int32(0)
        if sources.left[i] > 0:
            found = Int32(PIECE)
        copied = index < atoms * PIECES
        if copied:
            copy_piece(sources.places[i], target + index * PIECE, found)
        places = (*places, sources.places[i] + across(gemm) * ATOM)
        left = (*left, sources.left[i] - across(gemm))
    return ScaleSources(places, left)


def make_scales(gemm: Any) -> StepScales | None:
    """Return the scales of this warp, None where there are none."""
    if not gemm.scales_at:
        return None
    (height, width), warps = gemm.warp_tile, gemm.warps[1]
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    rows, columns = (tuple(cute.make_rmem_tensor(n, Int32) for _ in range(2)) for n in (height // 16, width // 8))
    a, b = gemm.scales_at, gemm.scales_at + pieces_of_a(gemm) * PIECE
    a_place = a + corner(gemm, warp // warps * height) + (lane // 4 + lane % 2 * 8) * PIECE
    return StepScales(rows, columns, a_place, b + corner(gemm, warp % warps * width) + lane // 4 * PIECE)


def corner(gemm: Any, first: Int32) -> Int32:
    """Return where the scales of rows from ``first`` on begin, a multiple of 32."""
    return first // ATOM_ROWS * (across(gemm) * ATOM) + first % ATOM_ROWS // 32 * WORD


def read_scales(gemm: Any, scales: Any, stage: Int32, step: Any, turn: int) -> None:
    """Load a thread's scales of a step of the depth from the stage at the address ``stage``."""
    if scales is None:
        return
    for values, place, each in ((scales.rows, scales.a_place, 16), (scales.columns, scales.b_place, 8)):
        at = stage + place + step * (ATOM if across(gemm) > 1 else 1)
        for i in range(cute.size(values[turn])):
            row = i * each
            values[turn][i] = load_scale(gemm, at + row % 32 * PIECE + row // 32 * WORD)


def load_scale(gemm: Any, address: Int32) -> Int32:
    """Return the scales of a row and a step: a byte, or a word of four."""
    element = Uint8 if gemm.form.tile_k // STEPS == gemm.form.vector else Int32
    place = cute.make_ptr(element, address, cute.AddressSpace.smem, assumed_align=element.width // 8)
    return Int32(cute.make_tensor(place, cute.make_layout(1))[0])
