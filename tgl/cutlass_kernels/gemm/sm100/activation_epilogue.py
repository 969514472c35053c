"""Epilogue with an activation as a second output: pre-activation and activation are stored piece by piece.

Where the pre-activation is not kept, it is still rounded, and only the activation is staged and stored.

A thread has a row: the gate of a result and, half a tile or one column further, its linear half. They are rounded
first, and the activation is computed from the rounded values. The pieces of both outputs alternate in the same buffers;
see ``quantize`` for a quantised activation.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute, pipeline

from ...activation.functions import activate, widened
from ...epilogue import EpilogueSpec
from ...epilogue.vectors import add_bias
from ...scheduler import Tile
from .pieces import accumulator_of, in_turn, piece_stores, send_piece
from .quantize import QuantizedOutput, quantized_sinks, store_quantized


class Views(NamedTuple):
    """Views of a tile for a thread of the epilogue."""

    load: cute.TiledCopy  # from tensor memory
    accumulators: cute.Tensor  # its part of them, [..., 1, piece, accumulator]
    acc: cute.Tensor  # registers for a piece
    bias: Any  # its part of the tile's, [..., 1, piece], or None
    write: cute.TiledCopy  # to shared memory
    buffers: cute.Tensor  # its part of them, [..., buffer]


def activated_sinks(
    gemm: Any, out: tuple, second: tuple, tile: Tile, buffers: cute.Tensor, warp: Int32, corner: tuple
) -> tuple:
    """Return ``(map, from, to)`` of every output: of the halves of ``out`` with columns of their own, and the second.

    Of ``out`` there is none where it is not kept.

    Args:
        out: map and coordinates of the matrix.
        second: map and coordinate tensor, or ``QuantizedOutput``; then the last are ``quantized_sinks``.
        corner: row and column of the warp's first element in ``out``.
    """
    spec, (row, column) = gemm.spec, corner
    piece, columns = gemm.epi_tile[1], gemm.config.tile_n
    out_map, target = out
    matrices = [(out_map, target, column, columns)] if spec.keeps else []
    if spec.activation.gated:
        column, columns = column // 2, columns // 2
        if spec.keeps and not spec.activation.interleaved:
            matrices = [(out_map, target[None, None, half], column, columns) for half in range(2)]
    if spec.quantized is None:
        second_map, coords = second
        matrices.append((second_map, gemm.policy.rows(coords, tile), column, columns))
    sinks: tuple = tuple((tma, *piece_stores(tma, buffers, t, warp, (row, c), piece, n)) for tma, t, c, n in matrices)
    if isinstance(second, QuantizedOutput):
        sinks += (quantized_sinks(gemm, second, tile, buffers, warp, (row, column)),)
    return sinks


@cute.jit
def store_activated(
    gemm: cutlass.Constexpr,
    views: Views,
    sinks: Any,
    factor: Any,
    results: pipeline.PipelineUmmaAsync,
    made: pipeline.PipelineState,
    buffer: Int32,
) -> Int32:
    """Apply the epilogue and store one warp's rows of a tile; return the next turn of the buffers.

    Args:
        gemm: the GEMM kernel.
        views: views of the thread.
        sinks: see ``activated_sinks``.
        factor: the row's probability, or None.
        results, made: the pipeline from the MMA warp and its state; the accumulator is released.
        buffer: buffer to begin with.
    """
    spec, halves = gemm.spec, 2 if gemm.spec.activation.gated else 1
    pieces = gemm.config.tile_n // halves // gemm.epi_tile[1]
    shape = views.acc.shape
    rounded = tuple(cute.make_rmem_tensor(shape, gemm.out_element) for _ in range(halves))
    result = cute.make_rmem_tensor(shape, gemm.out_element)
    which = accumulator_of(gemm, made)
    for nth in cutlass.range_constexpr(pieces):
        piece = in_turn(gemm, made, nth, pieces)
        for half in cutlass.range_constexpr(halves):
            at = 2 * piece + half if spec.alternates else half * pieces + piece
            cute.copy(views.load, views.accumulators[None, None, None, 0, at, which], views.acc)
            cute.arch.fence_view_async_tmem_load()
            if cutlass.const_expr(nth == gemm.read_first - 1 and half == halves - 1):
                with cute.arch.elect_one():
                    results.consumer_release(made)
            if cutlass.const_expr(spec.bias):
                add_bias(views.acc, views.bias[None, None, None, 0, at], None)
            rounded[half].store(views.acc.load().to(gemm.out_element))
        if cutlass.const_expr(spec.quantized is None):
            activate_row(spec, rounded, factor, result)
        else:
            # Only rows of the group. And exponentials stay behind both loads: early ones cost registers, which spill.
            result.fill(0.0)
            if sinks[-1].inside:
                activate_row(spec, rounded, factor, result)
        for part in cutlass.range_constexpr(halves if spec.keeps else 0):
            tma, source, sink = sinks[part % (len(sinks) - 1)]
            registers, place = rounded[part], piece
            if cutlass.const_expr(spec.gated and spec.activation.interleaved):
                registers = alternating(rounded[0], rounded[1], part)
            if cutlass.const_expr(halves == 2 and spec.activation.interleaved):
                place = 2 * piece + part
            cute.copy(views.write, views.write.retile(registers), views.buffers[None, None, None, buffer])
            send_piece(gemm, (tma, source[None, buffer], sink[None, 0, place]))
            buffer = (buffer + 1) % gemm.epi_stages
        if cutlass.const_expr(spec.quantized is not None):
            store_quantized(gemm, sinks[-1], result, piece, buffer)
        else:
            tma, source, sink = sinks[-1]
            cute.copy(views.write, views.write.retile(result), views.buffers[None, None, None, buffer])
            send_piece(gemm, (tma, source[None, buffer], sink[None, 0, piece]))
        buffer = (buffer + 1) % gemm.epi_stages
    return buffer


def activate_row(spec: EpilogueSpec, rounded: Any, factor: Any, result: cute.Tensor) -> None:
    """Write the activation of a thread's columns of both halves, or of interleaved columns, rounded, to ``result``."""
    assert spec.activation is not None
    values = cute.make_rmem_tensor(result.shape, Float32)
    wide = tuple(widened(half) for half in rounded)
    fast, count = result.element_type.width == 16, cute.size(values)
    for i in range(count):
        gate, linear = wide[0][i], wide[1][i] if spec.gated else None
        if spec.alternates:
            source, at = wide[2 * i // count], 2 * i % count
            gate, linear = source[at], source[at + 1]
        value = activate(spec.activation, gate, linear, fast)
        values[i] = value if factor is None else value * factor
    result.store(values.load().to(result.element_type))


def alternating(gate: cute.Tensor, linear: cute.Tensor, part: int) -> cute.Tensor:
    """Return one half of the columns of gate and linear half, interleaved."""
    columns = cute.make_rmem_tensor(gate.shape, gate.element_type)
    count = cute.size(columns)
    for i in range(count):
        columns[i] = (gate, linear)[i % 2][(part * count + i) // 2]
    return columns
