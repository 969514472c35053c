"""The rows of tokens among those of experts, for an autograd function that goes from tokens to tokens."""

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
"""Of a token, and in all tokens: from there on it takes less to quantise a token once than to read it for each choice.

On an H100 it takes 0.57 to 0.67 of the time for 8 choices of tokens that exceed L2, with scales of ``fp8_block`` 0.91
for 8 of 2^22 elements, 0.93 for 4, and 1.06 for 2, of MXFP8 0.77, 0.93 and 1.08. Fewer tokens would pay for launches.
"""


class Rows(NamedTuple):
    """What ``Gemms`` read: rows, or those of ``t`` that an index tells, int32 ``[T]``."""

    t: Tensor
    index: Tensor | None = None  # type: ignore[assignment]  # a name that tuples have


class Way(Protocol):
    """The way of tokens to the rows of experts and back: ``Places`` of a device, or one that leads to other ranks."""

    def kept(self, x: Tensor) -> Tensor:
        """What stands for tokens ``x [S, H]`` in ``input``, in the backward too."""

    def input(self, x: Tensor, gemms: Gemms, offs: Tensor, *, fprop: bool, wgrad: bool, state: Operand) -> Operands:
        """``gemms.input`` of the rows of what ``kept`` has returned."""

    def answers(self, grad: Tensor, gemms: Gemms, *, read: bool) -> Rows:
        """Rows of ``grad [S, O]``, which ``gemms`` will ``read`` or not; all ranks of a way take part."""

    def grad(
        self, rows: Rows, gemms: Gemms, offs: Tensor, *, dgrad: bool, wgrad: bool, dbias: bool
    ) -> tuple[Operands, Tensor | None]:
        """``gemms.grad`` of what ``answers`` has returned."""

    def dense(self, rows: Rows, offs: Tensor) -> Tensor:
        """``[T, O]``: their values."""

    def combined(self, rows: Tensor) -> Tensor:
        """``[S, columns]``: the sum of every token's ``rows [T, columns]``."""

    def after(self, dependency: Tensor) -> Way:
        """Where a graph cannot make an ``input`` before there is ``dependency``, see ``tgl::after``."""

    def ordered(self, t: Tensor, dependency: Tensor) -> Tensor:
        """``t``, which a graph does not have before ``dependency`` if both travel."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a backward has to keep."""

    def bare(self) -> Way:
        """Without tensors."""

    def with_tensors(self, *tensors: Tensor) -> Way:
        """``bare`` undone."""


class Places(NamedTuple):
    """What ``dispatch`` and ``combine`` read of a ``Routing``. Neither has a derivative here.

    Attributes:
        token: int32 ``[T]``, contiguous: an index for ops that take ``rows``.
        position: int32 or int64 ``[S k]``.
        top_k: k.
    """

    token: Tensor
    position: Tensor
    top_k: int

    @classmethod
    def of(cls, routing: Routing) -> Places:
        token = routing.token if routing.token.dtype == torch.int32 else routing.token.int()
        return cls(token.contiguous(), routing.position, routing.top_k)

    def dispatched(self, t: Tensor) -> Tensor:
        """``[T, columns]``: the row of ``t [S, columns]`` for every row of an expert."""
        if unobserved_call(t, self.token, self.position):
            return permutation.dispatch(t, *self)
        if compiled_for_cpu(t.device):
            return expressions.taken(t, self.token)
        made: Tensor = torch.ops.tgl.dispatch(t, *self)
        return made

    def read(self, t: Tensor, gemms: Gemms) -> Rows:
        """``t [S, columns]`` for ``input`` or ``grad`` of ``gemms``, with an index if they gather; else dispatched."""
        return Rows(t, self.token) if gemms.gathers else Rows(self.dispatched(t))

    def kept(self, x: Tensor) -> Tensor:
        """Tokens as they are."""
        return x

    def input(self, x: Tensor, gemms: Gemms, offs: Tensor, *, fprop: bool, wgrad: bool, state: Operand) -> Operands:
        """``gemms.input`` of the rows of tokens."""
        if isinstance(gemms, ScaledGemms) and fprop and not wgrad and self._quantises_once(x, gemms):
            return gemms.input_of_tokens(x, offs, self.token, self.dispatched)
        t, index = self.read(x, gemms)
        return gemms.input(t, offs, index, fprop=fprop, wgrad=wgrad, state=state)

    def _quantises_once(self, x: Tensor, gemms: ScaledGemms) -> bool:
        """Whether a GPU copies codes to rows, since it would otherwise read every token ``top_k`` times.

        What quantises on a CPU does so once in any case. Rows of codes are copied in elements of ``x``.
        """
        if not gemms.copies_codes or x.device.type == "cpu" or self.top_k < CHOICES:
            return False
        return x.numel() >= ELEMENTS and x.shape[1] % x.element_size() == 0

    def answers(self, grad: Tensor, gemms: Gemms, *, read: bool) -> Rows:
        """Of a gradient."""
        return self.read(grad, gemms) if read else Rows(self.dispatched(grad))

    def grad(self, rows: Rows, gemms: Gemms, offs: Tensor, **wanted: bool) -> tuple[Operands, Tensor | None]:
        """``gemms.grad`` of rows."""
        return gemms.grad(rows.t, offs, rows.index, **wanted)

    def dense(self, rows: Rows, offs: Tensor) -> Tensor:
        """Their values."""
        return rows.t if rows.index is None else self.dispatched(rows.t)

    def ordered(self, t: Tensor, dependency: Tensor) -> Tensor:
        """Nothing travels."""
        return t

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What a backward has to keep."""
        return self.token, self.position

    def bare(self) -> Places:
        """Without tensors."""
        none: Any = None
        return Places(none, none, self.top_k)

    def with_tensors(self, *tensors: Tensor) -> Places:
        """``bare`` undone."""
        token, position = tensors
        return Places(token, position, self.top_k)

    def after(self, dependency: Tensor) -> Places:
        """Places by which a graph cannot dispatch before there is ``dependency``, see ``tgl::after``."""
        return self._replace(token=after(self.token, dependency))

    def combined(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``[S, columns]``: the sum of every token's ``rows [T, columns]``, in ``dtype`` or that of the rows."""
        if unobserved_call(rows, self.token, self.position):
            return permutation.combine(rows, *self, out_dtype=dtype)
        if compiled_for_cpu(rows.device):
            return expressions.sum_choices(rows, self.position, self.top_k, dtype)
        made: Tensor = torch.ops.tgl.combine(rows, *self, out_dtype=dtype)
        return made
