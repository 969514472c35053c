"""The activation that a kernel is built for; a part of its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...meta import activations

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params


@dataclass(frozen=True)
class ActivationSpec:
    """One activation; see ``tgl.meta.activations``.

    Attributes:
        kind: its name.
        interleaved: whether gate and linear half alternate by column.
        limit, alpha, offset: the constants that it depends on, a model's own; 0 for all others.
    """

    kind: str
    interleaved: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    offset: float = 0.0

    @property
    def gated(self) -> bool:
        """Whether there is a linear half."""
        return activations.named(self.kind).gated


def spec_of(params: Params) -> ActivationSpec:
    """Return the compile-time part of the op's keyword arguments."""
    activation = params.activation
    constants = {name: getattr(params, name) for name in activation.constants}
    return ActivationSpec(activation.name, activation.gated and params.interleaved, **constants)
