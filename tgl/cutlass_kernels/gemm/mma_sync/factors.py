"""Block scales on their way to the accumulators: next to the lines of a stage, in the same ``cp.async`` groups.

A stage has a factor for each row of a tile and, after them, one for each of its columns, or a single one where B is a
matrix of square blocks. Scales are float32 and begin anywhere, so a copy is four bytes, and a thread makes one or two.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...config import VARLEN_M
from ...scheduler import Tile, quotient
from ..copies import WORD, copy_word
from .tilings import factor_count


class FactorSources(NamedTuple):
    """A thread's copies of the factors of the next k tile."""

    places: tuple[Int64, ...]  # in global memory
    inside: tuple[Int32, ...]  # bytes: of a factor, or none
    left: Int32  # k tiles that have factors

    def none(self) -> "FactorSources":
        """Return the sources with nothing to copy."""
        return self._replace(left=Int32(0))


class TileFactors(NamedTuple):
    """A thread's factors of a k tile, in registers."""

    rows: cute.Tensor  # (2, M): of both halves of 16 rows, times the matrix's where B has one factor
    columns: Any  # (2, N) of 8 columns, or None


def indices(gemm: Any) -> list[Int32]:
    """Return which factors of a stage a thread copies."""
    thread, _, _ = cute.arch.thread_idx()
    count = factor_count(gemm.kind, gemm.config, gemm.form)
    return [thread + turn * gemm.threads for turn in range((count + gemm.threads - 1) // gemm.threads)]


@cute.jit
def begin_factors(gemm: cutlass.Constexpr, scales: tuple[cute.Tensor, cute.Tensor], tile: Tile) -> FactorSources:
    """Return a thread's sources for a tile's first k tile; nothing is copied from outside the operands.

    Args:
        scales: of A and of B, in global memory: ``[T, blocks]`` and ``[G, columns / block, blocks]`` where groups are
            rows, ``[blocks, rows]`` and ``[blocks, columns]`` where they are pieces of the contraction.
    """
    config, block = gemm.config, gemm.form.block
    a, b = scales
    places: tuple = ()
    inside: tuple = ()
    first = quotient(tile.start, block) + tile.group  # of the rows of scales of placed operands
    left = Int32(a.shape[0]) - first
    if cutlass.const_expr(gemm.kind == VARLEN_M):
        left = Int32(a.shape[1])
    for index in indices(gemm):
        row, column = tile.m * config.tile_m + index, tile.n * config.tile_n + index - config.tile_m
        if cutlass.const_expr(gemm.kind == VARLEN_M):
            above, has = Int64(tile.start + row) * a.stride[0], row < tile.length
            beside = Int64(tile.group) * b.stride[0] + Int64(quotient(tile.n * config.tile_n, block)) * b.stride[1]
            there = index == config.tile_m
        else:
            above, has = Int64(first) * a.stride[0] + row, row < a.shape[1]
            beside, there = Int64(first) * b.stride[0] + column, column < b.shape[1]
        place = a.iterator.toint() + above * WORD
        if index >= config.tile_m:
            place, has = b.iterator.toint() + beside * WORD, there
        count = Int32(0)
        if has:
            count = Int32(WORD)
        places, inside = (*places, place), (*inside, count)
    return FactorSources(places, inside, left)


@cute.jit
def copy_factors(
    gemm: cutlass.Constexpr, scales: tuple[cute.Tensor, cute.Tensor], sources: FactorSources, stage: Int32
) -> FactorSources:
    """Start a thread's copies of the next k tile's factors to the stage at the address ``stage``."""
    a, b = scales
    along = 1 if cutlass.const_expr(gemm.kind == VARLEN_M) else 0
    further = 2 if cutlass.const_expr(gemm.kind == VARLEN_M) else 0
    target = stage + gemm.factors_at
    places: tuple = ()
    for i, index in enumerate(indices(gemm)):
        found, pitch = sources.inside[i], Int64(a.stride[along])
        if sources.left <= 0:
            found = Int32(0)
        if index >= gemm.config.tile_m:
            pitch = Int64(b.stride[further])
        copied = index < factor_count(gemm.kind, gemm.config, gemm.form)
        if copied:
            copy_word(sources.places[i], target + index * WORD, found)
        places = (*places, sources.places[i] + pitch * WORD)
    return FactorSources(places, sources.inside, sources.left - 1)


def factors_at(gemm: Any, stage: Int32, index: Int32, count: int) -> cute.Tensor:
    """Return ``count`` factors of a stage from the ``index``-th on, in shared memory."""
    address = stage + gemm.factors_at + index * WORD
    place = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=count * WORD)
    return cute.make_tensor(place, cute.make_layout(count))


def make_factors(gemm: Any) -> TileFactors | None:
    """Return registers for a thread's factors, None where there are none."""
    if not gemm.factors_at:
        return None
    height, width = gemm.warp_tile
    columns = None if gemm.kind == VARLEN_M else cute.make_rmem_tensor((2, width // 8), Float32)
    return TileFactors(cute.make_rmem_tensor((2, height // 16), Float32), columns)


def read_factors(gemm: Any, stage: Int32, factors: Any) -> None:
    """Fill ``factors`` from the stage at the address ``stage``."""
    (height, width), across = gemm.warp_tile, gemm.warps[1]
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    top, left = warp // across * height, warp % across * width
    for i in range(height // 8):
        factors.rows[i] = factors_at(gemm, stage, top + 8 * i + lane // 4, 1)[0]
    if factors.columns is None:
        of_matrix = factors_at(gemm, stage, Int32(gemm.config.tile_m), 1)[0]
        for i in range(height // 8):
            factors.rows[i] *= of_matrix
        return
    for i in range(width // 8):
        pair = factors_at(gemm, stage, gemm.config.tile_m + left + 8 * i + lane % 4 * 2, 2)
        cute.autovec_copy(pair, cute.make_tensor(factors.columns.iterator + 2 * i, cute.make_layout(2)))


def promote(acc: cute.Tensor, sums: cute.Tensor, factors: TileFactors | None) -> None:
    """Add ``sums`` to ``acc``, each times the factors of its row and of its column.

    Args:
        acc, sums: float32 registers ``((2, 2), M, N)``; element ``((e, h), m, n)`` is in half h of 16 rows and is
            column e of a thread's two of 8.
    """
    high, wide = acc.shape[1], acc.shape[2]
    for n in range(wide):
        for m in range(high):
            for i in range(4):
                value = sums[(i % 2, i // 2), m, n]
                if factors is not None:
                    value *= factors.rows[i // 2, m]
                    if factors.columns is not None:
                        value *= factors.columns[i % 2, n]
                acc[(i % 2, i // 2), m, n] += value
