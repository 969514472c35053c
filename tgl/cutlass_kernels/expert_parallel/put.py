"""Rows to the memory of the ranks that they go to, 16 bytes a lane, all of them: what a routing tells of itself.

Place ``d P + i`` of a rank is its row number i for rank d, and arrives as row ``r P + i`` from rank r, so that a row's
place follows from the sender's own counts. All ranks lay their memory out alike: a place in the memory of a peer is as
far from the place in one's own as the memories' addresses are apart.

Neighbouring rows go to different ranks, and every rank begins with another one, so that the links of all ranks are busy
from the beginning to the end.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..permute.kernel import THREADS, TopKSlots, load, store


class PutKernel(TopKSlots):
    """Rows to places.

    Args:
        cut: of a row; its ``vector`` divides the number of columns, the pitch and the alignment of both tensors.
    """

    @cute.jit
    def __call__(self, rows: cute.Tensor, table: cute.Tensor, out: cute.Tensor, rank: Int32, stream):
        """Launch.

        Args:
            rows: ``[W P, H]``, unit stride along rows; W P and H at least 1.
            table: of ``Peers``.
            out: ``[W P, H]`` like rows, a part of this rank's memory.
            rank: this one.
            stream: CUDA stream.
        """
        self.kernel(rows, table, out, rank).launch(
            grid=(self.blocks(Int32(out.shape[0]), Int32(out.shape[1])), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, rows: cute.Tensor, table: cute.Tensor, out: cute.Tensor, rank: Int32):
        """Some strips of some places."""
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
    """A rank, and a row for it: neighbouring numbers go to different ranks, beginning with the own one."""
    at = number // ranks
    return (number - at * ranks + rank) % ranks, at


@cute.jit
def beyond(part: cute.Tensor, table: cute.Tensor, peer: Int32, rank: Int32) -> cute.Tensor:
    """The part of a peer's memory that corresponds to a part of this rank's."""
    return further(part, table[peer] - table[rank])


def further(part: cute.Tensor, away: Int64) -> cute.Tensor:
    """A part that lies so many bytes away."""
    pointer = part.iterator
    moved = cute.make_ptr(
        part.element_type, pointer.toint() + away, cute.AddressSpace.gmem, assumed_align=pointer.alignment
    )
    return cute.make_tensor(moved, part.layout)
