"""A warp's ring of slots in shared memory, which bulk copies fill with rows."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.memory import SmemAllocator

from ..pointers import aligned


class WarpRing(NamedTuple):
    """A warp's slots, and the full barrier of each."""

    data: Any
    full: Any


class RingShape:
    """The shape of rings: ``slots`` for each of ``warps``, of ``rows`` rows of ``columns`` columns each."""

    def __init__(self, slots: int, rows: int, columns: int, warps: int):
        self.slots, self.rows, self.columns, self.warps = slots, rows, columns, warps

    @cute.jit
    def allocate(self, smem: SmemAllocator, element: cutlass.Constexpr, warp: Int32) -> WarpRing:
        """Return the ring of this warp; all its lanes call it."""
        count = self.slots * self.rows * self.columns
        data = smem.allocate_tensor(element, cute.make_layout((count, self.warps)), byte_alignment=128)
        full = smem.allocate_array(Int64, num_elems=self.slots * self.warps) + warp * self.slots
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(self.slots):
                cute.arch.mbarrier_init(full + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        return WarpRing(data[None, warp].iterator, full)

    @cute.jit
    def fill(self, ring: WarpRing, matrix: cute.Tensor, column: Int32, row: Int32, high: Int32, slot: Int32):
        """Start copying the rows from ``row`` on into a free slot; past ``high`` its last row again."""
        if row < high:
            lane = cute.arch.lane_idx()
            width = cutlass.min(Int32(self.columns), matrix.shape[1] - column)
            size = width * (matrix.element_type.width // 8)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + slot, size * self.rows)
            cute.arch.sync_warp()
            if lane < self.rows:
                source = Int64(cutlass.min(row + lane, high - 1)) * matrix.stride[0] + column
                sink = ring.data + (slot * self.rows + lane) * self.columns
                _bulk_copy(sink, matrix.iterator + source, ring.full + slot, size)

    @cute.jit
    def wait(self, ring: WarpRing, slot: Int32, turn: Int32):
        """Wait until a slot is full; ``turn`` alternates between 0 and 1 with every round of the ring."""
        cute.arch.mbarrier_wait(ring.full + slot, turn)

    @cute.jit
    def read(self, ring: WarpRing, slot: Int32, row: cutlass.Constexpr, column: Int32, fragment: cute.Tensor):
        """Load adjacent elements of a row of a full slot into registers."""
        source = ring.data + ((slot * self.rows + row) * self.columns + column)
        width = cute.size(fragment) * source.dtype.width // 8
        cute.autovec_copy(cute.make_tensor(aligned(source, width), cute.make_layout(cute.size(fragment))), fragment)


@dsl_user_op
def _bulk_copy(sink: Any, source: Any, full: Any, size: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Copy ``size`` bytes from global to shared memory, counted on the barrier; multiples of 16, like the addresses."""
    pointers = [pointer.to_llvm_ptr(loc=loc, ip=ip) for pointer in (sink, source, full)]
    nvvm.cp_async_bulk_shared_cluster_global(*pointers, Int32(size).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
