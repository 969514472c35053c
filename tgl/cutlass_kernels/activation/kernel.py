"""The activation of routed rows and its gradients, each in one launch and one pass over memory.

A warp takes a row and walks over it in strips of ``vector`` adjacent output columns per lane; the loads of ``BATCH``
strips are in flight before the first is used. Rows past the last group are zeroed and not read. A row's sum, for the
gradient of its probability, is the sum over its lanes, each of which sums its own columns in order.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ..scheduler import ceil_div
from ..scheduler.groups import clamp
from .activation_spec import ActivationSpec
from .functions import activate, gradients

LANES = 32
WARPS = 8
BATCH = 4  # strips of the forward whose loads are in flight
BATCH_BACKWARD = 2


def neighbours(tensor: cute.Tensor, row: Int32, column: Int32, count: int) -> cute.Tensor:
    """Return ``count`` elements of a row from ``column`` on, aligned as a whole up to 16 bytes."""
    width = min(count * tensor.element_type.width // 8, 16)
    pointer = (tensor.iterator + (Int64(row) * tensor.stride[0] + column)).align(width)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def load_halves(spec: cutlass.Constexpr, x: cute.Tensor, row: Int32, column: Int32, columns: Int32, parts: cute.Tensor):
    """Start loading gate and linear half from ``column`` of ``columns`` on.

    Args:
        parts: registers ``[vector, halves]``, filled in memory order: one half after the other, or interleaved.
    """
    vector, halves = parts.shape
    if cutlass.const_expr(spec.interleaved):
        flat = cute.make_tensor(parts.iterator, cute.make_layout(vector * halves))
        cute.autovec_copy(neighbours(x, row, column * 2, vector * halves), flat)
    else:
        for half in cutlass.range_constexpr(halves):
            cute.autovec_copy(neighbours(x, row, column + columns * half, vector), parts[None, half])


@cute.jit
def store_halves(
    spec: cutlass.Constexpr, x: cute.Tensor, row: Int32, column: Int32, columns: Int32, parts: cute.Tensor
):
    """Store gate and linear half; the inverse of ``load_halves``."""
    vector, halves = parts.shape
    if cutlass.const_expr(spec.interleaved):
        flat = cute.make_tensor(parts.iterator, cute.make_layout(vector * halves))
        cute.autovec_copy(flat, neighbours(x, row, column * 2, vector * halves))
    else:
        for half in cutlass.range_constexpr(halves):
            cute.autovec_copy(parts[None, half], neighbours(x, row, column + columns * half, vector))


def halves_of(spec: ActivationSpec, parts: cute.Tensor, j: int) -> tuple[int, int | None]:
    """Return the flat indices of the gate and the linear half of output ``j`` in ``parts``."""
    if not spec.gated:
        return j, None
    return (2 * j, 2 * j + 1) if spec.interleaved else (j, j + parts.shape[0])


@cute.jit
def activated(spec: cutlass.Constexpr, parts: cute.Tensor, factor: Any) -> cute.Tensor:
    """Return the activation of loaded halves times the row's probability (None: 1), in float32."""
    vector, halves = parts.shape
    wide = cute.make_rmem_tensor(vector * halves, Float32)
    wide.store(cute.make_tensor(parts.iterator, cute.make_layout(vector * halves)).load().to(Float32))
    values = cute.make_rmem_tensor(vector, Float32)
    fast = parts.element_type.width == 16
    for j in cutlass.range_constexpr(vector):
        g, u = halves_of(spec, parts, j)
        value = activate(spec, wide[g], None if cutlass.const_expr(u is None) else wide[u], fast)
        values[j] = value if cutlass.const_expr(factor is None) else value * factor
    return values


@cute.jit
def routed_rows(offs: cute.Tensor, rows: Int32) -> Int32:
    """Return the number of rows before the tail."""
    end = Int32(0)
    if cute.size(offs) > 0:
        end = clamp(offs[cute.size(offs) - 1], Int32(0), rows)
    return end


@cute.jit
def clear_row(tensor: cute.Tensor, row: Int32, lane: Int32, vector: cutlass.Constexpr):
    """Zero a row; one warp calls it."""
    zeros = cute.make_rmem_tensor(vector, tensor.element_type)
    zeros.fill(0.0)
    for column in cutlass.range(lane * vector, tensor.shape[1], LANES * vector, unroll=1):
        cute.autovec_copy(zeros, neighbours(tensor, row, column, vector))


class ActivationKernel:
    """The forward kernel, ``y = p A(g) L(u)``.

    Args:
        spec: which activation.
        vector: columns of ``y`` per lane and strip; divides I, the pitch of rows and the alignment of all tensors.
    """

    def __init__(self, spec: ActivationSpec, vector: int):
        self.spec = spec
        self.vector = vector

    @cute.jit
    def __call__(self, x: cute.Tensor, offs: cute.Tensor, probs: cute.Tensor | None, y: cute.Tensor, stream):
        """Launch.

        Args:
            x: ``[T, 2 I]`` or ``[T, I]``, unit stride along rows.
            offs: int32 ``[G]``.
            probs: ``[T]`` or None.
            y: ``[T, I]`` like x; T and I at least 1.
            stream: CUDA stream.
        """
        self.kernel(x, offs, probs, y).launch(
            grid=(ceil_div(Int32(y.shape[0]), WARPS), 1, 1), block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, offs: cute.Tensor, probs: cute.Tensor | None, y: cute.Tensor):
        """Process eight rows, one per warp."""
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        row = block * WARPS + cute.arch.warp_idx()
        rows = Int32(y.shape[0])
        if row < routed_rows(offs, rows):
            self.activate_row(x, probs, y, row, lane)
        elif row < rows:
            clear_row(y, row, lane, self.vector)

    @cute.jit
    def activate_row(self, x: cute.Tensor, probs: Any, y: cute.Tensor, row: Int32, lane: Int32):
        """Write the activation of one row, by one warp."""
        spec, vector = self.spec, self.vector
        columns = Int32(y.shape[1])
        factor: Any = None
        if cutlass.const_expr(probs is not None):
            factor = probs[row].to(Float32)
        parts = cute.make_rmem_tensor((vector, 2 if spec.gated else 1, BATCH), x.element_type)
        for first in cutlass.range(lane * vector, columns + lane * vector, BATCH * LANES * vector, unroll=1):
            for i in cutlass.range_constexpr(BATCH):
                column = cutlass.min(first + i * LANES * vector, columns - vector)
                load_halves(spec, x, row, column, columns, parts[None, None, i])
            for i in cutlass.range_constexpr(BATCH):
                column = first + i * LANES * vector
                if column < columns:
                    rounded = cute.make_rmem_tensor(vector, y.element_type)
                    rounded.store(activated(spec, parts[None, None, i], factor).load().to(y.element_type))
                    cute.autovec_copy(rounded, neighbours(y, row, column, vector))


class ActivationBackwardKernel:
    """The backward kernel: ``dg = p dy A' L``, ``du = p dy A L'`` and ``dp = sum over the row of dy A L``.

    Arguments are as for the forward.
    """

    def __init__(self, spec: ActivationSpec, vector: int):
        self.spec = spec
        self.vector = vector

    @cute.jit
    def __call__(
        self,
        dy: cute.Tensor,
        x: cute.Tensor,
        offs: cute.Tensor,
        probs: cute.Tensor | None,
        dx: cute.Tensor,
        dprobs: cute.Tensor | None,
        stream,
    ):
        """Launch.

        Args:
            dy: ``[T, I]``, unit stride along rows; T and I at least 1.
            x, offs, probs: as for the forward.
            dx: like x, contiguous.
            dprobs: float32 ``[T]``, None without ``probs``.
            stream: CUDA stream.
        """
        self.kernel(dy, x, offs, probs, dx, dprobs).launch(
            grid=(ceil_div(Int32(dy.shape[0]), WARPS), 1, 1), block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        dy: cute.Tensor,
        x: cute.Tensor,
        offs: cute.Tensor,
        probs: cute.Tensor | None,
        dx: cute.Tensor,
        dprobs: Any,
    ):
        """Process eight rows, one per warp."""
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        row = block * WARPS + cute.arch.warp_idx()
        rows = Int32(dy.shape[0])
        if row < rows:
            total = Float32(0)
            if row < routed_rows(offs, rows):
                total = self.differentiate_row(dy, x, probs, dx, row, lane)
            else:
                clear_row(dx, row, lane, self.vector)
            if cutlass.const_expr(dprobs is not None):
                for step in cutlass.range_constexpr(5):
                    total += cute.arch.shuffle_sync_bfly(total, 1 << step)
                if lane == 0:
                    dprobs[row] = total

    @cute.jit
    def differentiate_row(
        self, dy: cute.Tensor, x: cute.Tensor, probs: Any, dx: cute.Tensor, row: Int32, lane: Int32
    ) -> Float32:
        """Write the gradients of one row, by one warp; return the lane's share of the sum."""
        spec, vector = self.spec, self.vector
        columns = Int32(dy.shape[1])
        factor: Any = None
        if cutlass.const_expr(probs is not None):
            factor = probs[row].to(Float32)
        total = Float32(0)
        parts = cute.make_rmem_tensor((vector, 2 if spec.gated else 1, BATCH_BACKWARD), x.element_type)
        upper = cute.make_rmem_tensor((vector, BATCH_BACKWARD), x.element_type)
        for first in cutlass.range(lane * vector, columns + lane * vector, BATCH_BACKWARD * LANES * vector, unroll=1):
            for i in cutlass.range_constexpr(BATCH_BACKWARD):
                column = cutlass.min(first + i * LANES * vector, columns - vector)
                cute.autovec_copy(neighbours(dy, row, column, vector), upper[None, i])
                load_halves(spec, x, row, column, columns, parts[None, None, i])
            for i in cutlass.range_constexpr(BATCH_BACKWARD):
                column = first + i * LANES * vector
                if column < columns:
                    held = parts[None, None, i]
                    total += self.differentiate(held, upper[None, i].load().to(Float32), factor)
                    store_halves(spec, dx, row, column, columns, held)
        return total

    @cute.jit
    def differentiate(self, parts: cute.Tensor, dy: Any, factor: Any) -> Float32:
        """Replace ``parts`` by their gradients; return the sum of ``dy A L``."""
        spec = self.spec
        vector, halves = parts.shape
        flat = cute.make_tensor(parts.iterator, cute.make_layout(vector * halves))
        wide = cute.make_rmem_tensor(vector * halves, Float32)
        wide.store(flat.load().to(Float32))
        total = Float32(0)
        for j in cutlass.range_constexpr(vector):
            g, u = halves_of(spec, parts, j)
            linear_half = None if cutlass.const_expr(u is None) else wide[u]
            found = gradients(spec, wide[g], linear_half, dy[j], factor, parts.element_type.width == 16)
            wide[g] = found.gate
            if cutlass.const_expr(u is not None):
                wide[u] = found.linear
            if cutlass.const_expr(factor is not None):
                total += found.probability
        flat.store(wide.load().to(parts.element_type))
        return total
