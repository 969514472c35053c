"""The axes of the models' tests, and a cover of all pairs of their values.

Gradients that a layer's own tests find right have been wrong in a model: where several layers are compiled as one
graph, or where one option meets another.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tgl import recipes

RECIPES: dict[str, Callable[[], recipes.Recipe] | None] = {
    "none": None,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "fp8_current": recipes.Float8CurrentScaling,
    "fp8_delayed": recipes.DelayedScaling,
    "fp8_block": recipes.Float8BlockScaling,
}
OWN = ("moe", "mlp", "discrete", "lora")
THEIRS = ("qwen3_moe", "gpt_oss")


class Case(NamedTuple):
    """A model and the options of its training.

    Attributes:
        family: of ``families``.
        mode: ``"eager"``, ``"compiled"`` as one graph, or ``"captured"`` in a CUDA graph.
        precision: dtype of parameters and rows, or ``"autocast"``: float32 parameters under autocast to bfloat16.
        recipe: of ``RECIPES``.
        training: where gradients go, and whether blocks are checkpointed.
    """

    family: str
    mode: str
    precision: str
    recipe: str
    training: str

    def __str__(self) -> str:
        return "-".join(self)


AXES: dict[str, tuple[str, ...]] = {
    "family": (*OWN, *THEIRS),
    "mode": ("eager", "compiled", "captured"),
    "precision": ("float32", "bfloat16", "autocast"),
    "recipe": tuple(RECIPES),
    "training": ("plain", "checkpointed", "main_grad", "delayed"),
}


def forbidden(case: Case) -> str | None:
    """Why there is no such model; None if there is."""
    optional = case.training in ("main_grad", "delayed")
    if case.family in THEIRS and case.recipe != "none":
        return "a recipe is an option of layers, and these experts are transformers' modules"
    if case.family in THEIRS and optional:
        return "options of layers, which transformers' experts do not have"
    if case.family == "lora" and optional:
        return "they are for the weight's gradient, and the weight under adapters is frozen"
    if case.mode == "captured" and case.precision == "float32" and (case.recipe == "none" or case.family == "lora"):
        return "float32 products read the group ends on the host, which is an error during a capture"
    return None


def product(modes: Sequence[str]) -> list[Case]:
    """Every model that there is, with one of ``modes``."""
    axes = {**AXES, "mode": tuple(modes)}
    return [case for values in itertools.product(*axes.values()) if forbidden(case := Case(*values)) is None]


def cover(modes: Sequence[str], first: Sequence[Case] = ()) -> list[Case]:
    """``first``, and cases by which every two values of two axes that go together meet in a case.

    Graphs cost the most, so that eager cases are taken while they cover anything. The order is the same every time.
    """
    candidates = product(modes)
    chosen = list(first)
    missing = {pair for case in candidates for pair in _pairs(case)}
    for case in chosen:
        missing -= set(_pairs(case))
    while missing:
        used = Counter((case.family, case.mode) for case in chosen)
        gains = {case: len(missing.intersection(_pairs(case))) for case in candidates}
        best = max(
            candidates,
            key=lambda c: (gains[c] > 0 and c.mode == "eager", gains[c], -used[c.family, c.mode]),
        )
        chosen.append(best)
        missing -= set(_pairs(best))
    return chosen


def _pairs(case: Case) -> Iterator[tuple]:
    return itertools.combinations(enumerate(case), 2)
