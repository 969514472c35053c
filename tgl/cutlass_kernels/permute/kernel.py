"""Dispatch, combine and its backward, each in one launch and one pass over memory, without atomics.

Every token has its own lanes, which read the rows of its top-k slots from ``position``. So dispatch reads a token once
and writes it to all its rows, where a gather by rows would read it once per row, and combine adds a token's rows in the
order of its slots. A row without a token (see ``token``) is zeroed by the lanes of the token whose slots would have the
rows around it. A place out of range is neither read nor written.

The data in flight must be memory bandwidth times latency: 4.8 TB/s times 0.8 us is 3.8 MB, 29 KB for each of 132
multiprocessors. A lane has at least ``LOADS`` pieces of 16 bytes to read, with two or more in flight. At up to 64
registers, 1,024 lanes or more fit on a multiprocessor: 32 KB with two pieces, 64 KB with four. The backward has up to
128 registers, hence 512 lanes or more, which read ``LOADS`` pieces of ``y``, or those of a token's ten rows, beside
those of ``grad``.

=================  =================================================================================================
class              lanes
=================  =================================================================================================
Dispatch, Combine  ``across`` on ``strips`` pieces of a token's row, so that few tokens of many columns fill the device
CombineBackward    a warp on a whole token, whose dot products are sums over all columns: lane by lane, then across
=================  =================================================================================================
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int16, Int32, Int64, cute
from cutlass._mlir.dialects import llvm

from .. import instructions
from ..activation.kernel import clear_row, neighbours
from ..scheduler import ceil_div
from .tiling import LANES, PermuteTiling

THREADS = 256


@cute.jit
def place(places: cute.Tensor, index: Int32, count: Int32) -> Int32:
    """Return entry ``index`` of ``places``, -1 if it is not below ``count``."""
    found = places[index]
    row = Int32(-1)
    if found >= 0 and found < count:
        row = Int32(found)
    return row


@cute.jit
def weight(weights: cute.Tensor, token: Int32, choice: Int32, row: Int32) -> Float32:
    """Return the slot's weight, 0 for a slot without a row."""
    value = Float32(0.0)
    if row >= 0:
        value = weights[token, choice].to(Float32)
    return value


class Access(NamedTuple):
    """A PTX access to a piece of a row: the instruction's suffix, its registers, their constraint and their type."""

    suffix: str
    registers: int
    constraint: str
    word: Any


ACCESSES = {
    16: Access("v4.b32", 4, "r", Int32),
    8: Access("v2.b32", 2, "r", Int32),
    4: Access("b32", 1, "r", Int32),
    2: Access("b16", 1, "h", Int16),
}
"""The accesses by their number of bytes."""


def widest(vector: int, element: Any) -> int:
    """Return the elements of one access, for ``vector`` adjacent elements."""
    return min(vector, max(ACCESSES) * 8 // element.width)


def _reached(rows: cute.Tensor, row: Int32, column: Int32, held: cute.Tensor) -> tuple[Access, cute.Tensor, list]:
    """Return the access to a piece, its registers as words, and the operands: address, and whether it is in the row."""
    access = ACCESSES[cute.size(held) * held.element_type.width // 8]
    address = neighbours(rows, cutlass.max(row, Int32(0)), column, cute.size(held)).iterator.toint()
    present = Int32((row >= 0) & (column < rows.shape[1]))
    return access, cute.recast_tensor(held, access.word), [Int64(address).ir_value(), present.ir_value()]


def load(rows: cute.Tensor, row: Int32, column: Int32, held: cute.Tensor):
    """Load a piece of a row into registers; zeros for row -1 and past the last column.

    The load is predicated: around a branch, the compiler would wait for one load before it issues the next.
    """
    access, words, operands = _reached(rows, row, column, held)
    count = access.registers
    names = [f"${i}" for i in range(count)]
    taken = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    kind = access.suffix.rpartition(".")[2]
    zeros = " ".join(f"mov.{kind} {name}, 0;" for name in names)
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros} @p ld.global.{access.suffix} {taken}, [${count}]; }}"
    )
    word = access.word.mlir_type
    result = word if count == 1 else llvm.StructType.get_literal([word] * count)
    constraints = ",".join([f"=&{access.constraint}"] * count + ["l", "r"])
    loaded = llvm.inline_asm(result, operands, text, constraints, has_side_effects=True)
    for i in range(count):
        words[i] = access.word(loaded if count == 1 else llvm.extractvalue(word, loaded, [i]))


def store(rows: cute.Tensor, row: Int32, column: Int32, held: cute.Tensor):
    """Store a piece of a row, the inverse of ``load``; nothing is written for row -1 and past the last column."""
    access, words, operands = _reached(rows, row, column, held)
    count = access.registers
    names = [f"${i + 2}" for i in range(count)]
    given = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    text = f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.global.{access.suffix} [$0], {given}; }}"
    operands += [words[i].ir_value() for i in range(count)]
    constraints = ",".join(["l", "r", *[access.constraint] * count])
    llvm.inline_asm(None, operands, text, constraints, has_side_effects=True)


class TopKSlots:
    """The top-k slots of a token, batch by batch; common to the kernels.

    Args:
        cut: the tiling of rows and slots; its ``vector`` divides the number of columns, the pitch of rows and the
            alignment of all of them.
    """

    def __init__(self, cut: PermuteTiling):
        self.cut = cut

    def batch(
        self, of: Callable[..., Int32], places: cute.Tensor, token: Int32, count: Int32, first: Any
    ) -> list[Int32]:
        """Return ``of`` each top-k slot of a batch, from ``first`` on."""
        return [of(places, token, count, first + j) for j in range(self.cut.batch)]

    @cute.jit
    def row_of(self, position: cute.Tensor, token: Int32, count: Int32, choice: Int32) -> Int32:
        """Return the slot's row, -1 if it has none of ``count``."""
        row = Int32(-1)
        if token >= 0 and choice < self.cut.top_k:
            row = place(position, token * self.cut.top_k + choice, count)
        return row

    @cute.jit
    def absent_row(self, owners: cute.Tensor, token: Int32, count: Int32, choice: Int32) -> Int32:
        """Return the row with the slot's number if it belongs to none of ``count`` tokens, else -1."""
        row = Int32(-1)
        at = token * self.cut.top_k + choice
        if choice < self.cut.top_k and at < owners.shape[0]:
            row = self.absent(owners, at, count)
        return row

    @cute.jit
    def absent(self, owners: cute.Tensor, row: Int32, count: Int32) -> Int32:
        """Return the row if it belongs to none of ``count`` tokens, else -1."""
        found = Int32(-1)
        if place(owners, row, count) < 0:
            found = row
        return found

    def column(self, first: Int32, strip: int) -> Int32:
        """Return the first column of a lane's piece of a strip."""
        return first + strip * self.cut.across * self.cut.vector

    @cute.jit
    def share(self, columns: Int32) -> tuple[Int32, Int32]:
        """Return the lane's token, and the first column of its pieces."""
        cut = self.cut
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        team = block * (THREADS // cut.across) + thread // cut.across
        shares = ceil_div(columns, cut.across * cut.vector * cut.strips)
        token = team // shares
        first = (team - token * shares) * (cut.strips * cut.across * cut.vector)
        return token, first + thread % cut.across * cut.vector

    def blocks(self, tokens: Int32, columns: Int32) -> Int32:
        """Return the number of blocks that ``share`` needs; tensors on a GPU have fewer than 2^31 shares."""
        shares = ceil_div(columns, self.cut.across * self.cut.vector * self.cut.strips)
        return ceil_div(tokens * shares, THREADS // self.cut.across)


class RoutingTables(NamedTuple):
    """Tables of a routing: the token of every row, the row of every top-k slot, and the weights of slots or None."""

    owners: cute.Tensor
    position: cute.Tensor
    weights: Any


class CombineKernel(TopKSlots):
    """The combine kernel, ``out[s] = sum over j of weights[s, j] y[position[s, j]]``, summed in float32."""

    @cute.jit
    def __call__(
        self,
        y: cute.Tensor,
        position: cute.Tensor,
        weights: cute.Tensor | None,
        out: cute.Tensor,
        overlap: Int32,
        stream,
    ):
        """Launch.

        Args:
            y: ``[T, H]``, unit stride along rows.
            position: int32 or int64 ``[S k]``.
            weights: ``[S, k]`` or None.
            out: ``[S, H]`` like y, of any dtype; S and H at least 1.
            overlap: whether the kernel overlaps the launch before it, see ``overlap``.
            stream: CUDA stream.
        """
        self.kernel(y, position, weights, out).launch(
            grid=(self.blocks(Int32(out.shape[0]), Int32(out.shape[1])), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=instructions.attribute(overlap),
        )

    @cute.kernel
    def kernel(self, y: cute.Tensor, position: cute.Tensor, weights: cute.Tensor | None, out: cute.Tensor):
        """Combine some strips of some tokens."""
        instructions.follow()
        token, first = self.share(Int32(out.shape[1]))
        if token >= out.shape[0]:
            token = Int32(-1)  # no slots and no result, but all lanes of a warp stay together
        self.total(y, position, weights, token, first, out)

    @cute.jit
    def total(self, y: cute.Tensor, position: cute.Tensor, weights: Any, token: Int32, first: Int32, out: cute.Tensor):
        """Form a token's sums, by the lanes of a warp together; nothing for token -1."""
        cut, total = self.cut, self.zeros()
        if cutlass.const_expr(cut.batch == cut.top_k):
            self.add(y, position, weights, token, 0, first, total)
        else:
            for choice in cutlass.range(0, cut.top_k, cut.batch, unroll=1):
                self.add(y, position, weights, token, choice, first, total)
        self.put(total, token, first, out)

    def zeros(self) -> cute.Tensor:
        """Return zeroed sums."""
        total = cute.make_rmem_tensor((self.cut.vector, self.cut.strips), Float32)
        total.fill(0.0)
        return total

    @cute.jit
    def put(self, total: cute.Tensor, token: Int32, first: Int32, out: cute.Tensor):
        """Store sums."""
        cut = self.cut
        for i in cutlass.range_constexpr(cut.strips):
            rounded = cute.make_rmem_tensor(cut.vector, out.element_type)
            rounded.store(total[None, i].load().to(out.element_type))
            width = widest(cut.vector, out.element_type)  # results may be wider than the operands
            for part in cutlass.range_constexpr(cut.vector // width):
                piece = cute.local_tile(rounded, (width,), (part,))
                store(out, token, self.column(first, i) + part * width, piece)

    @cute.jit
    def add(
        self,
        y: cute.Tensor,
        position: cute.Tensor,
        weights: Any,
        token: Int32,
        choice: Any,
        first: Int32,
        total: cute.Tensor,
    ):
        """Add the rows of a batch of slots."""
        rows = self.batch(self.row_of, position, token, Int32(y.shape[0]), choice)
        cute.arch.sync_warp()  # otherwise the compiler loads some rows before it loads the places of others
        self.add_lines([(y, row) for row in rows], weights, token, choice, first, total)

    @cute.jit
    def add_lines(self, lines: Any, weights: Any, token: Int32, choice: Any, first: Int32, total: cute.Tensor):
        """Add ``(rows, number)`` of every slot of a batch, with all loads issued before the first is added."""
        cut = self.cut
        held = cute.make_rmem_tensor((cut.vector, cut.strips, cut.batch), lines[0][0].element_type)
        for j in cutlass.range_constexpr(cut.batch):
            rows, row = lines[j]
            for i in cutlass.range_constexpr(cut.strips):
                load(rows, row, self.column(first, i), held[None, i, j])
        for j in cutlass.range_constexpr(cut.batch):
            factor = Float32(1.0)
            if cutlass.const_expr(weights is not None):
                factor = weight(weights, token, choice + j, lines[j][1])
            for i in cutlass.range_constexpr(cut.strips):
                value = held[None, i, j].load().to(Float32)
                if cutlass.const_expr(weights is not None):
                    value = value * factor
                total[None, i].store(total[None, i].load() + value)


class DispatchKernel(TopKSlots):
    """The dispatch kernel, ``out[position[s, j]] = weights[s, j] x[s]``.

    Args:
        cut: see ``TopKSlots``.
        tail: whether rows without a token are zeroed.
    """

    def __init__(self, cut: PermuteTiling, tail: bool = True):
        super().__init__(cut)
        self.tail = tail

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        owners: cute.Tensor,
        position: cute.Tensor,
        weights: cute.Tensor | None,
        out: cute.Tensor,
        overlap: Int32,
        stream,
    ):
        """Launch.

        Args:
            x: ``[S, H]``, unit stride along rows; S and H at least 1.
            owners: int32 or int64 ``[T]``, the token of every row; T at least 1.
            position: int32 or int64 ``[S k]``.
            weights: ``[S, k]`` or None.
            out: ``[T, H]`` like x.
            overlap: as for ``CombineKernel``.
            stream: CUDA stream.
        """
        self.kernel(x, RoutingTables(owners, position, weights), out).launch(
            grid=(self.blocks(Int32(x.shape[0]), Int32(x.shape[1])), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=instructions.attribute(overlap),
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, routing: RoutingTables, out: cute.Tensor):
        """Dispatch some strips of some tokens."""
        instructions.follow()
        cut = self.cut
        tokens, rows = Int32(x.shape[0]), Int32(out.shape[0])
        token, first = self.share(Int32(x.shape[1]))
        if token < tokens:
            held = cute.make_rmem_tensor((cut.vector, cut.strips), x.element_type)
            for i in cutlass.range_constexpr(cut.strips):
                load(x, token, self.column(first, i), held[None, i])
            if cutlass.const_expr(cut.batch == cut.top_k):
                self.spread(held, routing, out, token, tokens, 0, first)
            else:
                for choice in cutlass.range(0, cut.top_k, cut.batch, unroll=1):
                    self.spread(held, routing, out, token, tokens, choice, first)
            if cutlass.const_expr(self.tail):  # more rows than slots
                for row in cutlass.range(tokens * cut.top_k + token, rows, tokens, unroll=1):
                    if place(routing.owners, row, tokens) < 0:
                        self.clear(out, row, first)

    @cute.jit
    def spread(
        self,
        held: cute.Tensor,
        routing: RoutingTables,
        out: cute.Tensor,
        token: Int32,
        tokens: Int32,
        choice: Any,
        first: Int32,
    ):
        """Write the token's pieces to the rows of a batch of slots, and zeros to unused rows with their numbers."""
        cut, weights = self.cut, routing.weights
        rows = self.batch(self.row_of, routing.position, token, Int32(out.shape[0]), choice)
        absent = self.batch(self.absent_row, routing.owners, token, tokens, choice) if self.tail else []
        for j in cutlass.range_constexpr(cut.batch):
            factor = Float32(1.0)
            if cutlass.const_expr(weights is not None):
                factor = weight(weights, token, choice + j, rows[j])
            for i in cutlass.range_constexpr(cut.strips):
                piece = held[None, i]
                if cutlass.const_expr(weights is not None):
                    piece = weighted(held[None, i], factor)
                store(out, rows[j], self.column(first, i), piece)
        for j in cutlass.range_constexpr(len(absent)):
            if absent[j] >= 0:
                self.clear(out, absent[j], first)

    @cute.jit
    def clear(self, out: cute.Tensor, row: Int32, first: Int32):
        """Zero this lane's pieces of a row."""
        zeros = cute.make_rmem_tensor(self.cut.vector, out.element_type)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(self.cut.strips):
            store(out, row, self.column(first, i), zeros)


def weighted(held: cute.Tensor, factor: Float32) -> cute.Tensor:
    """Return a product in float32, rounded once."""
    piece = cute.make_rmem_tensor(cute.size(held), held.element_type)
    piece.store((held.load().to(Float32) * factor).to(held.element_type))
    return piece


class CombineBackwardKernel(TopKSlots):
    """The combine backward: ``dy[position[s, j]] = weights[s, j] grad[s]``, zeros in rows without a token, and
    ``dweights[s, j] = grad[s] . y[position[s, j]]``.
    """

    @cute.jit
    def __call__(
        self,
        grad: cute.Tensor,
        y: cute.Tensor,
        owners: cute.Tensor,
        position: cute.Tensor,
        weights: cute.Tensor,
        dy: cute.Tensor,
        dweights: cute.Tensor,
        stream,
    ):
        """Launch; ``across`` is a warp.

        Args:
            grad: ``[S, H]``, unit stride along rows; S and H at least 1.
            y: ``[T, H]`` like grad; T at least 1.
            owners: int32 or int64 ``[T]``, the token of every row.
            position: int32 or int64 ``[S k]``.
            weights: ``[S, k]``.
            dy: like y.
            dweights: float32 ``[S, k]``.
            stream: CUDA stream.
        """
        self.kernel(grad, y, RoutingTables(owners, position, weights), dy, dweights).launch(
            grid=(ceil_div(Int32(grad.shape[0]), THREADS // LANES), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=2,  # as many lanes as the bytes in flight need
            preferred_smem_carveout=15,  # in %, the rest is cache; without a number the compiler asks a driver
        )

    @cute.kernel
    def kernel(
        self,
        grad: cute.Tensor,
        y: cute.Tensor,
        routing: RoutingTables,
        dy: cute.Tensor,
        dweights: cute.Tensor,
    ):
        """Process one token per warp."""
        cut = self.cut
        block, _, _ = cute.arch.block_idx()
        tokens, rows = Int32(grad.shape[0]), Int32(dy.shape[0])
        token = block * (THREADS // LANES) + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if token < tokens:
            if cutlass.const_expr(cut.batch == cut.top_k):
                self.differentiate(grad, y, routing, dy, dweights, token, 0)
            else:
                for choice in cutlass.range(0, cut.top_k, cut.batch, unroll=1):
                    self.differentiate(grad, y, routing, dy, dweights, token, choice)
            # more rows than slots
            for row in cutlass.range(tokens * cut.top_k + token, rows, tokens, unroll=1):
                if place(routing.owners, row, tokens) < 0:
                    clear_row(dy, row, cute.arch.lane_idx(), cut.vector)

    @cute.jit
    def differentiate(
        self,
        grad: cute.Tensor,
        y: cute.Tensor,
        routing: RoutingTables,
        dy: cute.Tensor,
        dweights: cute.Tensor,
        token: Int32,
        choice: Any,
    ):
        """Differentiate a batch of slots, by one warp.

        Values that belong to one slot are kept in the lane of its number and shuffled to all lanes on use: keeping them
        in every lane would leave too few registers for the rows.
        """
        cut, lane = self.cut, cute.arch.lane_idx()
        columns, tokens, places = Int32(grad.shape[1]), Int32(grad.shape[0]), Int32(y.shape[0])
        row, absent, factor = Int32(-1), Int32(-1), Float32(0.0)
        if lane < cut.batch:
            row = self.row_of(routing.position, token, places, choice + lane)
            absent = self.absent_row(routing.owners, token, tokens, choice + lane)
            factor = weight(routing.weights, token, choice + lane, row)
        dots = cute.make_rmem_tensor(cut.batch, Float32)
        dots.fill(0.0)
        upper = cute.make_rmem_tensor((cut.vector, cut.strips), grad.element_type)
        held = cute.make_rmem_tensor((cut.vector, cut.strips, cut.batch), y.element_type)
        for start in cutlass.range(0, columns, cut.strips * LANES * cut.vector, unroll=1):
            first = start + lane * cut.vector
            for j in cutlass.range_constexpr(cut.batch):
                own = cute.arch.shuffle_sync(row, j)
                for i in cutlass.range_constexpr(cut.strips):
                    load(y, own, self.column(first, i), held[None, i, j])
            for i in cutlass.range_constexpr(cut.strips):
                load(grad, token, self.column(first, i), upper[None, i])
            # Both branches are always taken, but the assembler cannot know that. In a single basic block it would
            # multiply the first rows, and wait for them, before it loads the last.
            if start - columns < places:
                for j in cutlass.range_constexpr(cut.batch):
                    for i in cutlass.range_constexpr(cut.strips):
                        products = upper[None, i].load().to(Float32) * held[None, i, j].load().to(Float32)
                        dots[j] += products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            if start - columns < tokens:
                for j in cutlass.range_constexpr(cut.batch):
                    own, own_factor = cute.arch.shuffle_sync(row, j), cute.arch.shuffle_sync(factor, j)
                    for i in cutlass.range_constexpr(cut.strips):
                        store(dy, own, self.column(first, i), weighted(upper[None, i], own_factor))
        dot = Float32(0.0)
        for j in cutlass.range_constexpr(cut.batch):
            total = dots[j]
            for i in cutlass.range_constexpr(5):
                total += cute.arch.shuffle_sync_bfly(total, 1 << i)
            if lane == j and row >= 0:  # without a row it may be NaN, as the token's own gradient may be
                dot = total
        if lane < cut.batch and choice + lane < cut.top_k:
            dweights[token, choice + lane] = dot
        for j in cutlass.range_constexpr(cut.batch):
            own = cute.arch.shuffle_sync(absent, j)
            if own >= 0:
                clear_row(dy, own, lane, cut.vector)
