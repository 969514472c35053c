"""Medians, ratios, tables and result files."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

Times = Mapping[str, Mapping[str, float]]


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile of two or more readings."""
    tenths = statistics.quantiles(times, n=10)
    return {"median": statistics.median(times), "p10": tenths[0], "p90": tenths[-1]}


def summaries(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {arm: summary(own) for arm, own in times.items()}


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {arm: statistics.median(own) for arm, own in times.items()}


def quotient(times: Times, arm: str, of: str) -> float | None:
    """The median of ``arm`` divided by that of ``of``; None if either was not timed."""
    if arm not in times or of not in times:
        return None
    return times[arm]["median"] / times[of]["median"]


def geometric(values: Iterable[float]) -> float:
    """Geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


class Mean(NamedTuple):
    """The geometric mean of the ratios of some cases, the least, its case, and their number."""

    mean: float
    worst: float
    where: str
    of: int

    def __str__(self) -> str:
        return f"{self.mean:6.3f}  ({self.worst:.3f}, {self.where}, of {self.of})"


def mean_of(ratios: Iterable[tuple[str, float | None]]) -> Mean | None:
    """Over the cases that have a ratio, by name; None if none has."""
    found = [(where, ratio) for where, ratio in ratios if ratio is not None]
    if not found:
        return None
    where, worst = min(found, key=lambda pair: pair[1])
    return Mean(geometric(ratio for _, ratio in found), worst, where, len(found))


class Table:
    """Columns of a printed table: a title and the format of a cell, which begins with its width.

    A cell without a value is a dash.
    """

    def __init__(self, columns: Mapping[str, str]):
        self.columns = dict(columns)

    def _cells(self, texts: Iterable[str]) -> str:
        widths = (re.match(r"([<>]?)(\d+)", form) for form in self.columns.values())
        return " ".join(f"{text:{m[1] or '>'}{m[2]}}" for text, m in zip(texts, widths, strict=True) if m)

    def header(self) -> str:
        return self._cells(self.columns)

    def line(self, values: Iterable[Any]) -> str:
        pairs = zip(values, self.columns.values(), strict=True)
        return self._cells("-" if value is None else format(value, form).strip() for value, form in pairs)


def save(path: Path | None, results: Any) -> None:
    """Write JSON, if a path was given."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


def with_machine(device: str, results: list[dict]) -> dict[str, Any]:
    """Results as a file holds them: with the device and the version of torch."""
    return {"device": device, "torch": torch.__version__, "results": results}
