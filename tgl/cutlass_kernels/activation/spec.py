"""Which activation a kernel is built for; a part of its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params


@dataclass(frozen=True)
class ActivationSpec:
    """One activation; see ``tgl.grouped_activation``.

    Attributes:
        kind: ``"swiglu"``, ``"clamped_qgeglu"`` or ``"srelu"``.
        interleaved: whether gate and linear half alternate by column.
        limit, alpha, offset: the constants of ``"clamped_qgeglu"``, a model's own; 0 for the other kinds.
    """

    kind: str
    interleaved: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    offset: float = 0.0

    @property
    def gated(self) -> bool:
        """Whether there is a linear half."""
        return self.kind != "srelu"

    @property
    def clamped(self) -> bool:
        """Whether the halves are clamped."""
        return self.kind == "clamped_qgeglu"


def spec_of(params: Params) -> ActivationSpec:
    """What tells kernels apart, of the keyword arguments of the op."""
    constants = params[2:] if params.kind == "clamped_qgeglu" else ()
    return ActivationSpec(params.kind, params.gated and params.interleaved, *constants)
