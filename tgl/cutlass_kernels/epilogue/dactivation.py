"""The dactivation epilogue: it turns a product into the gradient of the pre-activation.

A warp works through its rows of a tile in chunks of 64 columns. The pre-activation is loaded by TMA into the buffers
from which its gradient is stored: for every chunk of the product one buffer per half, or two where the halves are
interleaved. Sets of buffers are used alternately: one load per set is issued before the warp waits for the product, and
each later one once the last store but one has finished reading. So a warp never waits for another, and holds only as
much of the pre-activation as it works on.

A kernel that also returns the activation's result keeps that of a chunk, or of part of one, in registers until the
store of the chunk before has finished, and then stages it in the warp's single buffer for it.

A row's sum, for the gradient of its probability, is formed per tile and written to a row of its own; the caller adds
these up, in order of the columns.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from ..activation.activation_spec import ActivationSpec
from ..activation.functions import gradients, widened
from ..scheduler import Tile

SLOTS = 2  # sets of buffers per warp
SLOT_BITS = 4  # a power of two, at least SLOTS
COLUMNS = 64  # of a chunk: 128 bytes of 16-bit elements


class Preactivation(NamedTuple):
    """The pre-activation, and the other operands of the activation backward."""

    map: cute.CopyAtom  # TMA load of a chunk
    coords: cute.Tensor  # the coordinate tensor of the map
    probs: Any  # [T] or None
    sums: Any  # float32 [tiles across, T], or None without probs
    full: Any = None  # barriers, SLOTS of every warp


class Chunks(NamedTuple):
    """A warp's chunks of a tile that lie inside the output: ``down`` along rows, ``across`` along columns."""

    row: Int32
    column: Int32
    down: int
    across: Int32
    count: Int32


class Result(NamedTuple):
    """Destination of the activation's result of a warp's rows."""

    map: cute.CopyAtom  # TMA store of a chunk
    target: cute.Tensor  # coordinates [rows, columns] of the group's part of it
    buffer: cute.Tensor  # shared memory [chunk rows, chunk columns]


def buffers_per_chunk(spec: ActivationSpec) -> int:
    """Return the number of buffers that the pre-activation of a chunk's columns fills."""
    return 2 if spec.gated else 1


def buffers_per_warp(spec: ActivationSpec, result: bool) -> int:
    """Return the number of buffers of a warp, including one for the activation's result if it is an output."""
    return SLOTS * buffers_per_chunk(spec) + (1 if result else 0)


@cute.jit
def open_slots(allocator, count: cutlass.Constexpr, opens: cutlass.Boolean) -> cute.Pointer:
    """Return barriers of ``count`` slots, initialised by the warp for which ``opens``; then synchronise the CTA."""
    full = allocator.allocate_array(Int64, num_elems=count)
    if opens:
        with cute.arch.elect_one():
            for slot in cutlass.range_constexpr(count):
                cute.arch.mbarrier_init(full + slot, 1)
            cute.arch.mbarrier_init_fence()
    return full


@cute.jit
def chunks_of(
    row: Int32,
    column: Int32,
    down: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    across: cutlass.Constexpr,
    height: Int32,
    width: Int32,
) -> Chunks:
    """Return the chunks from ``(row, column)`` on: up to ``blocks`` by ``across``, within ``height`` and ``width``."""
    columns = cutlass.max(cutlass.min((width - column + COLUMNS - 1) // COLUMNS, across), 0)
    rows = cutlass.max(cutlass.min((height - row + down - 1) // down, blocks), 0)
    return Chunks(row, column, down, columns, rows * columns)


@cute.jit
def part_of(spec: cutlass.Constexpr, matrix: cute.Tensor, row: Int32, column: Int32, part: cutlass.Constexpr, tile):
    """Return the part of ``[rows, columns, halves]`` in buffer ``part`` of the product's chunk at ``(row, column)``."""
    half = 0
    if cutlass.const_expr(spec.interleaved):
        column = 2 * column + part * tile[1]
    else:
        half = part
    return cute.local_tile(cute.domain_offset((row, column), matrix[None, None, half]), tile, (0, 0))


@cute.jit
def load_chunk(
    gemm: cutlass.Constexpr,
    hidden: Preactivation,
    buffers: cute.Tensor,
    tile: Tile,
    chunks: Chunks,
    index: Int32,
    slot: Int32,
):
    """Issue the load of the ``index``-th chunk of a tile.

    Args:
        gemm: the kernel, with ``gradient``, ``chunk`` and ``policy``.
        buffers: those of the warp, ``[chunk rows, chunk columns, parts, SLOTS]``; stores from ``slot`` have finished.
    """
    parts = cute.size(buffers, mode=[2])
    matrix = gemm.policy.out(hidden.coords, tile)
    row, column = chunks.row + index // chunks.across * chunks.down, chunks.column + index % chunks.across * COLUMNS
    full = hidden.full + slot
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, parts * gemm.chunk[0] * gemm.chunk[1] * 2)
    for part in cutlass.range_constexpr(parts):
        source = part_of(gemm.gradient, matrix, row, column, part, gemm.chunk)
        to, source = cpasync.tma_partition(
            hidden.map,
            0,
            cute.make_layout(1),
            cute.group_modes(buffers[None, None, part, slot], 0, 2),
            cute.group_modes(source, 0, 2),
        )
        cute.copy(hidden.map, source, to, tma_bar_ptr=full)


@cute.jit
def load_first_chunks(
    gemm: cutlass.Constexpr, hidden: Preactivation, buffers: cute.Tensor, tile: Tile, chunks: Chunks, state: Int32
):
    """Issue the loads of as many chunks as there are sets of buffers, once all stores from them have finished."""
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    for index in cutlass.range_constexpr(SLOTS):
        if index < chunks.count:
            load_chunk(gemm, hidden, buffers, tile, chunks, Int32(index), (slot_of(state) + index) % SLOTS)


def slot_of(state: Int32) -> Int32:
    """Return the current slot: the low bits of a warp's state, above which are the phases of the slots' barriers."""
    return state % SLOT_BITS


@cute.jit
def next_slot(state: Int32) -> Int32:
    """Return the state advanced to the next slot."""
    slot = slot_of(state)
    return state - slot + (slot + 1) % SLOTS


@cute.jit
def wait_chunk(hidden: Preactivation, state: Int32) -> Int32:
    """Wait for the chunk in the current slot; return the new state."""
    slot = slot_of(state)
    cute.arch.mbarrier_wait(hidden.full + slot, (state // SLOT_BITS >> slot) & 1)
    return state ^ (Int32(SLOT_BITS) << slot)


@cute.jit
def load_next_chunk(
    gemm: cutlass.Constexpr,
    hidden: Preactivation,
    buffers: cute.Tensor,
    tile: Tile,
    chunks: Chunks,
    index: Int32,
    state: Int32,
):
    """After chunk ``index`` is done and before it is stored, issue another load, into the buffers of the last one."""
    following = index - 1 + SLOTS
    if index > 0 and following < chunks.count:
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        load_chunk(gemm, hidden, buffers, tile, chunks, following, (slot_of(state) + SLOTS - 1) % SLOTS)


@cute.jit
def wait_result(result: Any):
    """Wait until the store of the previous chunk's activation result has finished, if any; one warp calls it."""
    if cutlass.const_expr(result is not None):
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()


@cute.jit
def clear_chunk(buffers: cute.Tensor, result: Any, lane: Int32):
    """Zero ``[chunk rows, chunk columns, parts]`` and the buffer of ``result`` (a ``Result`` or None), once earlier
    stores from them have finished; one warp calls it.
    """
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(SLOTS - 1, read=True)
    cute.arch.sync_warp()
    for part in cutlass.range_constexpr(cute.size(buffers, mode=[2])):
        clear_buffer(buffers[None, None, part], lane)
    if cutlass.const_expr(result is not None):
        wait_result(result)
        clear_buffer(result.buffer, lane)


@cute.jit
def clear_buffer(buffer: cute.Tensor, lane: Int32):
    """Zero ``[chunk rows, chunk columns]``, by one warp."""
    zeros = cute.make_rmem_tensor(8, buffer.element_type)
    zeros.fill(0.0)
    rows, columns = buffer.shape
    across = cute.size(columns) // 8
    for i in cutlass.range_constexpr(cute.size(rows) * across // 32):
        at = lane + 32 * i
        target = cute.local_tile(buffer, (1, 8), (at // across, at % across))
        cute.autovec_copy(zeros, cute.make_tensor(target.iterator, 8))


@cute.jit
def store_chunk(
    gemm: cutlass.Constexpr,
    out_map: cute.CopyAtom,
    target: cute.Tensor,
    buffers: cute.Tensor,
    result: Any,
    row: Int32,
    column: Int32,
):
    """Start storing ``[chunk rows, chunk columns, parts]`` to the chunk at ``(row, column)`` of the product.

    Args:
        target: coordinates ``[rows, columns, halves]`` of the group's part of the output.
        result: a ``Result``, whose buffer is stored as well, or None.
    """
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()
    for part in cutlass.range_constexpr(cute.size(buffers, mode=[2])):
        source, sink = cpasync.tma_partition(
            out_map,
            0,
            cute.make_layout(1),
            cute.group_modes(buffers[None, None, part], 0, 2),
            cute.group_modes(part_of(gemm.gradient, target, row, column, part, gemm.chunk), 0, 2),
        )
        with cute.arch.elect_one():
            cute.copy(out_map, source, sink)
    if cutlass.const_expr(result is not None):
        part = cute.local_tile(cute.domain_offset((row, column), result.target), gemm.chunk, (0, 0))
        source, sink = cpasync.tma_partition(
            result.map,
            0,
            cute.make_layout(1),
            cute.group_modes(result.buffer, 0, 2),
            cute.group_modes(part, 0, 2),
        )
        with cute.arch.elect_one():
            cute.copy(result.map, source, sink)
    with cute.arch.elect_one():  # stores must be issued and waited for by the same lane
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def differentiate(
    spec: cutlass.Constexpr,
    gate: cute.Tensor,
    linear: Any,
    product: cute.Tensor,
    probs: Any,
    sums: cute.Tensor,
    results: Any,
):
    """Replace gate and linear half by their gradients, add to the row sums, and write the activation's results.

    Args:
        gate, linear: float32 registers; linear is None if there is no such half.
        product: float32 registers of the accumulator, of the same shape, rounded to 16 bits here.
        probs, sums: float32 registers of the same shape, with stride 0 along a row; probs may be None.
        results: registers of 16 bits and of the same shape, or None.
    """
    values = cute.make_rmem_tensor(gate.shape, Float32)
    for i in cutlass.range_constexpr(cute.size(gate)):
        u = None if cutlass.const_expr(linear is None) else linear[i]
        p = None if cutlass.const_expr(probs is None) else probs[i]
        found = gradients(spec, gate[i], u, product[i], p, True)
        gate[i] = found.gate
        if cutlass.const_expr(linear is not None):
            linear[i] = found.linear
        if cutlass.const_expr(probs is not None):
            sums[i] += found.probability
        if cutlass.const_expr(results is not None):
            values[i] = found.result
    if cutlass.const_expr(results is not None):
        results.store(values.load().to(results.element_type))


@cute.jit
def rounded(values: cute.Tensor, element: cutlass.Constexpr) -> cute.Tensor:
    """Return float32 registers rounded to 16 bits, as the product is in memory."""
    narrow = cute.make_rmem_tensor(values.shape, element)
    narrow.store(values.load().to(element))
    return widened(narrow)
