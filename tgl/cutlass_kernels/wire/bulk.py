"""Rows to the memory of the ranks that they go to by bulk copies: through shared memory, in pieces of a few KB.

What is copied is what ``Move`` copies. A lane says where a piece comes from and where it goes to, and copies on their
own do the rest, so that bytes in flight take neither registers nor lanes. A warp works on the pieces of ``ITEMS`` lanes
at a time; while those of one stage leave, those of the other one come. Neighbouring lanes have neighbouring pieces, and
a lane's next piece goes to another rank, whatever divides the number of lanes.

A link of 400 GB/s is 3 KB in a microsecond for each of 132 multiprocessors, of which 48 KB or more are on their way.

What a bulk copy writes to a peer, this kernel's threads wait for: not only until shared memory has been read
(``cp.async.bulk.wait_group.read``), but until the copies are complete (``cp.async.bulk.wait_group 0``), which in the
PTX ISA includes that their writes are visible to the thread that has asked for them. The asynchronous proxy is left
with that: the ISA puts an implicit proxy fence behind the completion of a bulk copy. From there on it is as with stores
of the thread itself: they come before the end of the kernel, which comes before the barrier that is launched next, and
its release of the whole system before the count that the peer acquires. No ``fence.proxy.async`` is needed there, nor
between the two copies of a piece, which are of one proxy and one block: the barrier in shared memory orders them, and
the completed read of a slot comes before the copy that fills it anew.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from .. import bulk
from ..permute.cut import Cut
from ..tiles import ceil_div
from .move import Move, beyond, spread

LANES = 32
WARPS = 4
ITEMS = 3  # lanes of a warp that copy
STAGES = 2
PIECE = 4096  # bytes at most: a multiple of what a link takes at a time
LINE = 128  # bytes, on which pieces begin in a row


class Given(NamedTuple):
    """Operands of ``Move``."""

    rows: cute.Tensor
    which: Any
    table: cute.Tensor
    out: cute.Tensor
    home: Any
    rank: Int32


class BulkMove(Move):
    """``Move`` by a grid that stays.

    Args:
        cut, by, remote, around: of ``Move``; accesses have 16 bytes.
        blocks: at most.
    """

    threads = LANES * WARPS

    def __init__(self, cut: Cut, by: str | None, remote: bool, around: bool, blocks: int):
        super().__init__(cut, by, remote, around)
        self.most = blocks

    def grid(self, out: cute.Tensor) -> Int32:
        """As many blocks as there are pieces for."""
        pieces, _ = dealt(out)
        return cutlass.min(self.most, ceil_div(Int32(out.shape[0]) * pieces, WARPS * ITEMS))

    @cute.kernel
    def kernel(
        self,
        rows: cute.Tensor,
        which: cute.Tensor | None,
        table: cute.Tensor,
        out: cute.Tensor,
        home: cute.Tensor | None,
        rank: Int32,
    ):
        """Every so many pieces, beginning with some of its own."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        width = PIECE * 8 // rows.element_type.width
        slots = smem.allocate_tensor(
            rows.element_type, cute.make_layout((width, ITEMS, STAGES, WARPS)), byte_alignment=LINE
        )
        full = smem.allocate_array(Int64, num_elems=STAGES * WARPS) + warp * STAGES
        if lane == 0:
            for i in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + i, ITEMS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        given = Given(rows, which, table, out, home, rank)
        pieces, _ = dealt(out)
        own, all_lanes = (block * WARPS + warp) * ITEMS + lane, blocks * (WARPS * ITEMS)
        turns = ceil_div(Int32(out.shape[0]) * pieces, all_lanes)
        sink, size = Int64(0), Int32(0)
        for turn in cutlass.range(turns + 1, unroll=1):
            # The stores of the turn before last have left the slots that are filled now.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            next_sink, next_size, stage = Int64(0), Int32(0), turn % STAGES
            if turn < turns and lane < ITEMS:
                item = turn * all_lanes + (own + turn) % all_lanes
                source, next_sink, next_size = self.piece(given, item)
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, next_size)
                if next_size > 0:
                    slot = slots[None, lane, stage, warp].iterator
                    bulk.load(slot, reached(source, rows.element_type), full + stage, next_size)
            if turn > 0:
                before = (turn - 1) % STAGES
                cute.arch.mbarrier_wait(full + before, (turn - 1) // STAGES % 2)
                if size > 0:
                    bulk.store(reached(sink, rows.element_type), slots[None, lane, before, warp].iterator, size)
                cute.arch.cp_async_bulk_commit_group()
            sink, size = next_sink, next_size
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def piece(self, given: Given, item: Int32) -> tuple[Int64, Int64, Int32]:
        """Where a piece comes from and goes to, and its bytes, 0 of one of nobody."""
        rows, which, table, out, home, rank = given
        ranks, places = Int32(cute.size(table)), Int32(out.shape[0])
        pieces, step = dealt(out)
        number = item // pieces
        first = (item - number * pieces) * step
        source, sink, size = Int64(0), Int64(0), Int32(0)
        if number < places:
            peer, at = spread(number, ranks, rank)
            row = self.source(which, peer, at, peer * (places // ranks) + at, Int32(rows.shape[0]), rank)
            if row >= 0:
                source = address(rows, row, first)
                if cutlass.const_expr(self.remote):
                    to = rank * (places // ranks) + at
                    sink = address(beyond(out, table, peer, rank), to, first)
                    if cutlass.const_expr(home is not None):  # noqa: SIM102 (one is known while tracing, the other is not)
                        if peer == rank:
                            sink = address(home, to, first)
                else:
                    sink = address(out, peer * (places // ranks) + at, first)
                size = cutlass.min(step, row_bytes(out) - first)
        return source, sink, size


def row_bytes(out: cute.Tensor) -> Int32:
    """Of a row without what lies behind it."""
    return Int32(out.shape[1]) * (out.element_type.width // 8)


def dealt(out: cute.Tensor) -> tuple[Int32, Int32]:
    """Pieces of a row, as few as may be, and the bytes from one to the next."""
    pieces = ceil_div(row_bytes(out), PIECE)
    return pieces, ceil_div(ceil_div(row_bytes(out), pieces), LINE) * LINE


def address(matrix: cute.Tensor, row: Int32, first: Int32) -> Int64:
    """Of a byte of a row."""
    element = matrix.element_type.width // 8
    return Int64(matrix.iterator.toint()) + Int64(row) * (Int64(matrix.stride[0]) * element) + first


def reached(place: Int64, element: Any) -> Any:
    """The pointer to an address that is a multiple of 16."""
    return cute.make_ptr(element, place, cute.AddressSpace.gmem, assumed_align=16)
