"""Bias, row scale, probabilities and factors: one value per column or row of a tile, staged in shared memory.

A kernel loads the vectors of a tile before it waits for the accumulator, so that the mainloop hides their latency. In
shared memory they are float32 and viewed as whole tiles (stride 0 along the other mode), so that any architecture's
accumulator fragment is partitioned over them as over the output.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from .epilogue_spec import EpilogueSpec


class EpilogueArgs(NamedTuple):
    """Operands of an epilogue in global memory; None where the spec has none."""

    bias: Any  # [G, N]
    bias_scale: Any  # [T]
    a_factor: Any = None  # [G], or per line: [T] (groups of rows) or [G, M]
    b_factor: Any = None  # [G], or per line: [G, N]
    probs: Any = None  # [T]
    source: Any = None  # int32 [T]: the element of bias_scale and probs for every row; None: the row's own number


class TileVectors(NamedTuple):
    """The vectors of a tile in shared memory, each viewed as ``[tile_m, tile_n]``; None where the spec has none."""

    bias: Any
    bias_scale: Any
    probs: Any = None
    a_factor: Any = None
    b_factor: Any = None


def vector_bytes(spec: EpilogueSpec, tile_m: int, tile_n: int) -> int:
    """Return the bytes of shared memory that the vectors of a tile take."""
    rows = (spec.bias_scale is not None) + (spec.probs is not None) + spec.line_factors
    return 4 * (tile_n * ((spec.bias is not None) + spec.line_factors) + tile_m * rows)


def allocate_vectors(allocator, spec: EpilogueSpec, tile_m: int, tile_n: int) -> TileVectors:
    """Allocate shared memory for the vectors of a tile of ``tile_m x tile_n`` (the CTA's part of it)."""

    def vector(wanted: Any, by_row: bool) -> Any:
        if not wanted:
            return None
        size, stride = (tile_m, (1, 0)) if by_row else (tile_n, (0, 1))
        pointer = allocator.allocate_array(Float32, num_elems=size, byte_alignment=16)
        return cute.make_tensor(pointer, cute.make_layout((tile_m, tile_n), stride=stride))

    lines = spec.line_factors
    return TileVectors(
        vector(spec.bias, False),
        vector(spec.bias_scale, True),
        vector(spec.probs, True),
        vector(lines, True),
        vector(lines, False),
    )


def bias_column(spec: EpilogueSpec, at: Int32, column: Int32, tile_n: int, width: Int32) -> tuple:
    """Return the bias column of a tile's column ``at``, in a row of ``width``, and whether it is in bounds."""
    if not spec.gated:
        return column + at, column + at < width
    half, within, halves = at // (tile_n // 2), column // 2 + at % (tile_n // 2), width // 2
    if spec.activation.interleaved:  # type: ignore[union-attr]
        return 2 * within + half, within < halves
    return half * halves + within, within < halves


@cute.jit
def load_rows(
    vector: cute.Tensor,
    values: cute.Tensor,
    source: Any,
    row: Int32,
    end: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
):
    """Fill a vector of one value per row; zeros for rows whose ``source`` is out of the range of ``values``."""
    for i in cutlass.range_constexpr((vector.shape[0] + threads - 1) // threads):
        at = thread + i * threads
        value = Float32(0)
        if at < vector.shape[0] and row + at < end:
            if cutlass.const_expr(source is None):
                value = values[row + at].to(Float32)
            else:
                found = source[row + at]
                if found >= 0 and found < values.shape[0]:
                    value = values[found].to(Float32)
        if at < vector.shape[0]:
            vector[at, 0] = value


@cute.jit
def load_columns(vector: cute.Tensor, source: cute.Tensor, column: Int32, thread: Int32, threads: cutlass.Constexpr):
    """Fill a vector of one value per column."""
    for i in cutlass.range_constexpr((vector.shape[1] + threads - 1) // threads):
        at = thread + i * threads
        value = Float32(0)
        if at < vector.shape[1] and column + at < source.shape[0]:
            value = source[column + at].to(Float32)
        if at < vector.shape[1]:
            vector[0, at] = value


@cute.jit
def load_vectors(
    spec: cutlass.Constexpr,
    vectors: TileVectors,
    args: EpilogueArgs,
    group: Int32,
    row: Int32,
    end: Int32,
    column: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
):
    """Fill the vectors of the tile whose first element is ``(row, column)``; ``end`` is the row after the group's last.

    Rows are numbered over all groups where groups are rows, else within the group's matrix.

    The ``threads`` epilogue threads call it together. They must synchronise at a barrier afterwards, before any of them
    reads, and before the next call, after all have read. Out of bounds the vectors are zero.
    """
    if cutlass.const_expr(vectors.bias is not None):
        width = args.bias.shape[1]
        for i in cutlass.range_constexpr((vectors.bias.shape[1] + threads - 1) // threads):
            at = thread + i * threads
            value = Float32(0)
            source, inside = bias_column(spec, at, column, vectors.bias.shape[1], width)
            if at < vectors.bias.shape[1] and inside:
                value = args.bias[group, source].to(Float32)
            if at < vectors.bias.shape[1]:
                vectors.bias[0, at] = value
    if cutlass.const_expr(vectors.bias_scale is not None):
        load_rows(vectors.bias_scale, args.bias_scale, args.source, row, end, thread, threads)
    if cutlass.const_expr(vectors.probs is not None):
        load_rows(vectors.probs, args.probs, args.source, row, end, thread, threads)
    if cutlass.const_expr(vectors.a_factor is not None):
        a_factor = args.a_factor
        if cutlass.const_expr(cute.rank(a_factor) == 2):
            a_factor = a_factor[group, None]
        load_rows(vectors.a_factor, a_factor, None, row, end, thread, threads)
        load_columns(vectors.b_factor, args.b_factor[group, None], column, thread, threads)


@cute.jit
def _decode_scale(amax: Float32) -> Float32:
    """Return ``S_dec`` of NVFP4: the inverse of ``min(448 * 6 / amax, FLT_MAX)``, and 1 for an amax of 0."""
    encode = Float32(1)
    if amax != 0:
        encode = cutlass.min(Float32(2688) / amax, Float32(3.4028234663852886e38))
    return Float32(1) / encode


@cute.jit
def alpha(spec: cutlass.Constexpr, args: EpilogueArgs, group: Int32) -> Float32:
    """Return the factor of a group."""
    a, b = args.a_factor[group], args.b_factor[group]
    if cutlass.const_expr(spec.alpha == "amax"):
        a, b = _decode_scale(a), _decode_scale(b)
    return a * b


@cute.jit
def scale_lines(acc: cute.Tensor, rows: cute.Tensor, columns: cute.Tensor):
    """Apply ``acc *= rows``, then ``acc *= columns``, to one thread's registers.

    Args:
        acc: float32 registers of a thread, any shape.
        rows, columns: this thread's elements of ``TileVectors``, of the same shape (views of shared memory).
    """
    for factor in cutlass.range_constexpr(2):
        held = cute.make_rmem_tensor(acc.shape, Float32)
        cute.autovec_copy((rows, columns)[factor], held)
        acc.store(acc.load() * held.load())


@cute.jit
def add_bias(acc: cute.Tensor, bias: cute.Tensor, scale: cute.Tensor | None):
    """Apply ``acc += bias * scale`` to one thread's registers.

    Args:
        acc: float32 registers of a thread, any shape.
        bias, scale: this thread's elements of ``TileVectors``, of the same shape (views of shared memory).
    """
    held = cute.make_rmem_tensor(acc.shape, Float32)
    cute.autovec_copy(bias, held)
    if cutlass.const_expr(scale is not None):
        factor = cute.make_rmem_tensor(acc.shape, Float32)
        cute.autovec_copy(scale, factor)
        acc.store(acc.load() + held.load() * factor.load())
    else:
        acc.store(acc.load() + held.load())


@cute.jit
def add_output(acc: cute.Tensor, out: cute.Tensor, coords: cute.Tensor, limit: cute.Shape):
    """Apply ``acc += out`` to one thread's registers, for accumulation into 16 bits with one rounding.

    Args:
        acc: float32 registers of a thread.
        out: this thread's elements of the output in global memory, of the same shape.
        coords: their ``(row, column)`` within the tile, of the same shape; the last is the largest.
        limit: rows and columns of the output from the tile's first element on; elements beyond are left alone.
    """
    count = cutlass.const_expr(cute.size(acc))
    if cute.elem_less(coords[count - 1], limit):
        held = cute.make_rmem_tensor(acc.shape, out.element_type)
        cute.autovec_copy(out, held)
        acc.store(acc.load() + held.load().to(Float32))
    else:
        for i in cutlass.range(count, unroll_full=True):
            if cute.elem_less(coords[i], limit):
                acc[i] = acc[i] + out[i].to(Float32)


@cute.jit
def add_old(values: cute.Tensor, out: cute.Tensor, row: Int32, column: Int32):
    """Apply ``values += out`` to a thread's registers of 16 rows, so that the sum is rounded once.

    Args:
        values: float32 ``(2, 2, columns / 8)``: column in a pair, row and the one 8 below it, every 8th column.
        out: the group's matrix in global memory, row-major; nothing beyond its shape is read.
        row, column: the thread's first element there.
    """
    for half in cutlass.range_constexpr(2):
        base = out.iterator + (Int64(row + 8 * half) * out.stride[0] + column)
        for piece in cutlass.range_constexpr(cute.size(values, mode=[2])):
            pair = cute.make_rmem_tensor(2, out.element_type)
            pair.fill(0.0)
            left = out.shape[1] - (column + 8 * piece)
            if row + 8 * half < out.shape[0]:
                if left >= 2:
                    cute.autovec_copy(
                        cute.make_tensor((base + 8 * piece).align(out.element_type.width // 4), cute.make_layout(2)),
                        pair,
                    )
                elif left == 1:
                    pair[0] = cute.make_tensor(base + 8 * piece, cute.make_layout(1))[0]
            for i in cutlass.range_constexpr(2):
                values[i, half, piece] += pair[i].to(Float32)
