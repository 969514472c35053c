"""Epilogue with an activation as a second output: pre-activation and activation are rounded and stored by chunks.

A warp's columns are equally many of the gate and, after them, of the linear half. Where the halves are interleaved, its
columns are those of memory: each pair of a thread's registers is gate and linear half. The activation is computed from
the rounded outputs of the GEMM, whether these are kept or not.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from ...epilogue.fragments import activated, row_probs
from ...epilogue.vectors import EpilogueArgs
from ...scheduler import Tile
from ...scheduler.problem import Problem
from .store import (
    CHUNK,
    PIECES,
    GlobalOutput,
    add_bias,
    chunk_of,
    corner,
    of_matrix,
    rounded,
    store_chunk,
    store_columns,
    target,
    transpose,
)


def half_of(matrix: cute.Tensor, halves: int, half: int) -> cute.Tensor:
    """Return the columns of one of the halves that lie side by side; those of the matrix where ``halves`` is 1."""
    rows, columns = matrix.shape[0], matrix.shape[1] // halves
    return cute.make_tensor(matrix.iterator + half * columns, cute.make_layout((rows, columns), stride=matrix.stride))


@cute.jit
def store_activated(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    output: GlobalOutput,
    args: EpilogueArgs,
    tile: Tile,
    problem: Problem,
    product: cutlass.Boolean,
):
    """Store a tile and its activation; arguments as for ``store.store_tile``."""
    spec, halves, lane = gemm.spec, gemm.halves, cute.arch.lane_idx()
    y, height = target(gemm, output.second, tile, problem)
    h: Any = None
    if cutlass.const_expr(spec.keeps):
        h, _ = target(gemm, output.values, tile, problem)
    width = problem.columns // halves
    row, column = corner(gemm, tile)
    chunks = gemm.warp_tile[1] // halves // CHUNK
    for chunk in cutlass.range_constexpr(chunks):
        left = column + chunk * CHUNK
        bias: Any = (None, None)
        if cutlass.const_expr(spec.bias):
            first = left + lane % 4 * 2
            bias = tuple(
                of_matrix(args.bias, tile.group, first + half * width, (half + 1) * width, product)
                for half in range(halves)
            )
        for block in cutlass.range_constexpr(gemm.warp_tile[0] // 16):
            top = row + block * 16
            held: tuple = ()
            for half in cutlass.range_constexpr(halves):
                values = chunk_of(acc, block, half * chunks + chunk)
                if cutlass.const_expr(spec.bias):  # noqa: SIM102 - the first is decided while tracing
                    if product:
                        add_bias(values, bias[half], args, tile.start + top, tile.start + height)
                held += (rounded(values, gemm.out_element),)
            probs = row_probs(args.probs, tile, top, product)
            for half in cutlass.range_constexpr(halves if spec.keeps else 0):
                store_chunk(held[half], half_of(h, halves, half), top, height, left, lane % 4)
            result = rounded(activated(spec.activation, held, probs, product), gemm.out_element)
            if cutlass.const_expr(cute.size(result, mode=[0]) == 1):
                store_every_fourth(result, y, top, height, left // 2, lane % 4)
            else:
                store_chunk(result, y, top, height, left, lane % 4)


@cute.jit
def store_every_fourth(values: cute.Tensor, out: cute.Tensor, top: Int32, height: Int32, column: Int32, quarter: Int32):
    """Store 16 columns of 16 rows, without rows from ``height`` on; all lanes take part.

    Args:
        values: registers ``(1, 2, PIECES)``; piece ``i`` is column ``4 i + quarter``.
        top: a thread's first row.
        column: first of the 16 columns.
        quarter: index of the lane among those of its row.
    """
    count = cute.size(values)
    both = cute.make_tensor(values.iterator, cute.make_layout(count))
    words = cute.recast_tensor(both, Int32)
    narrow = values.element_type.width == 16  # both rows of a column are a word
    if cutlass.const_expr(narrow):
        transpose(words, quarter)
    for half in cutlass.range_constexpr(2):
        four = cute.make_rmem_tensor(PIECES, values.element_type)
        for i in cutlass.range_constexpr(PIECES):
            four[i] = both[2 * i + half]
        if cutlass.const_expr(not narrow):
            transpose(cute.recast_tensor(four, Int32), quarter)
        row = top + 8 * half
        if row < height:
            store_columns(four, out.iterator + Int64(row) * out.stride[0], column + PIECES * quarter, out.shape[1])
