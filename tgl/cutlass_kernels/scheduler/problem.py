"""The problem kinds varlen_m and varlen_k as kernels see them: which tiles there are, and the matrices of one tile.

A mainloop works on one group at a time as on an ordinary product ``[rows, depth] x [columns, depth]^T``. A problem kind
maps the tensors of an op to such matrices; everything else is shared.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from ..config import VARLEN_K, VARLEN_M
from .group_sort import BYTES as ORDER_BYTES
from .group_sort import Order, allocate_order, sort_groups
from .groups import clamp, slot_of
from .lpt import BYTES as DEAL_BYTES
from .lpt import allocate_deal, deal_tiles, dealt
from .ragged import ragged_coord, ragged_tensor
from .swizzle import ceil_div
from .tile_lookup import GroupSearch, Tile, TileGrid, exact_tile, find_tile, start_search


class Problem(NamedTuple):
    """Sizes that a kernel needs at run time.

    ``rows`` is T; ``depth`` the contraction where all groups share it; ``columns`` N; ``tiles_m`` and ``tiles_n`` the
    tiles of one group's output (``tiles_m`` where all groups share it). ``order`` and ``deal`` belong to the tile order
    of ``VarlenK`` and are in shared memory: the order of the groups, and the tiles of a cluster. ``slots`` is the table
    that says which of the ``matrices`` each group has; None: group g has matrix g. ``begin`` is the row offset of the
    first group, int32 ``[1]``, where groups are rows; None: row 0.
    """

    offs: cute.Tensor
    rows: Int32
    depth: Int32
    columns: Int32
    tiles_m: Int32
    tiles_n: Int32
    order: cute.Tensor | None = None
    deal: cute.Tensor | None = None
    slots: cute.Tensor | None = None
    matrices: Int32 | None = None
    begin: cute.Tensor | None = None


class Share(NamedTuple):
    """A CTA's share of a problem: its part ``rank`` of every tile from ``first`` on in steps of ``step``."""

    problem: Problem
    rank: Int32
    first: Int32
    step: Int32


class ProblemKind:
    """Base of the problem kinds; known at trace time, so a loop that calls its methods carries no state for it.

    Attributes:
        trims: whether MMAs of a stage that lie wholly past the group's end are left out.
        clears: whether stages hold a neighbour's elements that would be multiplied; see ``gemm.k_tail``.
        whole: tokens that a group's part of a contraction is rounded up to, where data is placed in units.
    """

    trims = clears = False
    whole = 1

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> "ProblemKind":
        return self

    def numbered(self, problem: Problem, slots: cute.Tensor | None, matrices: cute.Tensor) -> Problem:
        """Return ``problem`` with the table of slots into ``matrices [S, ...]``, if there is one."""
        return problem if slots is None else problem._replace(slots=slots, matrices=Int32(matrices.shape[0]))

    def slotted(self, tile: Tile, problem: Problem) -> Tile:
        """Return ``tile`` with the slot of its group.

        Without a valid slot it is the one after the last, which a tensor map reads as zeros and does not write.
        """
        p = problem
        return tile if p.slots is None else tile._replace(slot=slot_of(p.slots, p.matrices, tile.group))

    def matrix(self, matrices: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return the matrix of the tile's group, given the coordinate tensor of a map."""
        return matrices[None, None, tile.group if tile.slot is None else tile.slot]


class VarlenM(ProblemKind):
    """``a [T, K] x b [G, K, N] -> out [T, N]``: groups are rows of the output.

    A needs no bound at a group's end: rows of a neighbour only reach rows of the accumulator that are not stored. It
    must be row-major, since a tensor map reads from multiples of 16 bytes along its contiguous mode, and groups begin
    anywhere. The output is stored through a ragged map.
    """

    kind = VARLEN_M
    smem_bytes = 0

    def __init__(self, tile_m: int, tile_n: int, band: int, tail: bool):
        self.tile_m, self.tile_n, self.band, self.has_tail = tile_m, tile_n, band, tail

    def views(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor | None) -> tuple:
        """Return views for tensor maps: (rows, depth), (columns, depth), (rows, columns); None for None."""
        a, b, out = self.plain(a, b, out)
        return a, b, None if out is None else ragged_tensor(out, 0)

    def plain(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor | None) -> tuple:
        """Return these tensors as they are in memory, for kernels that read and write without tensor maps."""
        return a, cute.make_tensor(b.iterator, cute.select(b.layout, [2, 1, 0])), out

    def problem(
        self, a: cute.Tensor, b: cute.Tensor, offs: cute.Tensor, out: cute.Tensor, slots: cute.Tensor | None = None
    ) -> Problem:
        columns = Int32(b.shape[2])
        problem = Problem(offs, Int32(a.shape[0]), Int32(a.shape[1]), columns, Int32(0), ceil_div(columns, self.tile_n))
        return self.numbered(problem, slots, b)

    def tiles_at_most(self, problem: Problem) -> Int32:
        """Return an upper bound on the number of tiles that holds for any ascending offsets."""
        groups = Int32(cute.size(problem.offs)) + (1 if self.has_tail else 0)
        return (problem.rows + groups * (self.tile_m - 1)) // self.tile_m * problem.tiles_n

    def arrange(self, problem: Problem, allocator, warp: Int32, warps: int, first: Int32, step: Int32) -> Problem:
        """Prepare the tile order; all warps of the CTA call it. This kind needs none."""
        return problem

    def start(self, problem: Problem, tail: bool = False) -> GroupSearch:
        """Return the state of a warp that walks the tiles; ``tail``: including the rows past the last group."""
        return start_search(self.grid(problem, tail))

    def find(self, state: GroupSearch, index: Int32, problem: Problem, tail: bool = False) -> tuple[GroupSearch, Tile]:
        """Return the ``index``-th tile; indices ascend."""
        state, tile = find_tile(state, index, self.grid(problem, tail))
        return state, self.slotted(tile, problem)

    def grid(self, problem: Problem, tail: bool) -> TileGrid:
        """Return the tile grid; ``tail``: including the rows past the last group."""
        p = problem
        return TileGrid(p.offs, p.rows, p.tiles_n, self.tile_m, self.band, tail and self.has_tail, p.begin)

    def depth(self, tile: Tile, problem: Problem) -> Int32:
        """Return the extent of the contraction; 0 means that no accumulator is computed."""
        return problem.depth

    def is_product(self, tile: Tile, problem: Problem) -> cutlass.Boolean:
        """Return whether the mainloop computes an accumulator for ``tile``; otherwise its value is zero."""
        return tile.group < cute.size(problem.offs)

    def a(self, a: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, depth]`` of the tile's group, given the coordinate tensor of a map of A."""
        return cute.domain_offset((tile.start, 0), a)

    def b(self, b: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[columns, depth]``."""
        return self.matrix(b, tile)

    def out(self, out: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, columns]``."""
        return self.rows(out, tile)

    def span(self, tile: Tile, row: Int32, out: cute.Tensor) -> tuple[Int32, Int32]:
        """Return the index of row ``row`` of the tile's group in a vector with a value per row, and the group's end."""
        return tile.start + row, tile.start + tile.length

    def rows(self, matrix: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, columns]`` of the tile's group, given the coordinate tensor of a ragged map."""
        return cute.domain_offset(ragged_coord(0, tile.start, tile.length, 0), matrix)[None, None, 0, 0]


class VarlenK(ProblemKind):
    """``a [T, M]^T x b [T, N] -> out [G, M, N]``: groups are pieces of the contraction.

    Both operands are loaded through ragged maps, so the last stage of a group is filled up with zeros. Zeros in one
    operand would not do, since a neighbour's NaN times zero is NaN.
    """

    kind = VARLEN_K
    has_tail = False
    trims = True

    def __init__(self, tile_m: int, tile_n: int, band: int, longest_first: bool):
        self.tile_m, self.tile_n, self.band, self.longest_first = tile_m, tile_n, band, longest_first

    @property
    def smem_bytes(self) -> int:
        """Return the shared memory that the tile order takes."""
        return ORDER_BYTES + DEAL_BYTES if self.longest_first else 0

    def views(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Return views for tensor maps: (rows, depth), (columns, depth), (rows, columns)."""
        a, b, out = self.plain(a, b, out)
        return ragged_tensor(a, 1), ragged_tensor(b, 1), out

    def plain(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Return these tensors as they are in memory, for kernels that read and write without tensor maps."""
        modes = (a, [1, 0]), (b, [1, 0]), (out, [1, 2, 0])
        return tuple(cute.make_tensor(t.iterator, cute.select(t.layout, order)) for t, order in modes)

    def problem(
        self, a: cute.Tensor, b: cute.Tensor, offs: cute.Tensor, out: cute.Tensor, slots: cute.Tensor | None = None
    ) -> Problem:
        rows, columns = Int32(a.shape[1]), Int32(b.shape[1])
        tiles_m, tiles_n = ceil_div(rows, self.tile_m), ceil_div(columns, self.tile_n)
        problem = Problem(offs, Int32(a.shape[0]), Int32(0), columns, tiles_m, tiles_n)
        return self.numbered(problem, slots, out)

    def tiles_at_most(self, problem: Problem) -> Int32:
        """Return the number of tiles."""
        return Int32(cute.size(problem.offs)) * problem.tiles_m * problem.tiles_n

    def arrange(self, problem: Problem, allocator, warp: Int32, warps: int, first: Int32, step: Int32) -> Problem:
        """Prepare the tile order; all warps of the CTA call it, and synchronise in it."""
        if not self.longest_first:
            return problem
        order, deal = allocate_order(allocator), allocate_deal(allocator)
        sort_groups(order, problem.offs, problem.rows, warp, warps)
        cute.arch.sync_threads()
        problem = problem._replace(order=order.groups, deal=deal)
        self.deal(problem, order, warp, first, step)
        cute.arch.sync_threads()
        return problem

    @cute.jit
    def deal(self, problem: Problem, order: Order, warp: Int32, first: Int32, step: Int32):
        """Let one warp compute which tiles this cluster gets."""
        p = problem
        if warp == 0:
            deal_tiles(p.deal, order, Int32(cute.size(p.offs)), p.rows, p.tiles_m * p.tiles_n, first, step)

    def start(self, problem: Problem, tail: bool = False) -> Int32:
        """Return the state of a warp that walks the tiles: how many it has found."""
        return Int32(0)

    def find(self, state: Int32, index: Int32, problem: Problem, tail: bool = False) -> tuple[Int32, Tile]:
        """Return the next tile: the ``index``-th if tiles are handed out in plain rounds."""
        p = problem
        if self.longest_first:
            index = dealt(p.deal, state, index)
        tile = exact_tile(index, p.offs, p.rows, p.tiles_m, p.tiles_n, self.band, p.order)
        return state + 1, self.slotted(tile, problem)

    def depth(self, tile: Tile, problem: Problem) -> Int32:
        """Return the extent of the contraction; 0 means that no accumulator is computed."""
        return tile.length

    def is_product(self, tile: Tile, problem: Problem) -> cutlass.Boolean:
        """Return whether the mainloop computes an accumulator for ``tile``; otherwise its value is zero."""
        return tile.length > 0

    def place(self, tile: Tile) -> Int32:
        """Return where the tile's group begins along the contraction, in operands as they are in memory."""
        return tile.start

    def a(self, a: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, depth]`` of the tile's group, given the coordinate tensor of a map of A."""
        return cute.domain_offset(ragged_coord(1, tile.start, tile.length, 0), a)[None, None, 0, 0]

    def b(self, b: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[columns, depth]``."""
        return cute.domain_offset(ragged_coord(1, tile.start, tile.length, 0), b)[None, None, 0, 0]

    def out(self, out: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, columns]``."""
        return self.matrix(out, tile)

    def span(self, tile: Tile, row: Int32, out: cute.Tensor) -> tuple[Int32, Int32]:
        """Return the index of row ``row`` of the group's matrix in a vector with a value per row, and its end."""
        return row, Int32(out.shape[0])

    def old(self, out: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, columns]`` of the output in memory; for an invalid slot another group's, not to be used."""
        if tile.slot is None:
            return self.matrix(out, tile)
        return out[None, None, clamp(tile.slot, Int32(0), Int32(out.shape[2]) - 1)]
