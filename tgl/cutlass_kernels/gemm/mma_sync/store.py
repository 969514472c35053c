"""Store accumulators without shared memory: each warp applies the epilogue to its part of a tile.

Register ``(e, h, j)`` of lane ``l`` is row ``l / 4 + 8 h`` and column ``8 j + 2 (l % 4) + e`` of 16 rows. Four lanes
that share a row exchange their parts of 32 columns of 16 bits, so that each has 8 of them side by side and stores 16
bytes. In float32 they store 32 bytes of a row together without an exchange.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...config import VARLEN_M
from ...epilogue.vectors import EpilogueArgs, add_old, alpha
from ...pointers import aligned
from ...scheduler import Tile
from ...scheduler.problem import Problem

CHUNK = 32  # columns that are finished at a time
PIECES = CHUNK // 8


class GlobalOutput(NamedTuple):
    """Destinations of results in global memory, and operands of the activation backward."""

    values: cute.Tensor | None  # leading modes (rows, columns); None if an activation alone leaves
    second: Any = None  # the activation's result [T, I], or None
    hidden: Any = None  # see ``gradient``


@cute.jit
def store_tile(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    output: GlobalOutput,
    args: EpilogueArgs,
    tile: Tile,
    problem: Problem,
    product: cutlass.Boolean,
):
    """Apply the epilogue and store one warp's part of a tile.

    Args:
        gemm: the GEMM kernel.
        acc: float32 registers ``((2, 2), M, N)``.
        output: the output.
        args: the epilogue's operands.
        tile, problem: which, and sizes.
        product: whether the tile belongs to a group; the tail has no bias.
    """
    spec, (rows, columns) = gemm.spec, gemm.warp_tile
    matrix, height = target(gemm, output.values, tile, problem)
    row, column = corner(gemm, tile)
    lane = cute.arch.lane_idx()
    factor = Float32(1)
    if cutlass.const_expr(spec.group_factor):  # noqa: SIM102 - the first is decided while tracing
        if product:
            factor = alpha(spec, args, tile.group)
    of_rows: Any = None
    if cutlass.const_expr(spec.line_factors):
        of_rows = row_factors(args.a_factor, tile, row, height, rows, product)
    for chunk in cutlass.range_constexpr(columns // CHUNK):
        left = column + chunk * CHUNK
        first = left + lane % 4 * 2
        bias: Any = None
        of_columns: Any = None
        if cutlass.const_expr(spec.line_factors):
            of_columns = of_matrix(args.b_factor, tile.group, first, args.b_factor.shape[1], product)
        if cutlass.const_expr(spec.bias):
            bias = of_matrix(args.bias, tile.group, first, args.bias.shape[1], product)
        for block in cutlass.range_constexpr(rows // 16):
            top = row + block * 16
            values = chunk_of(acc, block, chunk)
            if cutlass.const_expr(spec.group_factor):
                values.store(values.load() * factor)
            if cutlass.const_expr(spec.line_factors):  # noqa: SIM102 - the first is decided while tracing
                if product:
                    scale_lines(values, of_rows, block, of_columns)
            if cutlass.const_expr(spec.bias):  # noqa: SIM102 - the first is decided while tracing
                if product:
                    add_bias(values, bias, args, tile.start + top, tile.start + height)
            if cutlass.const_expr(spec.accumulate):
                add_old(values, matrix, top, first)
            store_chunk(rounded(values, matrix.element_type), matrix, top, height, left, lane % 4)


def corner(gemm: Any, tile: Tile) -> tuple[Int32, Int32]:
    """Return a thread's first row, and the first column of its warp: of the results, or of each half of them."""
    index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    down, across = index // gemm.warps[1], index % gemm.warps[1]
    row = tile.m * gemm.config.tile_m + down * gemm.warp_tile[0] + cute.arch.lane_idx() // 4
    return row, (tile.n * gemm.config.tile_n + across * gemm.warp_tile[1]) // gemm.halves


def chunk_of(acc: cute.Tensor, block: int, chunk: int) -> cute.Tensor:
    """Return a thread's float32 registers ``(2, 2, PIECES)`` of 16 rows and a chunk's columns."""
    values = cute.make_rmem_tensor((2, 2, PIECES), Float32)
    for i in range(4 * PIECES):
        values[i] = acc[(i % 2, i // 2 % 2), block, chunk * PIECES + i // 4]
    return values


def rounded(values: cute.Tensor, element: type[cutlass.Numeric]) -> cute.Tensor:
    """Return registers in the dtype of an output."""
    found = cute.make_rmem_tensor(values.shape, element)
    found.store(values.load().to(element))
    return found


@cute.jit
def target(gemm: cutlass.Constexpr, out: cute.Tensor, tile: Tile, problem: Problem) -> tuple[cute.Tensor, Int32]:
    """Return the matrix that a tile is a part of, and how many of its rows are written."""
    policy = gemm.policy
    if cutlass.const_expr(policy.kind == VARLEN_M):
        return cute.domain_offset((tile.start, 0), out), tile.length
    height = Int32(out.shape[0])
    slot: Any = tile.slot
    if cutlass.const_expr(slot is not None):  # noqa: SIM102 - the first is decided while tracing
        if slot >= problem.matrices:
            height = Int32(0)
    return policy.old(out, tile), height


@cute.jit
def of_matrix(values: cute.Tensor, group: Int32, column: Int32, end: Int32, product: cutlass.Boolean) -> cute.Tensor:
    """Return a group's row of ``values [G, columns]``, for a thread's columns of a chunk.

    Returns:
        ``(2, PIECES)`` from ``column`` on; zero from column ``end`` on.
    """
    found = cute.make_rmem_tensor((2, PIECES), Float32)
    for i in cutlass.range_constexpr(2 * PIECES):
        at = column + i % 2 + 8 * (i // 2)
        value = Float32(0)
        if product and at < end:
            value = values[group, at].to(Float32)
        found[i] = value
    return found


@cute.jit
def row_factors(
    factors: cute.Tensor, tile: Tile, row: Int32, height: Int32, rows: cutlass.Constexpr, product: cutlass.Boolean
) -> cute.Tensor:
    """Return the factors of a thread's rows of a warp's ``rows``, ``(2, rows / 16)`` from ``row``; zero from
    ``height``.

    Args:
        factors: ``[T]`` where groups are rows, else ``[G, rows]``.
    """
    found, start = cute.make_rmem_tensor((2, rows // 16), Float32), tile.start
    if cutlass.const_expr(cute.rank(factors) == 2):
        factors, start = factors[tile.group, None], Int32(0)
    for i in cutlass.range_constexpr(rows // 8):
        at, value = row + 8 * i, Float32(0)
        if product and at < height:
            value = factors[start + at]
        found[i] = value
    return found


def scale_lines(values: cute.Tensor, rows: cute.Tensor, block: int, columns: cute.Tensor) -> None:
    """Multiply ``values`` by the factors of the ``block``-th 16 of a warp's ``rows``, then by those of its columns."""
    for piece in range(PIECES):
        for half in range(2):
            for i in range(2):
                values[i, half, piece] = values[i, half, piece] * rows[half, block] * columns[i, piece]


@cute.jit
def add_bias(values: cute.Tensor, bias: cute.Tensor, args: EpilogueArgs, row: Int32, end: Int32):
    """Add ``bias * scale`` to a thread's rows, of which the first is row ``row`` of all; scales end at ``end``."""
    for half in cutlass.range_constexpr(2):
        scale = Float32(1)
        if cutlass.const_expr(args.bias_scale is not None):
            at = row + 8 * half
            if at < end:
                scale = args.bias_scale[at].to(Float32)
        for piece in cutlass.range_constexpr(PIECES):
            for i in cutlass.range_constexpr(2):
                if cutlass.const_expr(args.bias_scale is not None):
                    values[i, half, piece] += bias[i, piece] * scale
                else:
                    values[i, half, piece] += bias[i, piece]


@cute.jit
def store_chunk(values: cute.Tensor, out: cute.Tensor, top: Int32, height: Int32, column: Int32, quarter: Int32):
    """Store a chunk's columns of 16 rows, without rows from ``height`` on; all lanes take part.

    Args:
        values: registers ``(2, 2, PIECES)`` of the output's dtype.
        top: a thread's first row.
        column: where the chunk begins.
        quarter: the lane's of the row.
    """
    words = cute.recast_tensor(values, Int32)
    for half in cutlass.range_constexpr(2):
        row = top + 8 * half
        base = out.iterator + Int64(row) * out.stride[0]
        if cutlass.const_expr(values.element_type.width == 16):
            packed = cute.make_rmem_tensor(PIECES, Int32)
            for i in cutlass.range_constexpr(PIECES):
                packed[i] = words[0, half, i]
            transpose(packed, quarter)
            if row < height:
                store_columns(cute.recast_tensor(packed, values.element_type), base, column + 8 * quarter, out.shape[1])
        else:
            for piece in cutlass.range_constexpr(PIECES):
                pair = cute.make_rmem_tensor(2, values.element_type)
                for i in cutlass.range_constexpr(2):
                    pair[i] = values[i, half, piece]
                if row < height:
                    store_columns(pair, base, column + 8 * piece + 2 * quarter, out.shape[1])


@cute.jit
def transpose(words: cute.Tensor, quarter: Int32):
    """Transpose four words of four lanes: word ``j`` of lane ``i`` becomes word ``i`` of lane ``j``."""
    for bit in cutlass.range_constexpr(2):
        apart = 1 << bit
        upper = quarter & apart
        for low in cutlass.range_constexpr(PIECES):
            if cutlass.const_expr(low & apart == 0):
                kept, sent = words[low], words[low + apart]
                if upper != 0:
                    kept, sent = sent, kept
                got = cute.arch.shuffle_sync_bfly(sent, apart)
                first, second = kept, got
                if upper != 0:
                    first, second = got, kept
                words[low], words[low + apart] = first, second


@cute.jit
def store_columns(values: cute.Tensor, base: cute.Pointer, column: Int32, width: Int32):
    """Store neighbouring columns of a row by one access, or one by one where the row ends among them."""
    count = cute.size(values)
    left = width - column
    if left >= count:
        to = aligned(base + column, count * values.element_type.width // 8)
        cute.autovec_copy(cute.make_tensor(values.iterator, count), cute.make_tensor(to, count))
    else:
        for i in cutlass.range_constexpr(count - 1):
            if i < left:
                cute.make_tensor(base + (column + i), 1)[0] = values[i]
