"""Gates that a result must pass before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Problem(Protocol):
    """Operands of one op, whose routing can change.

    Attributes:
        sizes: rows of each group.
        out: what the op writes.
        fill: what ``out`` holds before a call: NaN, or zeros for an op that adds to it.
        per_group: whether ``out`` has a matrix or a row per group.
    """

    sizes: Sequence[int]
    out: Tensor
    fill: float
    per_group: bool

    def route(self, sizes: Sequence[int]) -> None: ...


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over that of ``wanted``, in the dtype of ``wanted``: float32 or wider."""
    return ((got.float() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


def wrong(
    problem: Problem,
    call: Callable[[], object],
    oracle: Callable[[], Tensor],
    rival: Callable[[Tensor], tuple[str, float]],
) -> str | None:
    """Return the error of a call that writes ``problem.out``, or None.

    Nothing of what ``out`` held is left, a second call gives the same bits, the error is at most twice that of a rival,
    and an empty group's gradient is zero; all of this for two routings, and for the first again.

    Args:
        oracle: the result in float32.
        rival: of the oracle's result, another way to compute it and the error of that.
    """

    def run() -> Tensor:
        problem.out.fill_(problem.fill)
        call()
        return problem.out.clone()

    sizes = list(problem.sizes)
    for attempt in (sizes, sizes[1:] + sizes[:1], sizes):
        problem.route(attempt)
        wanted, got = oracle(), run()
        if got.isnan().any():
            return "poison is left in the output"
        if not torch.equal(got, run()):
            return "not the same bits again"
        ours, (name, theirs) = relative_error(got, wanted), rival(wanted)
        if not ours <= 2 * theirs + 1e-5:
            return f"error {ours:.2e}, {name} has {theirs:.2e}"
        empty = [g for g, size in enumerate(attempt) if not size]
        if problem.per_group and got[empty].any():
            return "an empty group's gradient is not zero"
    return None
