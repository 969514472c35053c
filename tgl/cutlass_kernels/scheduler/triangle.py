"""Products of matrices with their own transposes: only one triangle of tiles is computed, since results are symmetric.

Tiles are handed out in squares of ``side``, the longer side of a cluster's tile, so a square is one or two of these.
Squares on the diagonal are computed and stored as a whole. Off the diagonal only the squares below it are computed, and
each is stored twice.
"""

from cutlass import Boolean, Int32, cute

from .problem import Problem, ProblemKind
from .swizzle import ceil_div, decode_triangle, quotient
from .tile_lookup import Tile


class Triangle(ProblemKind):
    """``x [G, M, K] x its transpose -> out [G, M, M]``; both operands are ``x``.

    Attributes:
        side: rows and columns of a square.
        down, across: tiles of a cluster in a square.
    """

    has_tail = False
    smem_bytes = 0

    def __init__(self, tile_m: int, tile_n: int):
        self.tile_m, self.tile_n = tile_m, tile_n
        self.side = max(tile_m, tile_n)
        if self.side % tile_m or self.side % tile_n:
            raise ValueError(f"of `tile_m` and `tile_n` one must be a multiple of the other, not {tile_m} and {tile_n}")
        self.down, self.across = self.side // tile_m, self.side // tile_n

    def views(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Return views for tensor maps: (rows, depth), (columns, depth), (rows, columns)."""
        return tuple(cute.make_tensor(t.iterator, cute.select(t.layout, [1, 2, 0])) for t in (a, b, out))

    def problem(
        self, a: cute.Tensor, b: cute.Tensor, offs: None, out: cute.Tensor, slots: cute.Tensor | None = None
    ) -> Problem:
        """Return the sizes; ``tiles_m`` and ``tiles_n`` count squares along a side."""
        rows, squares = Int32(a.shape[1]), ceil_div(Int32(a.shape[1]), self.side)
        return Problem(None, rows, Int32(a.shape[2]), rows, squares, squares, matrices=Int32(a.shape[0]))

    def per_matrix(self, problem: Problem) -> Int32:
        """Return the number of cluster tiles of a matrix."""
        squares = problem.tiles_m
        return squares * (squares + 1) // 2 * (self.down * self.across)

    def tiles_at_most(self, problem: Problem) -> Int32:
        """Return the number of tiles."""
        return problem.matrices * self.per_matrix(problem)

    def arrange(self, problem: Problem, allocator, warp: Int32, warps: int, first: Int32, step: Int32) -> Problem:
        """Return ``problem``; there is nothing to prepare."""
        return problem

    def start(self, problem: Problem, tail: bool = False) -> Int32:
        """Return the state of a warp that walks the tiles, which is not used."""
        return Int32(0)

    def find(self, state: Int32, index: Int32, problem: Problem, tail: bool = False) -> tuple[Int32, Tile]:
        """Return the ``index``-th tile."""
        per_matrix, parts = self.per_matrix(problem), self.down * self.across
        group = quotient(index, per_matrix)
        rest = index - group * per_matrix
        square = quotient(rest, parts)
        m, n = decode_triangle(square, problem.tiles_m)
        part = rest - square * parts  # along one of the two sides
        m = m * self.down + (part if self.down > 1 else 0)
        n = n * self.across + (part if self.across > 1 else 0)
        return state, Tile(group < problem.matrices, group, m, n, Int32(0), problem.rows)

    def depth(self, tile: Tile, problem: Problem) -> Int32:
        """Return the extent of the contraction."""
        return problem.depth

    def is_product(self, tile: Tile, problem: Problem) -> Boolean:
        """Return True: every tile is computed."""
        return Boolean(True)

    def below(self, row: Int32, column: Int32) -> Boolean:
        """Return whether an element is in a square below the diagonal, which has a mirror image above it."""
        return quotient(row, self.side) > quotient(column, self.side)

    def a(self, a: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, depth]`` of the tile's matrix, given the coordinate tensor of a map."""
        return self.matrix(a, tile)

    def b(self, b: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[columns, depth]``."""
        return self.matrix(b, tile)

    def out(self, out: cute.Tensor, tile: Tile) -> cute.Tensor:
        """Return ``[rows, columns]``."""
        return self.matrix(out, tile)
