"""Interface of a format's quantisation kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.components import Components
from ...meta.quantized import Options
from ..activation.activation_spec import ActivationSpec
from ..archs import Arch
from ..runtime.requirements import ALIGNMENT


class QuantizeCall(NamedTuple):
    """Arguments of ``group_quantize``.

    With ``slots`` the matrix of group g is ``x[slots[g]]``, with ``rows`` row t is ``x[rows[t]]``.
    """

    x: Tensor
    offs: Tensor | None
    scale: Tensor | None
    row_scale: Tensor | None
    rng: Tensor | None
    noop: Tensor | None
    options: Options
    out: Components
    slots: Tensor | None = None
    rows: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Return how many rows are quantised, of all matrices together."""
        if self.offs is None:
            return self.matrices * self.x.shape[1]
        return (self.x if self.rows is None else self.rows).shape[0]

    @property
    def order(self) -> Tensor | None:
        """Return the index of rows or of matrices of x, as kernels take it."""
        return self.slots if self.rows is None else self.rows

    @property
    def matrices(self) -> int:
        """Return how many matrices are quantised."""
        return (self.x if self.slots is None else self.slots).shape[0]


class Quantizer(ABC):
    """The quantisation kernels of one format, or of several similar ones."""

    @abstractmethod
    def spec(self, c: QuantizeCall, arch: Arch, activation: ActivationSpec | None, elementwise: bool) -> Any:
        """Return what a kernel for the call depends on besides the architecture."""

    @abstractmethod
    def build(self, arch: str, spec: Any) -> Callable:
        """Compile the kernel for ``spec``. Needs no GPU."""

    @abstractmethod
    def arguments(self, c: QuantizeCall) -> tuple:
        """Return the arguments of the kernel, which writes the components of ``x`` except ``dbias``."""

    def is_empty(self, c: QuantizeCall) -> bool:
        """Return whether no kernel has anything to write."""
        if c.slots is not None and c.slots.shape[0] == 0:
            return True
        return c.x.shape[-1] == 0 or (c.num_rows == 0 and (c.offs is None or c.offs.shape[0] == 0))

    def zero_outputs(self, c: QuantizeCall) -> None:
        """Write the outputs of a call that needs no kernel."""
        return

    def activation_reason(self, c: QuantizeCall) -> backends.Reason:
        """Return why no kernel applies an activation first, or None."""
        return None


def flag(noop: Tensor | None) -> Tensor | None:
    """Return the flag as a vector of one element, of a dtype that kernels have."""
    if noop is None:
        return None
    return (noop.view(torch.uint8) if noop.dtype == torch.bool else noop).view(1)


def cleared(amax: Tensor, noop: Tensor | None) -> Tensor:
    """Return the bits of ``amax``, cleared unless ``noop`` says that nothing is written."""
    if noop is None:
        amax.zero_()
    else:
        amax.masked_fill_(noop == 0, 0.0)
    return amax.view(torch.int32)


def source(c: QuantizeCall) -> Tensor:
    """Return the quantised tensor as kernels take it: matrices one below the other unless they are named by slots."""
    return by_rows(c.x) if c.slots is None else c.x


def by_rows(t: Tensor) -> Tensor:
    """Return matrices one below the other; those without columns get strides that suit any kernel."""
    if t.dim() == 3:
        t = t.view(-1, t.shape[-1])
    return t if t.shape[-1] or t.dim() == 1 else t.as_strided(t.shape, (ALIGNMENT, 1))


def rows_of_a_matrix(c: QuantizeCall) -> int:
    """Return the rows of a matrix; 0 where rows are grouped by ``offs``."""
    return c.x.shape[1] if c.offs is None else 0
