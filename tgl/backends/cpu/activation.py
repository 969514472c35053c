"""The CPU kernels of ``grouped_activation``: steps that fit the cache, through a few buffers that every step reuses.

A step's computation follows from the table of activations; a few gates have a faster implementation.

Whole-tensor expressions would be limited by memory, and even more by the page faults of their temporaries. Shorter
steps would be limited by Python overhead.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...meta import specs
from ...meta.activations import CLAMPED_SILU, IDENTITY, RELU, SILU, SQUARED_RELU, Activation, Gate, Linear
from .scratch import Scratch

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params

_ELEMENTS = 1 << 20  # in all the buffers of SwiGLU together: few calls per layer, yet near the processor

_silu_out = torch.ops.aten.silu.out
_silu_backward_out = torch.ops.aten.silu_backward.grad_input
_clamp_min_out = torch.ops.aten.clamp_min.out
_threshold_backward_out = torch.ops.aten.threshold_backward.grad_input


class _Steps:
    """Cuts ``most`` rows into steps and lends buffers of one step's size, in the accumulator's dtype.

    ``x`` is the pre-activation, ``width`` the number of output columns of the activation, and ``backward`` the number
    of buffers of that width that a backward needs for rows of fewer bits.
    """

    def __init__(self, x: Tensor, width: int, most: int, params: Params, *, backward: int = 0) -> None:
        self.params, self.width, self.dtype = params, width, specs.accumulator(x.dtype)
        wide = x.dtype == self.dtype
        self.in_place = wide and not (backward and params.gated and params.interleaved)
        columns = width if wide else x.shape[1] + backward * width
        self.rows = max(1, min(most, _ELEMENTS // max(columns, 1)))
        self.scratch = Scratch()

    def cut(self, t: Tensor | None, rows: int) -> Iterable[Any]:
        """Return the parts of the first ``rows`` rows of ``t``, step by step; None for every step if ``t`` is None."""
        if t is None:
            return itertools.repeat(None)
        if rows == t.shape[0] and rows <= self.rows:
            return (t,) if rows else ()
        full, rest = divmod(rows, self.rows)
        return torch.split_with_sizes(t, [self.rows] * full + [rest, t.shape[0] - rows])[: full + (rest > 0)]

    def room(self, name: str, rows: int, halves: int = 1) -> Tensor:
        """Return a buffer of that many rows; its contents last until the end of the step."""
        return self.scratch.room(name, rows, halves * self.width, dtype=self.dtype)

    def widened(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a buffer with the values of ``x``, its gate and its linear half, side by side."""
        if not self.params.gated:
            buffer = self.room("x", x.shape[0]).copy_(x)
            return buffer, buffer, None
        buffer = self.room("x", x.shape[0], 2)
        g, u = torch.split_with_sizes(buffer, [self.width, self.width], 1)
        if self.params.interleaved:
            g.copy_(x[:, 0::2])
            u.copy_(x[:, 1::2])
        else:
            buffer.copy_(x)  # one pass over whole rows; the halves would be two passes over pieces of rows
        return buffer, g, u

    def narrowed(self, buffer: Tensor, x: Tensor) -> None:
        """Round the values of such a buffer to ``x``."""
        if self.params.gated and self.params.interleaved:
            x[:, 0::2].copy_(buffer[:, : self.width])
            x[:, 1::2].copy_(buffer[:, self.width :])
        else:
            x.copy_(buffer)


def _routed_rows(x: Tensor, offs: Tensor) -> int:
    """Return the number of rows before the tail, whatever ``offs`` holds; reads it on the host."""
    return min(max([0, *offs.tolist()]), x.shape[0])


def as_read(t: Tensor) -> Tensor:
    """Return ``t``, or a contiguous copy if steps read it in place: ATen's kernels give other bits at other strides."""
    return t.contiguous() if t.dtype == specs.accumulator(t.dtype) else t


def forward_copies(x: Tensor, *_: Any, **__: Any) -> dict[str, int]:
    """Return the bytes that ``forward`` copies, by name."""
    return copies_as_read(x=x)


def backward_copies(dy: Tensor, x: Tensor, *_: Any, **__: Any) -> dict[str, int]:
    """Return the bytes that ``backward`` copies, by name."""
    return copies_as_read(dy=dy, x=x)


def copies_as_read(**operands: Tensor) -> dict[str, int]:
    """Return the bytes of the operands that ``as_read`` copies, by name."""
    wide = {name: t for name, t in operands.items() if t.dtype == specs.accumulator(t.dtype)}
    return {name: t.nbytes for name, t in wide.items() if not t.is_contiguous()}


def _column(probs: Tensor | None) -> Tensor | None:
    """Return ``probs`` as a column ``[T, 1]``."""
    return None if probs is None else probs[:, None]


# --- gates ------------------------------------------------------------------------------------------------------------


class _FromTable:
    """A gate's part of a step, by the expressions of the table. Arguments called ``out`` are buffers it may use."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def value(self, steps: _Steps, g: Tensor, out: Tensor) -> Tensor:
        """Return ``A(g)``; ``out`` may be ``g``."""
        return self.gate.value(steps.params, g)

    def factors(self, steps: _Steps, g: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``A(g)``, and the factors that ``through`` needs."""
        return self.gate.factors(steps.params, g)

    def through(self, d: Tensor, g: Tensor, z: Tensor, steps: _Steps, out: Tensor) -> None:
        """Write ``out = d A'(g)``; ``out`` may be ``d`` or ``g``."""
        torch.mul(d, z, out=out)

    def gradients(self, steps: _Steps, d: Tensor, g: Tensor, dprobs: Tensor | None, a: Tensor, dg: Tensor) -> None:
        """Write ``dg = d A'(g)`` and ``dprobs`` without a linear half; ``dg`` may be ``g``, ``a`` is a buffer."""
        value, z = self.factors(steps, g, a)
        if dprobs is not None:
            torch.sum(torch.mul(d, value, out=a), 1, out=dprobs)
        self.through(d, g, z, steps, dg)


class _SiLU(_FromTable):
    """SiLU by ATen's kernels."""

    def value(self, steps: _Steps, g: Tensor, out: Tensor) -> Tensor:
        _silu_out(g, out=out)
        return out

    def factors(self, steps: _Steps, g: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        return self.value(steps, g, out), g

    def through(self, d: Tensor, g: Tensor, z: Tensor, steps: _Steps, out: Tensor) -> None:
        _silu_backward_out(d, z, grad_input=out)


class _ClampedSiLU(_FromTable):
    """Clamped SiLU through buffers; ``A'(g) = silu'(z)`` below the limit, with ``z = alpha min(g, limit)``."""

    def value(self, steps: _Steps, g: Tensor, out: Tensor) -> Tensor:
        return self.factors(steps, g, out)[0]

    def factors(self, steps: _Steps, g: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        z = steps.room("z", g.shape[0])
        torch.clamp(g, max=steps.params.limit, out=out)
        torch.mul(out, steps.params.alpha, out=z)
        return out.mul_(torch.sigmoid(z, out=steps.room("s", g.shape[0]))), z

    def through(self, d: Tensor, g: Tensor, z: Tensor, steps: _Steps, out: Tensor) -> None:
        torch.mul(d, g <= steps.params.limit, out=out)
        _silu_backward_out(out, z, grad_input=out)


class _ReLU(_FromTable):
    """ReLU by ATen's kernels."""

    def value(self, steps: _Steps, g: Tensor, out: Tensor) -> Tensor:
        return _clamp_min_out(g, 0, out=out)

    def factors(self, steps: _Steps, g: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        return self.value(steps, g, out), g

    def through(self, d: Tensor, g: Tensor, z: Tensor, steps: _Steps, out: Tensor) -> None:
        _threshold_backward_out(d, z, 0, grad_input=out)


class _SquaredReLU(_FromTable):
    """Squared ReLU through buffers; with ``r = max(g, 0)`` the gradient is ``2 d r`` and the summand ``r (d r)``."""

    def value(self, steps: _Steps, g: Tensor, out: Tensor) -> Tensor:
        return torch.clamp(g, min=0, out=out).square_()

    def gradients(self, steps: _Steps, d: Tensor, g: Tensor, dprobs: Tensor | None, a: Tensor, dg: Tensor) -> None:
        torch.clamp(g, min=0, out=a)
        torch.mul(d, a, out=dg)
        if dprobs is not None:
            torch.sum(a.mul_(dg), 1, out=dprobs)
        dg.mul_(2)


_GATES: dict[Gate, type[_FromTable]] = {
    SILU: _SiLU,
    CLAMPED_SILU: _ClampedSiLU,
    RELU: _ReLU,
    SQUARED_RELU: _SquaredReLU,
}
"""Gates that are faster than the table's expressions, which take a pass and a temporary per operation."""


def _gate(activation: Activation) -> _FromTable:
    return _GATES.get(activation.gate, _FromTable)(activation.gate)


def _linear(steps: _Steps, linear: Linear, u: Tensor) -> Tensor:
    """Return ``L(u)``, which may be ``u`` itself."""
    return u if linear is IDENTITY else linear.value(steps.params, u, steps.room("s", u.shape[0]))


# --- ops --------------------------------------------------------------------------------------------------------------


def forward(x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, out: Tensor) -> None:
    """Write ``out = probs A(g) L(u)`` and a zero tail."""
    x = as_read(x)
    rows, activation = _routed_rows(x, offs), params.activation
    gate, linear = _gate(activation), activation.linear
    steps, column = _Steps(x, out.shape[1], rows, params), _column(probs)
    for part_x, p, part in zip(steps.cut(x, rows), steps.cut(column, rows), steps.cut(out, rows)):
        if steps.in_place:
            buffer = part
            g, u = params.halves(part_x)
        else:
            _, g, u = steps.widened(part_x)
            buffer = g
        y = gate.value(steps, g, buffer)
        if linear is not None and u is not None:
            y.mul_(_linear(steps, linear, u))
        if p is not None:
            y.mul_(p)
        if y is not part:
            part.copy_(y)
    steps.scratch.keep()
    if rows < out.shape[0]:
        out[rows:].zero_()


def _gradients(
    steps: _Steps,
    gate: _FromTable,
    linear: Linear,
    d: Tensor,
    g: Tensor,
    u: Tensor,
    dprobs: Tensor | None,
    *,
    a: Tensor,
    w: Tensor,
    du: Tensor,
    dg: Tensor,
    again: Tensor | None,
) -> None:
    """Write ``dg = d A'(g) L(u)``, ``du = d A(g) L'(u)`` and ``dprobs``, of one step with a linear half.

    ``a`` and ``w`` are buffers for intermediate values. ``du`` may be ``a``, ``w`` may be ``d`` or ``dg``, ``dg`` may
    be ``g``. Unless the step works in place, ``u`` is overwritten. ``again = A(g) L(u)`` if it is given; it may be
    ``d`` where ``du`` is not ``a`` and ``w`` is not ``d``.
    """
    value, z = gate.factors(steps, g, a)
    held = _linear(steps, linear, u)
    if again is not None and again is not d:
        torch.mul(value, held, out=again)
    torch.mul(d, value, out=du)
    torch.mul(d, held, out=w)
    if again is d:
        torch.mul(value, held, out=again)
    slope = linear.slope(steps.params, u)
    if dprobs is not None:
        torch.sum(torch.mul(du, held, out=a if steps.in_place else held), 1, out=dprobs)
    if slope is not None:
        du.mul_(slope)
    gate.through(w, g, z, steps, dg)


def backward(
    dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params, dx: Tensor, dprobs: Tensor
) -> None:
    """Write ``dg = probs dy A'(g) L(u)``, ``du = probs dy A(g) L'(u)`` and ``dprobs = sum over the row of dy A(g)
    L(u)``.
    """
    differentiate((as_read(dy), as_read(x), offs, probs), params, dx, dprobs, again=False)


def differentiate(
    operands: tuple[Tensor, Tensor, Tensor, Tensor | None], params: Params, dx: Tensor, dprobs: Tensor, *, again: bool
) -> None:
    """Run ``backward``, and with ``again`` also ``forward`` of ``x``, whose result overwrites ``dy``.

    ``A(g)`` is a factor of both, and memory that is in use already costs no page faults.
    """
    dy, x, offs, probs = operands
    if again and params.gated and params.interleaved and x.dtype == specs.accumulator(x.dtype):
        # The forward reads every second column in place, and ATen's kernels give other bits there.
        differentiate(operands, params, dx, dprobs, again=False)
        return forward(x, offs, probs, params=params, out=dy)
    rows, activation = _routed_rows(x, offs), params.activation
    gate, linear = _gate(activation), activation.linear
    steps, sums = _Steps(x, dy.shape[1], rows, params, backward=2 + again), dprobs if probs is not None else None
    columns = steps.cut(_column(probs), rows), steps.cut(sums, rows)
    for part_x, place, part, p, dp in zip(steps.cut(x, rows), steps.cut(dy, rows), steps.cut(dx, rows), *columns):
        d, a = place, steps.room("a", place.shape[0])
        y: Tensor | None = None
        if steps.in_place:
            g, u = params.halves(part_x)
            dg, du = params.halves(part)
            if linear is None or u is None or du is None:
                gate.gradients(steps, d, g, dp, a, dg)
                y = gate.value(steps, g, place) if again else None
            else:
                y = place if again else None
                _gradients(steps, gate, linear, d, g, u, dp, a=a, w=dg, du=du, dg=dg, again=y)
            if p is not None:
                part.mul_(p)
        else:
            # Everything overwrites the value it is computed from, so that a step has more rows.
            buffer, g, u = steps.widened(part_x)
            d = steps.room("d", d.shape[0]).copy_(d)
            y = steps.room("y", d.shape[0]) if again else None
            if linear is None or u is None:
                y = None if y is None else gate.value(steps, g, y)
                gate.gradients(steps, d, g, dp, a, g)
            else:
                _gradients(steps, gate, linear, d, g, u, dp, a=a, w=d, du=a, dg=g, again=y)
            if p is not None:
                g.mul_(p)
            if u is not None:
                u.copy_(a) if p is None else torch.mul(a, p, out=u)
            steps.narrowed(buffer, part)
        if y is not None:
            if p is not None:
                y.mul_(p)
            if y is not place:
                place.copy_(y)
    steps.scratch.keep()
    if rows < dx.shape[0]:
        dx[rows:].zero_()
        dprobs[rows:].zero_()
        if again:
            dy[rows:].zero_()
