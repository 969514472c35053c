"""tgl beside its rivals: a case's graphs and times, and the table of ratios (above 1: tgl is faster)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from harness.gates import relative_error
from harness.report import Mean, Table, mean_of, medians, quotient, summaries
from harness.timing import Arms, Replay, captured, replays

Result = dict[str, Any]
Prepared = tuple[Callable[[], object], Callable[[], Tensor]]
AGREEMENT = 0.01


class Agreeing:
    """The call of a peer, which fails if its first result is not near to what is wanted.

    Args:
        prepare: brings operands into the peer's layout, at the first call; returns the call, and what reads its result.
        wanted: returns what that must be, to a relative error of ``AGREEMENT``.
    """

    def __init__(self, prepare: Callable[[], Prepared], wanted: Callable[[], Tensor]):
        self.prepare, self.wanted = prepare, wanted
        self.call: Callable[[], object] | None = None

    def __call__(self) -> None:
        if self.call is not None:
            self.call()
            return
        call, read = self.prepare()
        call()
        error = relative_error(read(), self.wanted().float())
        if not error <= AGREEMENT:
            raise ValueError(f"a relative error of {error:.1e}")
        self.call = call


def compared(arms: Arms, wrong: Callable[[Replay], str | None], args: argparse.Namespace) -> Result:
    """Times of all arms, each as a graph.

    Args:
        arms: ``tgl`` and its rivals.
        wrong: what is wrong with tgl's graph, or None; nothing is timed before that.
        args: of ``harness.command.gpu_parser``.

    Returns:
        ``times`` of every arm and their medians as ``ms``, or what is ``wrong``; why an arm ``failed``.
    """
    graphs, failed = captured(arms)
    if reason := failed.get("tgl") or wrong(graphs["tgl"]):
        return {"wrong": reason, "failed": failed}
    times = replays(graphs, args.samples, args.clean_l2, args.busy)
    return {"times": summaries(times), "ms": medians(times), "failed": failed}


def of_result(wrong: Callable[[Any], str | None]) -> Callable[[Replay], str | None]:
    """The gate of a graph that asks ``wrong`` about the result of a replay."""

    def gate(graph: Replay) -> str | None:
        graph()
        return wrong(graph.result)

    return gate


class Comparison:
    """The printed table of some results.

    Args:
        names: titles and formats of the columns that name a case, which are keys of its result.
        ms: format of tgl's milliseconds.
        rate: title and format of the column behind them.
        rivals: names and format of their columns.
        speed: the value of the rate's column, from a result.
    """

    def __init__(
        self,
        names: Mapping[str, str],
        ms: str,
        rate: tuple[str, str],
        rivals: tuple[Sequence[str], str],
        speed: Callable[[Result], object],
    ):
        self.names, self.rivals, self.speed = dict(names), rivals[0], speed
        self.table = Table({**names, "tgl ms": ms, rate[0]: rate[1]} | dict.fromkeys(*rivals))
        self.head = Table(names)

    def header(self) -> str:
        return self.table.header()

    def ratio(self, result: Result, arm: str) -> float | None:
        return quotient(result.get("times", {}), arm, "tgl")

    def line(self, result: Result) -> str:
        names = [result[name] for name in self.names]
        if "wrong" in result:
            return f"{self.head.line(names)}  WRONG: {result['wrong']}"
        cells = (self.ratio(result, arm) for arm in self.rivals)
        return self.table.line([*names, result["times"]["tgl"]["median"], self.speed(result), *cells])

    def means(self, results: Sequence[Result]) -> Iterator[tuple[str, Mean]]:
        """Every rival's mean, of those that were timed."""
        for arm in self.rivals:
            where = [name for name in self.names if name != "op"]
            pairs = [(" ".join(r[name] for name in where), self.ratio(r, arm)) for r in results]
            if (mean := mean_of(pairs)) is not None:
                yield arm, mean

    def report(self, results: Sequence[Result]) -> str:
        """A line per rival."""
        means = self.means(results)
        return "\n".join(f"{arm}: geometric mean {mean.mean:.3f}, worst {mean.worst:.3f}" for arm, mean in means)
