"""Token permutation for ``ExpertFunction``: from tokens to the rows of experts and back."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..ops import permutation
from ..ops._library import unobserved_call
from ..ops.after import after
from . import _routing_expressions as expressions
from ._gemms import Gemms, Operand, Operands
from ._scaled_gemms import ScaledGemms
from ._transforms import compiled_for_cpu
from .routing import Routing

CHOICES, ELEMENTS = 4, 1 << 22
"""Top-k slots per token and elements of all tokens from which quantising each token once beats once per slot.

On an H100 quantising once takes 0.57 to 0.67 of the time for 8 slots and tokens that exceed L2; for 2^22 elements with
``fp8_block`` scales 0.91 for 8 slots, 0.93 for 4 and 1.06 for 2; with MXFP8 0.77, 0.93 and 1.08. With fewer tokens the
launches cost more.
"""


class Rows(NamedTuple):
    """Rows for ``Gemms``: ``t`` itself, or the rows of ``t`` gathered by ``index``, int32 ``[T]``."""

    t: Tensor
    index: Tensor | None = None  # type: ignore[assignment]  # hides tuple.index


class TokenPermutation(Protocol):
    """A token permutation to the rows of experts and back: ``LocalPermutation`` on one device, or one over ranks."""

    def kept(self, x: Tensor) -> Tensor:
        """Return the tensor to pass to ``input`` for tokens ``x [S, H]``, also in the backward."""

    def input(self, x: Tensor, gemms: Gemms, offs: Tensor, *, fprop: bool, wgrad: bool, state: Operand) -> Operands:
        """Return ``gemms.input`` of the rows of the tokens ``x``, a result of ``kept``."""

    def answers(self, grad: Tensor, gemms: Gemms, *, read: bool) -> Rows:
        """Return the rows of ``grad [S, O]``; ``read``: whether ``gemms`` will read them. Collective over ranks."""

    def grad(
        self, rows: Rows, gemms: Gemms, offs: Tensor, *, dgrad: bool, wgrad: bool, dbias: bool
    ) -> tuple[Operands, Tensor | None]:
        """Return ``gemms.grad`` of ``rows``, a result of ``answers``."""

    def dense(self, rows: Rows, offs: Tensor) -> Tensor:
        """Return the values of ``rows`` as ``[T, O]``."""

    def combined(self, rows: Tensor) -> Tensor:
        """Return ``[S, columns]``, the sum of every token's ``rows [T, columns]``."""

    def after(self, dependency: Tensor) -> TokenPermutation:
        """Return a copy whose ``input`` a graph cannot run before ``dependency`` is computed, see ``tgl::after``."""

    def ordered(self, t: Tensor, dependency: Tensor) -> Tensor:
        """Return ``t``; if both are exchanged between ranks, a graph exchanges it after ``dependency``."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors to save for the backward."""

    def bare(self) -> TokenPermutation:
        """Return a copy without tensors."""

    def with_tensors(self, *tensors: Tensor) -> TokenPermutation:
        """Return a copy with ``tensors``, the inverse of ``bare``."""


class LocalPermutation(NamedTuple):
    """The token permutation on one device: the part of a ``Routing`` that ``dispatch`` and ``combine`` read.

    Neither is differentiable here.

    Attributes:
        token: int32 ``[T]``, contiguous: the ``rows`` argument of ops that gather.
        position: int32 or int64 ``[S k]``.
        top_k: k.
    """

    token: Tensor
    position: Tensor
    top_k: int

    @classmethod
    def of(cls, routing: Routing) -> LocalPermutation:
        token = routing.token if routing.token.dtype == torch.int32 else routing.token.int()
        return cls(token.contiguous(), routing.position, routing.top_k)

    def dispatched(self, t: Tensor) -> Tensor:
        """Return ``[T, columns]``, the row of ``t [S, columns]`` for every row of the experts."""
        if unobserved_call(t, self.token, self.position):
            return permutation.dispatch(t, *self)
        if compiled_for_cpu(t.device):
            return expressions.taken(t, self.token)
        made: Tensor = torch.ops.tgl.dispatch(t, *self)
        return made

    def read(self, t: Tensor, gemms: Gemms) -> Rows:
        """Return ``t [S, columns]`` with an index if ``gemms`` gather; else dispatched."""
        return Rows(t, self.token) if gemms.gathers else Rows(self.dispatched(t))

    def kept(self, x: Tensor) -> Tensor:
        """Return the tokens unchanged."""
        return x

    def input(self, x: Tensor, gemms: Gemms, offs: Tensor, *, fprop: bool, wgrad: bool, state: Operand) -> Operands:
        """Return ``gemms.input`` of the rows of tokens."""
        if isinstance(gemms, ScaledGemms) and fprop and not wgrad and self._quantises_once(x, gemms):
            return gemms.input_of_tokens(x, offs, self.token, self.dispatched)
        t, index = self.read(x, gemms)
        return gemms.input(t, offs, index, fprop=fprop, wgrad=wgrad, state=state)

    def _quantises_once(self, x: Tensor, gemms: ScaledGemms) -> bool:
        """Return whether to quantise each token once and dispatch the codes, instead of reading it ``top_k`` times.

        On a CPU tokens are quantised once in any case. Codes are copied as elements of the dtype of ``x``, so a row
        must be a multiple of its size.
        """
        if not gemms.copies_codes or x.device.type == "cpu" or self.top_k < CHOICES:
            return False
        return x.numel() >= ELEMENTS and x.shape[1] % x.element_size() == 0

    def answers(self, grad: Tensor, gemms: Gemms, *, read: bool) -> Rows:
        """Return the rows of a gradient."""
        return self.read(grad, gemms) if read else Rows(self.dispatched(grad))

    def grad(self, rows: Rows, gemms: Gemms, offs: Tensor, **wanted: bool) -> tuple[Operands, Tensor | None]:
        """Return ``gemms.grad`` of rows."""
        return gemms.grad(rows.t, offs, rows.index, **wanted)

    def dense(self, rows: Rows, offs: Tensor) -> Tensor:
        """Return the values of ``rows``."""
        return rows.t if rows.index is None else self.dispatched(rows.t)

    def ordered(self, t: Tensor, dependency: Tensor) -> Tensor:
        """Return ``t``: nothing is exchanged between ranks."""
        return t

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors to save for the backward."""
        return self.token, self.position

    def bare(self) -> LocalPermutation:
        """Return a copy without tensors."""
        none: Any = None
        return LocalPermutation(none, none, self.top_k)

    def with_tensors(self, *tensors: Tensor) -> LocalPermutation:
        """Return a copy with ``tensors``, the inverse of ``bare``."""
        token, position = tensors
        return LocalPermutation(token, position, self.top_k)

    def after(self, dependency: Tensor) -> LocalPermutation:
        """Return a copy that a graph cannot dispatch with before ``dependency`` is computed, see ``tgl::after``."""
        return self._replace(token=after(self.token, dependency))

    def combined(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return ``[S, columns]``, the sum of every token's ``rows [T, columns]``, in ``dtype`` or that of the rows."""
        if unobserved_call(rows, self.token, self.position):
            return permutation.combine(rows, *self, out_dtype=dtype)
        if compiled_for_cpu(rows.device):
            return expressions.sum_slots(rows, self.position, self.top_k, dtype)
        made: Tensor = torch.ops.tgl.combine(rows, *self, out_dtype=dtype)
        return made
