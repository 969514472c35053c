"""Equal row blocks (spans), independent of the groups, and the groups that lie in one."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..scheduler.groups import clamp
from ..scheduler.lpt import lowest_bit

LANES = 32
NO_END = (1 << 31) - 1
EARLY = 4  # offsets that a lane loads at once


class Spans(NamedTuple):
    """The first ``longer`` spans have ``size + 1`` rows, the others ``size``; together they have ``total``."""

    total: Int32
    size: Int32
    longer: Int32


@cute.jit
def spans_of(last: Int32, rows: Int32, count: Int32) -> Spans:
    """Return the rows up to the last group's end as ``count`` spans."""
    total = clamp(last, Int32(0), rows)
    size = total // count
    return Spans(total, size, total - size * count)


@cute.jit
def begin_of(spans: Spans, span: Int32) -> Int32:
    """Return the first row of a span, which is the end of the one before."""
    return span * spans.size + cutlass.min(span, spans.longer)


@cute.jit
def span_of(spans: Spans, row: Int32) -> Int32:
    """Return the span that ``row < total`` lies in."""
    span = row // (spans.size + 1)
    behind = row - spans.longer * (spans.size + 1)
    if behind >= 0:
        span = spans.longer + behind // cutlass.max(spans.size, Int32(1))
    return span


@cute.jit
def group_of(offs: cute.Tensor, row: Int32, rows: Int32) -> Int32:
    """Return the group that ``row`` belongs to, the number of groups if none; by bisection."""
    low, high = Int32(0), Int32(cute.size(offs))
    while low < high:
        middle = (low + high) // 2
        if clamp(offs[middle], Int32(0), rows) > row:
            high = middle
        else:
            low = middle + 1
    return low


class Ends(NamedTuple):
    """A warp's window on the offsets: lane ``i`` holds the end of group ``first + i``, ``NO_END`` if there is none."""

    first: Int32
    end: Int32


@cute.jit
def ends_from(offs: cute.Tensor, total: Int32, first: Int32) -> Ends:
    """Return the window on the groups from ``first`` on; ends are clamped to ``[0, total]``."""
    group = first + cute.arch.lane_idx()
    end = Int32(NO_END)
    if group < cute.size(offs):
        end = clamp(offs[group], Int32(0), total)
    return Ends(first, end)


@cute.jit
def seek(ends: Ends, offs: cute.Tensor, total: Int32, row: Int32) -> tuple[Ends, Int32, Int32]:
    """Return the first group from the window on that ends after ``row < total``, and its end.

    There is one, since the last group ends at ``total``, and its end is greater than ``row`` for any offsets.
    """
    first, end = ends
    beyond = cute.arch.vote_ballot_sync(end > row)
    while beyond == 0:
        first, end = ends_from(offs, total, first + LANES)
        beyond = cute.arch.vote_ballot_sync(end > row)
    lane = lowest_bit(beyond)
    return Ends(first, end), first + lane, cute.arch.shuffle_sync(end, lane)


class Found(NamedTuple):
    """Offsets that are loaded before anything else: the last one, and a lane's of the first ``EARLY * LANES``."""

    last: Int32
    ends: tuple[Int32, ...]


@cute.jit
def first_ends(offs: cute.Tensor) -> Found:
    """Issue all of these loads at once."""
    last = cute.size(offs) - 1
    ends = tuple(offs[cutlass.min(cute.arch.lane_idx() + i * LANES, last)] for i in range(EARLY))
    return Found(offs[last], ends)


@cute.jit
def count_ended(offs: cute.Tensor, found: Found, total: Int32, row: Int32) -> tuple[Int32, Int32]:
    """Return how many groups end up to ``row < total``, and the last such end, 0 if none."""
    last = cute.size(offs) - 1  # ends at `total`, after `row`: may be read twice
    ended, begin = Int32(0), Int32(-1)
    for end in found.ends:
        end = clamp(end, Int32(0), total)
        if end <= row:
            ended, begin = ended + 1, cutlass.max(begin, end)
    for first in cutlass.range(cute.arch.lane_idx() + EARLY * LANES, cute.size(offs), EARLY * LANES, unroll=1):
        more = [offs[cutlass.min(first + i * LANES, last)] for i in range(EARLY)]
        for end in more:
            end = clamp(end, Int32(0), total)
            if end <= row:
                ended, begin = ended + 1, cutlass.max(begin, end)
    for i in cutlass.range_constexpr(5):
        ended += cute.arch.shuffle_sync_bfly(ended, 1 << i)
        begin = cutlass.max(begin, cute.arch.shuffle_sync_bfly(begin, 1 << i))
    if ended == 0:
        begin = Int32(0)
    return ended, begin


@cute.jit
def first_behind(offs: cute.Tensor, found: Found, total: Int32, row: Int32) -> tuple[Ends, Int32, Int32, Int32]:
    """Return the first group that ends after ``row < total``: the window, the group, its first row and its end."""
    ended, begin = count_ended(offs, found, total, row)
    window = ended // LANES
    end = Int32(NO_END)
    if window < EARLY:  # avoids a load, which would queue behind rows
        for i in cutlass.range_constexpr(EARLY):
            if window == i and i * LANES + cute.arch.lane_idx() < cute.size(offs):
                end = clamp(found.ends[i], Int32(0), total)
    else:
        _, end = ends_from(offs, total, window * LANES)
    ends, group, end = seek(Ends(window * LANES, end), offs, total, row)
    return ends, group, begin, end
