"""FP8 quantisation with a scale per group from its amax: x is read twice, the second time ideally from L2.

A block processes tickets of ``two_pass``. Warps, lanes and values are as in ``fp8``; the last warp draws the next
ticket while the loads of x are in flight.
"""

import functools

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.memory import SmemAllocator

from .. import instructions
from ..bits import INFINITY, NAN
from . import two_pass
from .fp8 import UNIT, QuantizeFP8Kernel, block_scale
from .lane_tile import COLUMNS, LANES, STEPS, VECTOR, WARPS
from .quantize_spec import FP8Spec
from .tensors import Destinations, QuantizeSource, source_of
from .tiles import ROWS, ColumnTile, group_place, matrix_place
from .two_pass import LOOK, NOTHING, TICKETS, PrepareKernel, Tiles

# L2 eviction policies of a line: evict last, or evict first.
KEEP, LET_GO = 0x14F0000000000000, 0x12F0000000000000


class QuantizeFP8GroupsKernel(QuantizeFP8Kernel):
    """The kernel for one ``FP8Spec`` without blocks and given scales."""

    def __init__(self, spec: FP8Spec):
        super().__init__(spec)
        # Limited by registers; with factors three blocks spill.
        self.blocks_per_sm = 3 if self.packed and spec.row_scale is None else 2

    @property
    def policy(self):
        """L2 cache policy of the codes, which are not read again."""
        return Int64(LET_GO)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        order: cute.Tensor | None,
        row_scale: cute.Tensor | None,
        noop: cute.Tensor | None,
        data: cute.Tensor | None,
        scale: cute.Tensor | None,
        amax: cute.Tensor | None,
        columnwise_data: cute.Tensor | None,
        columnwise_scale: cute.Tensor | None,
        columnwise_amax: cute.Tensor | None,
        shared: cute.Tensor,
        matrix_rows: Int32,
        multiprocessors: Int32,
        stream,
    ):
        """Launch both kernels.

        Args:
            x, offs, order, row_scale, noop, matrix_rows: see ``QuantizeSource``.
            data, scale, columnwise_data, columnwise_scale: as in ``QuantizeFP8Kernel``.
            amax, columnwise_amax: int32 ``[G]``, for the bits of the largest magnitudes.
            shared: int32, state shared by blocks; see ``two_pass`` and ``l2_chunks.words_shared``.
            multiprocessors: multiprocessors of the device, which determine the number of blocks.
            stream: CUDA stream.
        """
        source = QuantizeSource(x, offs, order, row_scale, noop, matrix_rows)
        out = Destinations(data, scale, amax, columnwise_data, columnwise_scale, columnwise_amax)
        grid = source.grid(COLUMNS)
        tiles = Tiles(offs, source.rows, matrix_rows, grid.across, grid.shape[0])
        PrepareKernel()(shared, tiles, stream)
        self.kernel(source, out, shared, tiles.across, tiles.number).launch(
            grid=(cutlass.min(multiprocessors * instructions.sharing(self.blocks_per_sm), 2 * tiles.number), 1, 1),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=instructions.sharing(self.blocks_per_sm),
            use_pdl=instructions.overlaps(),
            preferred_smem_carveout=40,
        )

    @cute.kernel
    def kernel(self, source: QuantizeSource, out: Destinations, words: cute.Tensor, across: Int32, number: Int32):
        """Process tickets until there are no more."""
        instructions.wait()  # for the initial state
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        turned = smem.allocate_tensor(Uint8, cute.make_layout(COLUMNS * ROWS), byte_alignment=128)
        seen = smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=128)
        known = smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=128)
        notes = smem.allocate_tensor(Int32, cute.make_layout(two_pass.NOTES), byte_alignment=16)
        tiles = Tiles(source.offs, source.rows, source.matrix_rows, across, number)
        shared = two_pass.shared_at(words.iterator, tiles)
        if not source.stopped():
            slot, group_known = Int32(0), Int32(-1)
            if thread < LANES:
                notes[two_pass.STAGE] = Int32(0)
                cute.arch.sync_warp()
                two_pass.draw_ticket(notes, slot, shared, tiles)
            cute.arch.sync_threads()
            work = notes[TICKETS + two_pass.WORK]
            while work != NOTHING:
                ticket = two_pass.ticket_at(notes, slot)
                tile, group = ticket.tile, ticket.group
                x, read = source_of(source, group, tile)
                unit = ticket.index // across
                k = ticket.index - unit * across
                values = cute.make_rmem_tensor((VECTOR, STEPS), self.source)
                self.load_tile(x, values, read, k, thread, cutlass.select_(work == LOOK, Int64(KEEP), Int64(LET_GO)))
                slot = 1 - slot
                if thread >= (WARPS - 1) * LANES:
                    two_pass.draw_ticket(notes, slot, shared, tiles)
                self.finish_tile(x, source.row_scale, values, read, k, thread)
                if work == LOOK:
                    self.look(values, seen, shared, ticket.index, thread)
                else:
                    if group_known != group:
                        top = two_pass.largest_of(shared, ticket.low, ticket.high, thread // LANES)
                        if thread % LANES == 0:
                            known[thread // LANES] = top
                        group_known = group
                    cute.arch.sync_threads()
                    if cutlass.const_expr(source.offs is not None):
                        place = group_place(source.offs, tiles.rows, unit, group, UNIT)
                    else:
                        place = matrix_place(source.matrix_rows, unit)
                    spot = ColumnTile(tile, read, group, unit, tiles.units, k, across, place)
                    made = self.write_scales(largest(known), ticket, out, thread)
                    self.quantize(values, made, x, spot, turned, out, thread)
                cute.arch.sync_threads()
                work = notes[TICKETS + slot * two_pass.TICKET + two_pass.WORK]

    def column_of(self, values, j: int):
        """Return a column's values, widened one by one, as they spill when widened together."""
        wide = cute.make_rmem_tensor(STEPS, Float32)
        for i in range(STEPS):
            wide[i] = values[j, i].to(Float32)
        return wide.load()

    @cute.jit
    def look(self, values, seen, shared, index, thread):
        """Publish the largest magnitude of a tile."""
        top = cute.arch.warp_redux_sync(self.lane_maximum(values), kind="max")
        if thread % LANES == 0:
            seen[thread // LANES] = top
        cute.arch.sync_threads()
        if thread == 0:
            top = largest(seen)
            if top > INFINITY:
                top = Int32(NAN)  # canonicalises NaN
            two_pass.tell(shared, index, top)

    @cute.jit
    def write_scales(self, bits, ticket, out, thread):
        """Compute the scale of a group with this largest magnitude; the group's first tile writes it."""
        made, inverse = block_scale(bits, self.spec)
        if ticket.index == ticket.low and thread == 0 and not ticket.tile.tail:
            if cutlass.const_expr(self.spec.rowwise):
                out.scale[ticket.group], out.amax[ticket.group] = inverse, bits
            if cutlass.const_expr(self.spec.columnwise):
                out.columnwise_scale[ticket.group], out.columnwise_amax[ticket.group] = inverse, bits
        return made

    @cute.jit
    def quantize(self, values, made, x, spot, turned, out, thread):
        """Quantise a tile by the scale of its group."""
        row_factors = cute.make_rmem_tensor(STEPS, Float32)
        column_factors = cute.make_rmem_tensor(VECTOR, Float32)
        row_factors.fill(made)
        column_factors.fill(made)
        if cutlass.const_expr(self.spec.rowwise):
            self.store_rows(values, row_factors, x, out.data, spot.tile, spot.k, thread)
        if cutlass.const_expr(self.spec.columnwise):
            self.turn_columns(values, column_factors, turned, thread)
            cute.arch.sync_threads()
            self.store_turned(turned, out.columnwise_data, x, spot.place, spot.k, thread)


def largest(parts) -> Int32:
    """Return the largest of the warps' maxima."""
    return functools.reduce(cutlass.max, [parts[w] for w in range(WARPS)])
