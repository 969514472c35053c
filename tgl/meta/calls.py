"""The arguments that implementations of an op get, as one value."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor

Call = TypeVar("Call")


class GemmCall(NamedTuple):
    """A call of ``grouped_gemm``: the op's operands, its destination, and what only some calls have."""

    a: Tensor
    b: Tensor
    offs: Tensor
    bias: Tensor | None
    bias_scale: Tensor | None
    out: Tensor
    zero_tail: bool
    slots: Tensor | None = None
    rows: Tensor | None = None
    begin: Tensor | None = None
    expected_rows: int | None = None

    def from_begin(self, begin: Tensor) -> GemmCall:
        """Return the call for the rows from ``begin`` on, which is read on the host; without ``begin`` itself."""
        first = min(max(int(begin.item()), 0), self.out.shape[0])
        a = self.a[first:] if self.rows is None else self.a
        scale, rows = (None if t is None else t[first:] for t in (self.bias_scale, self.rows))
        moved = {"a": a, "offs": self.offs - first, "bias_scale": scale, "out": self.out[first:], "rows": rows}
        return self._replace(**moved, begin=None)  # type: ignore[arg-type]


class ScaledGemmCall(NamedTuple):
    """A call of ``grouped_gemm_scaled``."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    offs: Tensor
    a_amax: Tensor | None
    b_amax: Tensor | None
    bias: Tensor | None
    bias_scale: Tensor | None
    format: str
    b_direction: str
    scale_layout: str
    out: Tensor
    zero_tail: bool


class ScaledWgradCall(NamedTuple):
    """A call of ``grouped_gemm_scaled_wgrad`` or its accumulating form."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    offs: Tensor
    a_amax: Tensor | None
    b_amax: Tensor | None
    format: str
    scale_layout: str
    out: Tensor
    accumulate: bool
    slots: Tensor | None = None


def taking(call: Callable[..., Call], run: Callable[[Call], None]) -> Callable[..., None]:
    """Return ``run`` for an ``Implementation``, to which the registry passes the fields of ``call`` one by one."""
    return lambda *operands, **keywords: run(call(*operands, **keywords))
