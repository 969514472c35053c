"""What overlap of exchanges and experts could win in a forward on paper, from measured parts and drawn routings.

    python benchmarks/expert_parallel_overlap_plan.py [--shapes qwen3-30b ...] [--left 16] [--bandwidth 2.8]

Nothing is run on a GPU. Four ranks with the tokens of ``expert_parallel_gpu``, every token choosing its experts at
random; rank 0 is followed. A GEMM goes through pieces of its rows, one behind the other; rows cross the link meanwhile,
as fast as by themselves. A piece begins when its rows are there, and its answers leave when they are summed and the
link is free. GEMMs that begin while rows are on their way leave ``left`` multiprocessors to those; where that is the
first of them, places of rows are found before the exchange begins.

``today``            one piece on all multiprocessors
``experts, n``       n groups of neighbouring experts of a rank: a token goes once for each group
``ranks``            the rank's own rows, then those of each other one as they arrive; FC2 of its own rows last, as
                     those answers need no link
``own, others``      the rank's own rows while all others arrive; FC2 of its own while the other answers leave
``tiles wait``       one FC1, whose tiles come in the order of ranks and wait for their rows; all else as today
``tiles wait, FC2``  and FC2 in pieces as with ``ranks``
``tokens, 2``        halves of the tokens

A GEMM's time is the larger of two. Of its tiles: what it takes today, times rounds of tiles over today's. Of its bytes:
weights of all groups with rows, once a piece, its rows and results over ``bandwidth``. Its rows are in tiles of whole
groups, so that more pieces have more rows of nobody. What GEMMs take today is what the layer takes less its exchange,
less the bytes of sums over ``bandwidth`` and 50 us for places of rows; two thirds of it are FC1. An exchange more costs
a barrier, 11 us, a launch more 3.

Columns: rows that cross the link, tiles of both GEMMs and bytes of weights that they read, over today's; ``exposed`` is
what the forward has in which no GEMM or sum runs; ms and TFLOP/s of the forward; ``won``, in percent of today.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from harness.command import choice, parser
from harness.expert_parallel import SHAPES, Shape
from torch import Tensor

from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.config import VARLEN_M, WIDTHS, GemmConfig

RANKS, MULTIPROCESSORS = 4, 132
PLACES, BARRIER, LAUNCH = 50.0, 11.0, 3.0  # us
ELEMENT = 2  # bytes
HEAD = ("form", "rows", "tiles", "weights", "exposed, ms", "forward, ms", "TFLOP/s", "won, %")


class Measured(NamedTuple):
    """Microseconds on four H100: of a forward of the layer, its ops, and their writes to other ranks alone."""

    layer: float
    route: float
    dispatch: float
    push: float
    combine: float
    answer: float


MEASURED = {
    "qwen3-30b": Measured(1662, 33.7, 277.6, 268.1, 275.7, 265.5),
    "deepseek-v3": Measured(5973, 31.9, 468.8, 456.0, 473.4, 455.6),
}


class Piece(NamedTuple):
    """Some rows of a rank's experts.

    Attributes:
        rows: ``[experts]``, those of each.
        tokens: rows of tokens that they are made of.
        link: of them, those that came over the link.
    """

    rows: Tensor
    tokens: int
    link: int


class Form(NamedTuple):
    """A way through a forward.

    Attributes:
        first: pieces of FC1, in order of arrival.
        second: pieces of FC2, whose answers leave in this order.
        order: of work, ``("first", i)`` or ``("second", i)``; a second one is FC2 and the sums.
        exact: whether the pieces of FC1 are tiles of one launch, so that rows of nobody are as many as today.
    """

    first: list[Piece]
    second: list[Piece]
    order: list[tuple[str, int]]
    exact: bool = False


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    choice(made, "--shapes", MEASURED)
    made.add_argument("--left", type=int, default=16, help="multiprocessors for an exchange")
    made.add_argument("--bandwidth", type=float, default=2.8, help="TB/s of a GPU's memory")
    return made.parse_args(argv)


# --- rows -------------------------------------------------------------------------------------------------------------


class Draw:
    """Choices of all ranks' tokens, ``[W, S, k]``, and what of them goes to rank 0."""

    def __init__(self, shape: Shape, ranks: int = RANKS) -> None:
        made = torch.Generator().manual_seed(0)
        self.local = shape.experts // ranks
        keys = torch.rand(ranks, shape.tokens, shape.experts, generator=made)
        self.choices = keys.topk(shape.top_k).indices

    def piece(self, ranks: Sequence[int], experts: tuple[int, int] | None = None, tokens: slice = slice(None)) -> Piece:
        """Rows of some source ranks' tokens for some of rank 0's experts."""
        low, high = experts or (0, self.local)
        chosen = self.choices[list(ranks), tokens]
        here = (chosen >= low) & (chosen < high)
        rows = torch.bincount(chosen[here], minlength=self.local)[: self.local]
        goes = here.any(-1).sum(-1).tolist()
        return Piece(rows, sum(goes), sum(count for rank, count in zip(ranks, goes) if rank))


def whole(of: Draw) -> Form:
    piece = of.piece(range(RANKS))
    return Form([piece], [piece], [("first", 0), ("second", 0)])


def by_experts(of: Draw, count: int) -> Form:
    width = of.local // count
    pieces = [of.piece(range(RANKS), (n * width, (n + 1) * width)) for n in range(count)]
    return Form(pieces, pieces, in_turn(count))


def by_tokens(of: Draw, count: int) -> Form:
    width = of.choices.shape[1] // count
    pieces = [of.piece(range(RANKS), tokens=slice(n * width, (n + 1) * width)) for n in range(count)]
    return Form(pieces, pieces, in_turn(count))


def in_turn(count: int) -> list[tuple[str, int]]:
    return [(which, n) for n in range(count) for which in ("first", "second")]


def by_ranks(of: Draw) -> Form:
    own, *others = (of.piece([rank]) for rank in range(RANKS))
    order = [("first", 0)]
    for n in range(1, RANKS):
        order += [("first", n), ("second", n - 1)]
    return Form([own, *others], [*others, own], [*order, ("second", RANKS - 1)])


def own_and_others(of: Draw) -> Form:
    own, others = of.piece([0]), of.piece(range(1, RANKS))
    return Form([own, others], [others, own], [("first", 0), ("first", 1), ("second", 0), ("second", 1)])


def waiting(of: Draw) -> Form:
    first, second = by_ranks(of).first, whole(of).second
    return Form(first, second, [*(("first", n) for n in range(RANKS)), ("second", 0)], exact=True)


def waiting_by_ranks(of: Draw) -> Form:
    form = by_ranks(of)
    order = [(which, n) for which in ("first", "second") for n in range(RANKS)]
    return form._replace(order=order, exact=True)


FORMS = {
    "today": whole,
    "experts, 2": lambda of: by_experts(of, 2),
    "experts, 4": lambda of: by_experts(of, 4),
    "ranks": by_ranks,
    "own, others": own_and_others,
    "tiles wait": waiting,
    "tiles wait, FC2": waiting_by_ranks,
    "tokens, 2": lambda of: by_tokens(of, 2),
}


# --- time -------------------------------------------------------------------------------------------------------------


class Gemm(NamedTuple):
    """A product: its tiling, columns and depth, and what it takes today on so many tiles, in us."""

    tiling: GemmConfig
    columns: int
    depth: int
    us: float
    tiles: float

    def tiles_of(self, rows: Tensor) -> int:
        """Of groups of ``rows``."""
        high = -(-rows // self.tiling.tile_m)
        return int(high.sum()) * -(-self.columns // self.tiling.tile_n)

    def weights(self, rows: Tensor) -> int:
        """Bytes of the matrices of all groups that have rows."""
        return int((rows > 0).sum()) * self.columns * self.depth * ELEMENT

    def time(self, piece: Piece, ctas: int, tiles: float, bandwidth: float) -> float:
        """Of a piece of so many tiles."""
        rounds = math.ceil(tiles / ctas) / math.ceil(self.tiles / MULTIPROCESSORS)
        moved = self.weights(piece.rows) + int(piece.rows.sum()) * (self.columns + self.depth) * ELEMENT
        return max(self.us * rounds, moved / bandwidth / 1e6)


def sum_time(piece: Piece, width: int, bandwidth: float) -> float:
    """Of reading all rows of a piece and writing a row for each token."""
    return (int(piece.rows.sum()) + piece.tokens) * width * ELEMENT / bandwidth / 1e6


def gemms(shape: Shape, measured: Measured, today: Form, bandwidth: float) -> tuple[Gemm, Gemm]:
    """FC1 and FC2, of which the first has two thirds of what is left of a forward."""
    (piece,) = today.first
    rows = 2 * shape.tokens * shape.top_k * RANKS // shape.experts  # of a group, of the room that a layer has
    columns = 2 * shape.inner
    first = tilings.choose_gathering("sm_90", VARLEN_M, columns, shape.hidden, rows, "a", WIDTHS[1:])
    second = tilings.choose("sm_90", VARLEN_M, shape.hidden, shape.inner, rows)
    left = measured.layer - measured.route - measured.dispatch - measured.combine - PLACES
    left -= sum_time(piece, shape.hidden, bandwidth)
    made = []
    for tiling, n, k, part in ((first, columns, shape.hidden, 2 / 3), (second, shape.hidden, shape.inner, 1 / 3)):
        gemm = Gemm(tiling, n, k, part * left, 0)
        made.append(gemm._replace(tiles=gemm.tiles_of(piece.rows)))
    return made[0], made[1]


class Machine(NamedTuple):
    """What a forward is made with: both GEMMs, TB/s, and us of a row on its way there and back."""

    fc: tuple[Gemm, Gemm]
    bandwidth: float
    there: float
    back: float


class Outcome(NamedTuple):
    """Rows over the link, tiles, bytes of weights, microseconds in which nothing is computed, and of the forward."""

    link: int
    tiles: int
    weights: int
    exposed: float
    us: float


def arrivals(form: Form, measured: Measured, machine: Machine) -> tuple[list[float], float]:
    """When the rows of every piece of FC1 are there, and when the link is free of them."""
    times, sent, link = [], 0, measured.route + measured.dispatch - measured.push
    if not form.first[0].link:
        link += PLACES
    for piece in form.first:
        if piece.link:
            link += piece.link * machine.there + (BARRIER if sent and not form.exact else 0)
            sent += 1
        times.append(link if piece.link else measured.route)
    return times, link


def follow(form: Form, shape: Shape, measured: Measured, machine: Machine, left: int) -> Outcome:
    """A forward of rank 0 in which GEMMs leave so many multiprocessors."""
    arrived, link = arrivals(form, measured, machine)
    sizes = [int(piece.rows.sum()) for piece in form.first]
    now, worked, tiles, weights, answered = measured.route, 0.0, 0, 0, 0
    for step, (which, n) in enumerate(form.order):
        piece, gemm = getattr(form, which)[n], machine.fc[which == "second"]
        spread = form.exact and which == "first"
        count = gemm.tiles * sizes[n] // sum(sizes) if spread else gemm.tiles_of(piece.rows)
        now = max(now, arrived[n]) if which == "first" else now
        beside = spread or now < link
        took = gemm.time(piece, MULTIPROCESSORS - (left if beside else 0), count, machine.bandwidth)
        took += PLACES if step == 0 else LAUNCH if step > 1 and not spread else 0
        took += sum_time(piece, shape.hidden, machine.bandwidth) if which == "second" else 0
        now, worked, tiles = now + took, worked + took, tiles + count
        weights += gemm.weights(piece.rows)
        if which == "second" and piece.link:
            link = max(link, now) + piece.link * machine.back + (BARRIER if answered else 0)
            answered += 1
    end = max(link, now) + measured.combine - measured.answer
    return Outcome(sum(piece.link for piece in form.first), tiles, weights, end - worked, end)


def table(shape: Shape, measured: Measured, left: int, bandwidth: float) -> Iterator[str]:
    """Lines of a table."""
    of = Draw(shape)
    today = whole(of)
    (piece,) = today.first
    fc = gemms(shape, measured, today, bandwidth)
    machine = Machine(fc, bandwidth, measured.push / piece.link, measured.answer / piece.link)
    before = follow(today, shape, measured, machine, 0)
    yield f"| {' | '.join(HEAD)} |"
    yield "|---" * len(HEAD) + "|"
    for name, form in FORMS.items():
        found = before if name == "today" else follow(form(of), shape, measured, machine, left)
        parts = (f"{getattr(found, what) / getattr(before, what):.2f}" for what in ("link", "tiles", "weights"))
        times = f"{found.exposed / 1e3:.3f}", f"{found.us / 1e3:.3f}", f"{shape.flops / found.us / 1e6:.0f}"
        yield f"| {' | '.join((name, *parts, *times, f'{100 * (1 - found.us / before.us):.1f}'))} |"


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    for name in args.shapes:
        print(f"{name}, {args.left} of {MULTIPROCESSORS} multiprocessors for exchanges, {args.bandwidth:g} TB/s\n")
        print("\n".join(table(SHAPES[name], MEASURED[name], args.left, args.bandwidth)), end="\n\n")


if __name__ == "__main__":
    main()
