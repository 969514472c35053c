"""The three GEMMs of a grouped linear layer, on dense or quantised operands.

An operand is a tuple of plain tensors, so that it can be saved, offloaded or stashed component by component. A dense
operand is one tensor; a quantised one has data, scales and other components of its format.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from ..ops import (
    grouped_activation,
    grouped_dbias,
    grouped_gemm,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_accumulate_,
)

Operand = tuple[Tensor, ...]


class Operands(NamedTuple):
    """One tensor prepared for the GEMMs that read it; ``()`` where not requested.

    Attributes:
        fprop: read by the forward GEMM (inputs and weights).
        dgrad: read by the input gradient (weights and output gradients).
        wgrad: read by the weight gradient (inputs and output gradients).
    """

    fprop: Operand = ()
    dgrad: Operand = ()
    wgrad: Operand = ()


class Destination(TypedDict):
    """Keyword arguments for the destination of a GEMM's result ``[T, ...]``; a dict, because a class costs a call.

    Attributes:
        out_dtype: dtype of the result.
        out: a buffer of that dtype, whose rows past ``offs[-1]`` are not written; None for new memory.
        zero_tail: whether those rows are zero in new memory. Without it, for intermediate results of a layer, they are
            undefined.
    """

    out_dtype: torch.dtype
    out: Tensor | None
    zero_tail: bool


class Accumulator(NamedTuple):
    """The buffer that a weight gradient is added to.

    Attributes:
        main_grad: ``[G, N, K]``, whose slots may be padded.
        slots: the slot of every group in ``main_grad [S, N, K]``, see ``grouped_gemm_wgrad_accumulate_``.
        edge: in a compiled graph the gradient edge of the weight, see ``tgl/ops/_requested_gradients.py``; else None.
    """

    main_grad: Tensor
    slots: Tensor | None = None
    edge: Tensor | None = None


class Gemms(Protocol):
    """Preparation of operands and the GEMMs on them, made of registered ops; nothing is read on the host.

    T rows, G groups, ``x [T, K]``, ``w [G, N, K]``, ``dy [T, N]``; ``offs`` int32 ``[G]`` cumulative ends. Rows past
    ``offs[-1]`` are not read; results are zero there, buffers are not written there.

    Attributes:
        fuses_activation: whether ``activated_input`` is faster than an activation followed by ``input``.
        gathers: whether ``input`` and ``grad`` support ``rows``, an int32 index ``[T]`` of tokens as in
            ``group_quantize``: the result is that for ``x[rows]``, or ``dy[rows]``.
        blocked_scales: whether the second component of an operand is a blocked scale.
    """

    fuses_activation: bool
    gathers: bool

    @property
    def blocked_scales(self) -> bool: ...

    def reset_state(self) -> None:
        """Reset the state, when the layer's parameters are reset."""

    def input(
        self,
        x: Tensor,
        offs: Tensor,
        rows: Tensor | None = None,
        *,
        fprop: bool,
        wgrad: bool,
        state: Operand = (),
    ) -> Operands:
        """Prepare the layer's input for the requested GEMMs, with ``state`` from ``state_of_input``.

        A call without ``fprop`` repeats a preparation of the forward, and changes no state.
        """

    def activated_input(
        self,
        h: Tensor,
        offs: Tensor,
        probs: Tensor | None,
        activation: dict[str, Any],
        *,
        fprop: bool,
        wgrad: bool,
        state: Operand = (),
    ) -> Operands:
        """Return ``input`` of ``grouped_activation(h, offs, probs, **activation)``."""

    def state_of_input(self) -> Operand:
        """Return a copy of the state that ``input`` reads, if calls change that state; else ``()``.

        If a backward prepares the input again, pass it to both calls.
        """

    def weight(
        self, w: Tensor, slots: Tensor | None = None, *, dgrad: bool, is_first_microbatch: bool | Tensor | None
    ) -> Operands:
        """Prepare the weight for fprop, and for dgrad if requested; called without grad.

        With ``slots`` the weight is ``w [S, N, K]``, as in ``grouped_gemm`` and ``group_quantize``.

        ``is_first_microbatch``: True prepares and caches, False uses the cache, None prepares without caching.
        """

    def grad(
        self, dy: Tensor, offs: Tensor, rows: Tensor | None = None, *, dgrad: bool, wgrad: bool, dbias: bool
    ) -> tuple[Operands, Tensor | None]:
        """Prepare the output gradient, and sum it per group (fp32 ``[G, N]``) if ``dbias``."""

    def wgrad_operands_like(
        self, rows: int, groups: int, in_features: int, out_features: int, dtype: torch.dtype
    ) -> tuple[Operand, Operand]:
        """Return meta tensors with the shapes and dtypes of the wgrad operands of ``x`` and ``dy``.

        Blocked scales are viewed as ``[columns / 128, bytes]``, so that those of fewer rows are a leading part.
        """

    def fprop(
        self,
        x: Operand,
        w: Operand,
        offs: Tensor,
        bias: Tensor | None,
        bias_scale: Tensor | None,
        to: Destination,
    ) -> Tensor:
        """Return the product ``[T, N]``, plus ``bias`` times ``bias_scale``."""

    def dgrad(self, dy: Operand, w: Operand, offs: Tensor, to: Destination) -> Tensor:
        """Return the input gradient ``[T, K]``."""

    def wgrad(
        self, x: Operand, dy: Operand, offs: Tensor, *, out_dtype: torch.dtype, alignment: int | None = None
    ) -> Tensor:
        """Return the weight gradient ``[G, N, K]``, contiguous, or with every slot aligned to ``alignment`` bytes."""

    def wgrad_into(self, x: Operand, dy: Operand, offs: Tensor, to: Accumulator, *, overwrite: bool) -> None:
        """Add the weight gradient ``to`` a buffer, or ``overwrite`` it."""


class DenseGemms:
    """The GEMMs on dense tensors."""

    fuses_activation = gathers = blocked_scales = False

    def reset_state(self) -> None:
        pass

    def input(
        self,
        x: Tensor,
        offs: Tensor,
        rows: Tensor | None = None,
        *,
        fprop: bool,
        wgrad: bool,
        state: Operand = (),
    ) -> Operands:
        return Operands(fprop=(x,) if fprop else (), wgrad=(x,) if wgrad else ())

    def activated_input(
        self,
        h: Tensor,
        offs: Tensor,
        probs: Tensor | None,
        activation: dict[str, Any],
        *,
        fprop: bool,
        wgrad: bool,
        state: Operand = (),
    ) -> Operands:
        return self.input(grouped_activation(h, offs, probs, **activation), offs, fprop=fprop, wgrad=wgrad)

    def state_of_input(self) -> Operand:
        return ()

    def weight(
        self, w: Tensor, slots: Tensor | None = None, *, dgrad: bool, is_first_microbatch: bool | Tensor | None
    ) -> Operands:
        operand = (w,) if slots is None else (w, slots)
        return Operands(fprop=operand, dgrad=operand if dgrad else ())

    def grad(
        self, dy: Tensor, offs: Tensor, rows: Tensor | None = None, *, dgrad: bool, wgrad: bool, dbias: bool
    ) -> tuple[Operands, Tensor | None]:
        operands = Operands(dgrad=(dy,) if dgrad else (), wgrad=(dy,) if wgrad else ())
        return operands, grouped_dbias(dy, offs) if dbias else None

    def wgrad_operands_like(
        self, rows: int, groups: int, in_features: int, out_features: int, dtype: torch.dtype
    ) -> tuple[Operand, Operand]:
        x, dy = (torch.empty(rows, width, dtype=dtype, device="meta") for width in (in_features, out_features))
        return (x,), (dy,)

    def fprop(
        self,
        x: Operand,
        w: Operand,
        offs: Tensor,
        bias: Tensor | None,
        bias_scale: Tensor | None,
        to: Destination,
    ) -> Tensor:
        written: dict[str, Any] = {"out_dtype": to["out_dtype"], "out": to["out"]}
        return grouped_gemm(x[0], w[0].transpose(1, 2), offs, bias, bias_scale, *w[1:], **written)

    def dgrad(self, dy: Operand, w: Operand, offs: Tensor, to: Destination) -> Tensor:
        return grouped_gemm(dy[0], w[0], offs, None, None, *w[1:], out_dtype=to["out_dtype"], out=to["out"])

    def wgrad(
        self, x: Operand, dy: Operand, offs: Tensor, *, out_dtype: torch.dtype, alignment: int | None = None
    ) -> Tensor:
        return grouped_gemm_wgrad(dy[0], x[0], offs, out_dtype=out_dtype, alignment=alignment)

    def wgrad_into(self, x: Operand, dy: Operand, offs: Tensor, to: Accumulator, *, overwrite: bool) -> None:
        if to.edge is None:
            grouped_gemm_wgrad_accumulate_(dy[0], x[0], offs, to.main_grad, to.slots, overwrite=overwrite)
        else:
            accumulate = torch.ops.tgl.grouped_gemm_wgrad_accumulate_.requested
            accumulate(dy[0], x[0], offs, to.main_grad, to.slots, overwrite=overwrite, edge=to.edge)
