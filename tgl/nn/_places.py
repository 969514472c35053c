"""The rows of tokens among those of experts, for an autograd function that goes from tokens to tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import permutation
from ..ops._library import unobserved_call
from ..ops.after import after
from . import _routing_expressions as expressions
from ._gemms import Gemms
from ._transforms import compiled_for_cpu
from .routing import Routing


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

    def read(self, t: Tensor, gemms: Gemms) -> tuple[Tensor, Tensor | None]:
        """``t [S, columns]`` for ``input`` or ``grad`` of ``gemms``, with an index if they gather; else dispatched."""
        return (t, self.token) if gemms.gathers else (self.dispatched(t), None)

    def after(self, dependency: Tensor) -> Places:
        """Places by which a graph cannot dispatch before there is ``dependency``, see ``tgl::after``."""
        return self._replace(token=after(self.token, dependency))

    def combined(self, rows: Tensor) -> Tensor:
        """``[S, columns]``: the sum of every token's ``rows [T, columns]``."""
        if unobserved_call(rows, self.token, self.position):
            return permutation.combine(rows, *self)
        if compiled_for_cpu(rows.device):
            return expressions.sum_choices(rows, self.position, self.top_k)
        made: Tensor = torch.ops.tgl.combine(rows, *self)
        return made
