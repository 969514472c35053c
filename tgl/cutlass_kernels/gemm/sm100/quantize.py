"""Epilogue with an activation that is stored only in MXFP8, in one direction or in both.

A warp has 32 rows of a group, from a multiple of 32 rows of the group on, and a thread has one of them. So 32 columns
of a thread are a block along the row, and a column of the warp is a block along the tokens. For these, the lanes
exchange amax values until each has those of two columns of 64, compute two scales and share them. The elements of a
piece fill one buffer: half of it rows, half of it columns.

A tile has whole atoms of scales, as wide as high, or halves, of which a warp writes the bytes of its rows and its
blocks: see ``scheduler.scaled_operands`` for the layout. Atoms that no tile writes are cleared before the first tile.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint16, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers

from ...activation.functions import widened
from ...bits import as_float
from ...quantize.lane_tile import MAGNITUDES, UPPER_HALVES, LaneValues, halves
from ...quantize.mxfp8 import ATOM, BLOCK, inverse_scale, scale_byte
from ...quantize.quantize_spec import MXFP8Spec
from ...quantize.tiles import group_of_unit, group_tile, tiles_at_most
from ...scheduler import Tile, ceil_div
from ...scheduler.problem import Problem
from ...scheduler.ragged import ragged_tensor
from ..operand_formats import ATOM_ROWS
from .pieces import WARP_ROWS, send_piece

COLUMNS = 64  # of a piece: 128 bytes of 16-bit elements, 64 of the codes
CHUNK = 16  # codes that a thread writes at once
LANES = 32
DIRECTIONS = 2  # along rows and along columns


class QuantizedOutput(NamedTuple):
    """Destinations of the components; None for a direction that is not requested."""

    row_map: Any
    row_coords: Any
    column_map: Any
    column_coords: Any
    scale: Any  # bytes
    columnwise_scale: Any
    columns: Int32  # I
    units: Int32  # atoms along the tokens


class Sinks(NamedTuple):
    """Destinations of a warp's part of a tile."""

    outputs: QuantizedOutput
    rows: Any  # (from, to) of the stores, as ``pieces.piece_stores`` makes them, or None
    columns: Any
    codes: cute.Tensor  # [32, 64, DIRECTIONS, buffers]
    warp: Int32
    column: Int32  # its first column, of [T, I]
    inside: Boolean  # whether the thread's row belongs to the group
    unit: Int32  # index of the CTA's atoms; negative if it has no rows


def codes_layout(gemm: Any) -> cute.ComposedLayout:
    """Return the shared-memory layout of the codes of a warp's rows of a piece, in one direction: one TMA store."""
    layout = blackwell_helpers.make_smem_layout_epi(gemm.codes, LayoutEnum.ROW_MAJOR, (WARP_ROWS, COLUMNS), 1)
    return cute.slice_(layout, (None, None, 0))


def quantized_outputs(gemm: Any, store: Any, components: tuple, problem: Problem) -> QuantizedOutput:
    """Return the components in memory: data, scale, and both of the columnwise direction."""
    data, scale, columnwise_data, columnwise_scale = components
    row, column = (_codes_map(gemm, store, matrix) for matrix in (data, columnwise_data))
    columns = (data if data is not None else columnwise_data).shape[1]
    units = tiles_at_most(problem.rows, Int32(cute.size(problem.offs))) - 1
    return QuantizedOutput(row[0], row[1], column[0], column[1], scale, columnwise_scale, Int32(columns), units)


def _codes_map(gemm: Any, store: Any, matrix: cute.Tensor | None) -> tuple[Any, Any]:
    """Return a map that stores codes, and its coordinates."""
    if matrix is None:
        return None, None
    return cpasync.make_tiled_tma_atom(store, ragged_tensor(matrix, 0), codes_layout(gemm), (WARP_ROWS, COLUMNS))


def quantized_sinks(
    gemm: Any, outputs: QuantizedOutput, tile: Tile, buffers: cute.Tensor, warp: Int32, corner: tuple
) -> Sinks:
    """Return the destinations of a warp's part of ``tile``.

    Args:
        buffers: shared memory ``[rows, columns of a piece, buffers]``.
        corner: row and column of its first element in ``[T, I]``, the row within the group.
    """
    row, column = corner
    codes = warp_codes(gemm, buffers)[None, None, None, None, warp]

    def ends(direction: int, tma: Any, coords: Any) -> Any:
        """Return ``(from [box, buffer], to [box, 1, piece])`` of the stores of a direction."""
        if tma is None:
            return None
        target = cute.domain_offset(corner, gemm.policy.rows(coords, tile))
        matrix = cute.local_tile(target, (WARP_ROWS, gemm.result_columns), (0, 0))
        return cpasync.tma_partition(
            tma,
            0,
            cute.make_layout(1),
            cute.group_modes(codes[None, None, direction, None], 0, 2),
            cute.group_modes(cute.flat_divide(matrix, (WARP_ROWS, COLUMNS)), 0, 2),
        )

    rows = ends(0, outputs.row_map, outputs.row_coords)
    columns = ends(1, outputs.column_map, outputs.column_coords)
    first = row - warp * WARP_ROWS  # of the CTA's rows
    unit = tile.start // ATOM_ROWS + tile.group + first // ATOM_ROWS
    unit = cutlass.select_(first < tile.length, unit, Int32(-1))
    return Sinks(outputs, rows, columns, codes, warp, column, row + cute.arch.lane_idx() < tile.length, unit)


def warp_codes(gemm: Any, buffers: cute.Tensor) -> cute.Tensor:
    """Return ``[32, 64, DIRECTIONS, buffers, warps]`` of the epilogue's buffers, whose rows hold 16-bit elements."""
    rows, columns = gemm.epi_tile
    part = WARP_ROWS * COLUMNS
    shape = (WARP_ROWS, COLUMNS, DIRECTIONS, gemm.epi_stages, rows // WARP_ROWS)
    stride = (COLUMNS, 1, part, rows * columns * 2, DIRECTIONS * part)
    pointer = cute.recast_ptr(buffers.iterator, codes_layout(gemm).inner, dtype=gemm.codes)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


@cute.jit
def store_quantized(
    gemm: cutlass.Constexpr,
    sinks: Sinks,
    result: cute.Tensor,
    piece: Int32 | int,
    buffer: Int32,
):
    """Quantise and store a warp's rows of a piece.

    Args:
        gemm: the GEMM kernel.
        sinks: destinations.
        result: the thread's 64 columns of the activation.
        piece: index of the piece.
        buffer: buffer to use.
    """
    spec, lane = gemm.spec.quantized, cute.arch.lane_idx()
    codes = sinks.codes[None, None, None, buffer]
    words = magnitudes(result, sinks.inside)
    row_bytes = (Int32(0), Int32(0))
    column_bytes = (Int32(0), Int32(0))
    wide = widened(result)
    if cutlass.const_expr(spec.rowwise):
        row_bytes = scale_bytes(spec, row_maxima(spec, words))
        inverses = [as_float(inverse_scale(byte)) for byte in row_bytes]
        write_codes(gemm, wide, [inverses[i // BLOCK] for i in range(COLUMNS)], codes[None, None, 0], lane)
    if cutlass.const_expr(spec.columnwise):
        column_bytes = scale_bytes(spec, column_maxima(spec, words, lane))
        inverses = shared_inverses(column_bytes)
        write_codes(gemm, wide, inverses, codes[None, None, 1], lane)
    put_scales(gemm, sinks, piece, row_bytes, column_bytes)
    send_piece(gemm, *[(tma, source[None, buffer], to[None, 0, piece]) for tma, source, to in code_stores(sinks)])


def code_stores(sinks: Sinks) -> list[tuple]:
    """Return ``(map, from, to)`` of each direction; a store fills a warp's part of a buffer."""
    directions = ((sinks.outputs.row_map, sinks.rows), (sinks.outputs.column_map, sinks.columns))
    return [(tma, *ends) for tma, ends in directions if tma is not None]


def all_stores(sinks: tuple) -> tuple:
    """Return ``(map, from, to)`` of every matrix among the sinks of a tile."""
    return (*sinks[:-1], *code_stores(sinks[-1])) if isinstance(sinks[-1], Sinks) else sinks


def magnitudes(result: cute.Tensor, inside: Boolean) -> list[Int32]:
    """Return the magnitudes of a thread's columns, two per word; 0 in a row outside the group."""
    mask = cutlass.select_(inside, Int32(MAGNITUDES), Int32(0))
    words = cute.recast_tensor(result, Int32)
    return [words[i] & mask for i in range(cute.size(words))]


def row_maxima(spec: MXFP8Spec, words: list[Int32]) -> list[Int32]:
    """Return the amax of each block of a thread's row, as bits of float32."""
    lanes, found = LaneValues(spec.source, 1), []
    for first in range(0, len(words), BLOCK // 2):
        block = words[first : first + BLOCK // 2]
        while len(block) > 1:
            block = [lanes.largest(a, b) for a, b in zip(block[::2], block[1::2])]
        found.append(cutlass.max(*lanes.widened((block[0],))))
    return found


def column_maxima(spec: MXFP8Spec, words: list[Int32], lane: Int32) -> tuple[Int32, Int32]:
    """Return the amax of the warp's columns ``2 lane`` and ``2 lane + 1``, as bits of float32."""
    return LaneValues(spec.source, 1).shared_maximum([(word,) for word in words], lane, 16, 8, 4, 2, 1)


def scale_bytes(spec: MXFP8Spec, maxima: Any) -> tuple[Int32, ...]:
    """Return the scales of blocks with these amax values."""
    return tuple(scale_byte(amax, spec.element, spec.scaling) for amax in maxima)


def shared_inverses(column_bytes: tuple[Int32, ...]) -> list[Float32]:
    """Return the inverse scales of all columns, two from each lane."""
    word = halves(inverse_scale(column_bytes[0]), inverse_scale(column_bytes[1]), UPPER_HALVES)
    pairs = [cute.arch.shuffle_sync(word, lane) for lane in range(LANES)]
    return [as_float(bits) for pair in pairs for bits in (pair << 16, pair & -65536)]


def write_codes(gemm: Any, wide: cute.Tensor, inverses: list[Float32], codes: cute.Tensor, lane: Int32) -> None:
    """Write a thread's values times inverse scales, rounded, to ``codes [32, 64]`` in shared memory."""
    for chunk in range(COLUMNS // CHUNK):
        scaled = cute.make_rmem_tensor(CHUNK, Float32)
        for i in range(CHUNK):
            at = chunk * CHUNK + i
            scaled[i] = wide[at] * inverses[at]
        rounded = cute.make_rmem_tensor(CHUNK, gemm.codes)
        rounded.store(scaled.load().to(gemm.codes))
        place = cute.local_tile(codes, (1, CHUNK), (lane, chunk))
        cute.autovec_copy(rounded, cute.make_tensor(place.iterator, CHUNK))


@cute.jit
def put_scales(gemm: cutlass.Constexpr, sinks: Sinks, piece: Int32 | int, row_bytes: tuple, column_bytes: tuple):
    """Store a thread's scales of a piece, of its row and of two columns; zero for columns that do not exist."""
    spec, outputs, lane = gemm.spec.quantized, sinks.outputs, cute.arch.lane_idx()
    column = sinks.column + piece * COLUMNS
    if sinks.unit >= 0 and column // ATOM_ROWS * ATOM_ROWS < outputs.columns:
        pair = Int32(0)
        for i in cutlass.range_constexpr(2):
            if column + i * BLOCK < outputs.columns:
                pair = pair | (row_bytes[i] << (8 * i))
        low, high = column_bytes
        if column + 2 * lane >= outputs.columns:
            low = Int32(0)
        if column + 2 * lane + 1 >= outputs.columns:
            high = Int32(0)
        put_bytes(spec, sinks, column, pair, low, high)
        if cutlass.const_expr(gemm.result_columns % ATOM_ROWS != 0):  # noqa: SIM102 - decided while tracing
            # The other half of the last atom is one that no tile has.
            if column % ATOM_ROWS == 0 and column + COLUMNS >= outputs.columns:
                zero = Int32(0)
                put_bytes(spec, sinks, column + COLUMNS, zero, zero, zero)


@cute.jit
def put_bytes(
    spec: cutlass.Constexpr,
    sinks: Sinks,
    column: Int32,
    pair: Int32,
    low: Int32,
    high: Int32,
):
    """Store a thread's scales of 64 columns from ``column`` on: two of its row, and those of two columns."""
    outputs, unit, warp = sinks.outputs, sinks.unit, sinks.warp
    lane, atom, within = cute.arch.lane_idx(), column // ATOM_ROWS, column % ATOM_ROWS
    if cutlass.const_expr(spec.rowwise):
        across = ceil_div(outputs.columns, ATOM_ROWS)
        at = (Int64(unit) * across + atom) * ATOM + lane * 16 + warp * 4 + within // BLOCK
        pointer = cute.recast_ptr((outputs.scale.iterator + at).align(2), dtype=Uint16)
        cute.make_tensor(pointer, cute.make_layout(1))[0] = Uint16(pair)
    if cutlass.const_expr(spec.columnwise):
        first = (Int64(atom) * outputs.units + unit) * ATOM
        for i in cutlass.range_constexpr(2):
            y = within + 2 * lane + i
            outputs.columnwise_scale[first + (y % 32 * 16 + y // 32 * 4 + warp)] = Uint8((low, high)[i])


@cute.jit
def clear_scales(gemm: cutlass.Constexpr, sinks: Sinks):
    """Zero scales for a warp none of whose rows is one of the group's."""
    zeros = (Int32(0), Int32(0))
    for piece in cutlass.range_constexpr(gemm.result_columns // COLUMNS):
        put_scales(gemm, sinks, piece, zeros, zeros)


@cute.jit
def clear_gaps(outputs: QuantizedOutput, problem: Problem, warps: cutlass.Constexpr):
    """Zero scales where no tile puts any: in the places between groups, and past the last. ``warps`` call it."""
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
    across = ceil_div(outputs.columns, ATOM_ROWS)
    for unit in cutlass.range(block * warps + warp, outputs.units, blocks * warps, unroll=1):
        group = group_of_unit(problem.offs, problem.rows, unit)
        tile = group_tile(problem.offs, problem.rows, unit, group)
        if tile.tail or tile.count <= 0:
            for k in cutlass.range(across, unroll=1):
                if cutlass.const_expr(outputs.scale is not None):
                    clear_atom(outputs.scale, Int64(unit) * across + k, lane)
                if cutlass.const_expr(outputs.columnwise_scale is not None):
                    clear_atom(outputs.columnwise_scale, Int64(k) * outputs.units + unit, lane)


@cute.jit
def clear_atom(scales: cute.Tensor, atom: Int64, lane: Int32):
    """Zero an atom, 16 bytes a lane."""
    zeros = cute.make_rmem_tensor(ATOM // LANES, Uint8)
    zeros.fill(0)
    pointer = (scales.iterator + (atom * ATOM + lane * (ATOM // LANES))).align(ATOM // LANES)
    cute.autovec_copy(zeros, cute.make_tensor(pointer, cute.make_layout(ATOM // LANES)))
