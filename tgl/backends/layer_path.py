"""The path that a layer's call takes, as a value that ``explain`` returns."""

from __future__ import annotations

from typing import NamedTuple

Reason = tuple[str, str, str]
"""A faster path, and why a call does not take it: the subject of the sentence and the rest of it."""


class LayerPath(NamedTuple):
    """The path of a layer's call, and why it takes no faster one. ``str()`` of it is the report.

    Attributes:
        taken: the path: ``"one op"``, ``"one autograd function"``, ``"separate layers"`` or
            ``"layers called as modules"``, in falling speed.
        permutes: whether tokens are permuted by ops of their own around it, ``dispatch`` before and ``combine`` after.
        reasons: why it is no faster path; empty for one op.
    """

    taken: str
    permutes: bool = False
    reasons: tuple[Reason, ...] = ()

    def __str__(self) -> str:
        steps = f"dispatch, {self.taken}, combine" if self.permutes else self.taken
        return "\n".join(
            [f"runs {steps}", *(f"  not {path}: {subject} {words}" for path, subject, words in self.reasons)]
        )
