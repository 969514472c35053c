"""Options of the scripts, and the loop over their cases."""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

SAMPLES = 50


def parser(doc: str | None, quick: str | None = None) -> argparse.ArgumentParser:
    """Help that shows a script's docstring; ``quick`` says what the option leaves out."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick is not None:
        made.add_argument("--quick", action="store_true", help=quick)
    return made


def gpu_parser(doc: str | None, quick: str | None = None, busy: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options of every script that times graphs; ``busy``: by ``timing.replays``."""
    made = parser(doc, quick)
    made.add_argument("--samples", type=_samples, default=SAMPLES, help="replays of each arm")
    made.add_argument("--clean-l2", action="store_true", help="leave nothing in L2 that is to be written back")
    made.add_argument("--out", type=Path, help="JSON file")
    if busy:
        about = "a sample is many replays in this many seconds, behind as many, so that clocks are those of training"
        made.add_argument("--busy", type=float, default=0.0, metavar="SECONDS", help=about)
    return made


def _samples(text: str) -> int:
    if (samples := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"percentiles need 2 samples, got {samples}")
    return samples


def choice(made: argparse.ArgumentParser, option: str, names: Iterable[str], default: bool = True) -> None:
    """An option that takes some of ``names``: all of them, or None without a ``default``."""
    made.add_argument(option, nargs="+", choices=list(names), default=list(names) if default else None)


def needs_device() -> str:
    """The name of the GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    return torch.cuda.get_device_name()


def cases(**axes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Every combination of the axes' values, the last axis fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values))


def run_all(
    cases: Iterable[dict[str, str]],
    run: Callable[..., Mapping[str, Any]],
    line: Callable[[dict[str, Any]], str],
    keep: Callable[[list[dict[str, Any]]], None] = lambda results: None,
) -> list[dict[str, Any]]:
    """Each case with its results, printed as they come. One that does not fit into memory has no ``times``.

    Args:
        keep: gets the results so far after every case, so that a run that is cut off leaves a file.
    """
    results: list[dict[str, Any]] = []
    for case in cases:
        try:
            results.append({**case, **run(**case)})
            print(line(results[-1]), flush=True)
        except torch.OutOfMemoryError:
            results.append({**case, "times": {}, "wrong": "out of memory"})
            print(f"{' '.join(case.values())}: out of memory", flush=True)
        keep(results)
        gc.collect()
        torch.cuda.empty_cache()
    return results
