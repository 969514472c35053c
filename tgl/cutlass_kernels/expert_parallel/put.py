"""Put rows into the memory of their destination ranks, 16 bytes per lane, as a routing defines them.

Place ``d P + i`` of a rank is its row number i for rank d, and arrives as row ``r P + i`` from rank r, so that a row's
place follows from the sender's own counts. All ranks have the same memory layout: a place in a peer's memory is as far
from the place in one's own as the base addresses are apart.

Adjacent rows go to different ranks, and every rank begins with a different one, so that all links are busy throughout.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..permute.kernel import THREADS, TopKSlots, load, store


class PutKernel(TopKSlots):
    """Put rows at their places in the memory of other ranks.

    Args:
        cut: tiling of a row; its ``vector`` divides the number of columns, the pitch and the alignment of both tensors.
    """

    @cute.jit
    def __call__(self, rows: cute.Tensor, table: cute.Tensor, out: cute.Tensor, rank: Int32, stream):
        """Launch.

        Args:
            rows: ``[W P, H]``, unit stride along rows; W P and H at least 1.
            table: the table of ``Peers``.
            out: ``[W P, H]`` like rows, a part of this rank's memory.
            rank: this rank.
            stream: CUDA stream.
        """
        self.kernel(rows, table, out, rank).launch(
            grid=(self.blocks(Int32(out.shape[0]), Int32(out.shape[1])), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, rows: cute.Tensor, table: cute.Tensor, out: cute.Tensor, rank: Int32):
        """Copy some strips of some places."""
        ranks, places = Int32(cute.size(table)), Int32(out.shape[0])
        number, first = self.share(Int32(out.shape[1]))
        if number < places:
            peer, at = spread(number, ranks, rank)
            source, to = peer * (places // ranks) + at, rank * (places // ranks) + at
            held = cute.make_rmem_tensor((self.cut.vector, self.cut.strips), rows.element_type)
            for i in cutlass.range_constexpr(self.cut.strips):
                load(rows, source, self.column(first, i), held[None, i])
            target = beyond(out, table, peer, rank)
            for i in cutlass.range_constexpr(self.cut.strips):
                store(target, to, self.column(first, i), held[None, i])


@cute.jit
def spread(number: Int32, ranks: Int32, rank: Int32) -> tuple[Int32, Int32]:
    """Return a rank and a row for it: adjacent numbers go to different ranks, beginning with the own one."""
    at = number // ranks
    return (number - at * ranks + rank) % ranks, at


@cute.jit
def beyond(part: cute.Tensor, table: cute.Tensor, peer: Int32, rank: Int32) -> cute.Tensor:
    """Return the part of a peer's memory that corresponds to a part of this rank's."""
    return further(part, table[peer] - table[rank])


def further(part: cute.Tensor, away: Int64) -> cute.Tensor:
    """Return the same part at a distance of ``away`` bytes."""
    pointer = part.iterator
    moved = cute.make_ptr(
        part.element_type, pointer.toint() + away, cute.AddressSpace.gmem, assumed_align=pointer.alignment
    )
    return cute.make_tensor(moved, part.layout)
