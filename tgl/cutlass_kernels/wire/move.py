"""Rows to the memory of the ranks that they go to, and rows that came out of this rank's memory, 16 bytes a lane.

Place ``d P + i`` of a rank is its row number i for rank d, and arrives as row ``r P + i`` from rank r, so that a row's
place follows from the sender's own counts. All ranks lay their memory out alike: a place in the memory of a peer is as
far from the place in one's own as the memories' addresses are apart.

Neighbouring rows go to different ranks, and every rank begins with another one, so that the links of all ranks are busy
from the beginning to the end. The link takes 450 GB/s a direction at best, a tenth of what the memory of an H200 reads,
so a row that goes to several ranks is read again for each: a kernel that holds it would have to know all its places.
A token of this rank's own experts need not go through memory that others write to: it is stored where it will be read.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..permute.cut import Cut
from ..permute.kernel import THREADS, Choices, load, place, store

BY = (None, "owners", "arrived")
"""What tells the row for a place: the place itself; the token of the place; the place, if so many rows have arrived."""


class Move(Choices):
    """Rows to places.

    Args:
        cut: of a row; its ``vector`` divides the number of columns, the pitch and the alignment of both tensors.
        by: one of ``BY``.
        remote: whether a place is one in the memory of the rank it stands for, or in ``out``.
        around: whether this rank's own rows go around its memory: to ``home`` if remote, else they are there already.
    """

    def __init__(self, cut: Cut, by: str | None, remote: bool, around: bool = False):
        super().__init__(cut)
        self.by, self.remote, self.around = by, remote, around

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        which: cute.Tensor | None,
        table: cute.Tensor,
        out: cute.Tensor,
        home: cute.Tensor | None,
        rank: Int32,
        stream,
    ):
        """Launch.

        Args:
            rows: ``[R, H]``, unit stride along rows; R and H at least 1.
            which: int32 ``[W P]`` owners, of which -1 has none, or int32 ``[W]`` numbers of rows from every rank.
            table: of ``Peers``.
            out: ``[W P, H]`` like rows; if remote, a part of this rank's memory.
            home: ``[W P, H]`` like rows, where own ones go if remote and ``around``, else None.
            rank: this one.
            stream: CUDA stream.
        """
        self.kernel(rows, which, table, out, home, rank).launch(
            grid=(self.blocks(Int32(out.shape[0]), Int32(out.shape[1])), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

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
        """Some strips of some places."""
        ranks, places = Int32(cute.size(table)), Int32(out.shape[0])
        number, first = self.share(Int32(out.shape[1]))
        if number < places:
            peer, at = spread(number, ranks, rank)
            source = self.source(which, peer, at, peer * (places // ranks) + at, Int32(rows.shape[0]))
            there = rank if cutlass.const_expr(self.around and not self.remote) else Int32(-1)
            if peer == there:
                source = Int32(-1)
            if source >= 0:
                held = cute.make_rmem_tensor((self.cut.vector, self.cut.strips), rows.element_type)
                for i in cutlass.range_constexpr(self.cut.strips):
                    load(rows, source, self.column(first, i), held[None, i])
                target, to = out, peer * (places // ranks) + at
                if cutlass.const_expr(self.remote):
                    target, to = beyond(out, table, peer, rank), rank * (places // ranks) + at
                if cutlass.const_expr(home is not None):
                    here = Int32(-1)
                    if peer == rank:
                        here, to = to, Int32(-1)
                    for i in cutlass.range_constexpr(self.cut.strips):
                        store(home, here, self.column(first, i), held[None, i])
                for i in cutlass.range_constexpr(self.cut.strips):
                    store(target, to, self.column(first, i), held[None, i])

    @cute.jit
    def source(self, which: Any, peer: Int32, at: Int32, own: Int32, count: Int32) -> Int32:
        """The row for a place, -1 for none."""
        row = own
        if cutlass.const_expr(self.by == "owners"):
            row = place(which, own, count)
        if cutlass.const_expr(self.by == "arrived"):
            least = Int32(1 if self.remote else 0)  # all read row 0 as the answer of a step that did not fit
            if at >= cutlass.max(which[peer], least):
                row = Int32(-1)
        return row


@cute.jit
def spread(number: Int32, ranks: Int32, rank: Int32) -> tuple[Int32, Int32]:
    """A rank, and a row for it: neighbouring numbers go to different ranks, beginning with the own one."""
    at = number // ranks
    return (number - at * ranks + rank) % ranks, at


@cute.jit
def beyond(part: cute.Tensor, table: cute.Tensor, peer: Int32, rank: Int32) -> cute.Tensor:
    """The part of a peer's memory that corresponds to a part of this rank's."""
    pointer = part.iterator
    address = pointer.toint() + (table[peer] - table[rank])
    moved = cute.make_ptr(part.element_type, address, cute.AddressSpace.gmem, assumed_align=pointer.alignment)
    return cute.make_tensor(moved, part.layout)
