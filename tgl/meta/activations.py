"""The table of activations: names, gates, constants and formulas.

An activation is ``y = p A(g) L(u)``: ``g`` is the gate, ``u`` the linear half (absent, with ``L = 1``, if not gated)
and ``p`` the row's probability. The CPU implementation, the compiled expressions, the masked aten implementation, the
second derivative and the sample inputs follow from the table. The kernels have one dict of activation functions, whose
keys are checked against the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .checks import unknown


class Constants(Protocol):
    """The constants of a call; a gate or a linear half reads those that it names."""

    @property
    def limit(self) -> float: ...
    @property
    def alpha(self) -> float: ...
    @property
    def offset(self) -> float: ...


class Gate(NamedTuple):
    """The gate function ``A``, elementwise and of any shape.

    Attributes:
        name: name of the function, the one in transformers' ``hidden_act`` if there is one.
        value: ``(constants, g) -> A(g)``, a new tensor.
        factors: ``(constants, g) -> A(g), A'(g)``, new tensors, of differentiable operations.
        constants: names of the constants that they read.
    """

    name: str
    value: Callable[[Constants, Tensor], Tensor]
    factors: Callable[[Constants, Tensor], tuple[Tensor, Tensor]]
    constants: tuple[str, ...] = ()


class Linear(NamedTuple):
    """The linear half's function ``L``, elementwise and of any shape.

    Attributes:
        value: ``(constants, u, out) -> L(u)``: a new tensor, ``u`` itself, or ``out`` where that is given.
        slope: ``(constants, u) -> L'(u)``, boolean if it is 0 or 1; None where it is 1 everywhere.
        constants: names of the constants that they read.
    """

    value: Callable[[Constants, Tensor, Tensor | None], Tensor]
    slope: Callable[[Constants, Tensor], Tensor | None]
    constants: tuple[str, ...] = ()


class Factors(NamedTuple):
    """``A, A', L, L'``: ``L`` None when there is no linear half, ``L'`` None there and where it is 1."""

    a: Tensor
    a1: Tensor
    linear: Tensor | None
    slope: Tensor | None


@dataclass(frozen=True)
class Activation:
    """One activation.

    Attributes:
        name: name in ``kind`` and the layers' ``activation``.
        gate: ``A``.
        linear: ``L``; None: not gated.
        exact: whether it maps integers to integers, so that integer samples have exact results.
    """

    name: str
    gate: Gate
    linear: Linear | None = None
    exact: bool = False

    @property
    def gated(self) -> bool:
        """Whether the activation has a linear half: ``[T, 2 I] -> [T, I]``."""
        return self.linear is not None

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the constants that the activation depends on."""
        return self.gate.constants + (self.linear.constants if self.linear is not None else ())

    def width(self, columns: int) -> int:
        """Return the number of input columns for ``columns`` of the result."""
        return 2 * columns if self.gated else columns

    def value(self, constants: Constants, g: Tensor, u: Tensor | None) -> Tensor:
        """Return ``A(g) L(u)``."""
        a = self.gate.value(constants, g)
        return a if self.linear is None or u is None else a.mul_(self.linear.value(constants, u, None))

    def factors(self, constants: Constants, g: Tensor, u: Tensor | None) -> Factors:
        """Return ``A, A', L, L'``."""
        a, a1 = self.gate.factors(constants, g)
        if self.linear is None or u is None:
            return Factors(a, a1, None, None)
        return Factors(a, a1, self.linear.value(constants, u, None), self.linear.slope(constants, u))

    def curvature(self, constants: Constants, g: Tensor) -> Tensor:
        """Return ``A''``, the derivative of ``A'``, itself differentiable."""
        slope, pullback = torch.func.vjp(lambda x: self.gate.factors(constants, x)[1], g)  # type: ignore[misc]
        return pullback(torch.ones_like(slope))[0]


# (1 + tanh(y)) / 2 = sigmoid(2 y): the cubic of 2 y in GELU's approximation by a tanh.
TANH_LINEAR = 2 * math.sqrt(2 / math.pi)
TANH_CUBIC = 0.044715 * TANH_LINEAR

# --- gates ------------------------------------------------------------------------------------------------------------


def _silu_factors(_: Constants, g: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(g)
    a = g * s
    return a, s + a * (1 - s)


def _clamped_silu(c: Constants, g: Tensor) -> Tensor:
    g = g.clamp(max=c.limit)
    return torch.sigmoid(c.alpha * g).mul_(g)


def _clamped_silu_factors(c: Constants, g: Tensor) -> tuple[Tensor, Tensor]:
    inside, g = g <= c.limit, g.clamp(max=c.limit)
    s = torch.sigmoid(c.alpha * g)
    a = g * s
    return a, (s + c.alpha * a * (1 - s)) * inside  # (x s(alpha x))' = s + alpha x s (1 - s)


def _squared_relu_factors(_: Constants, g: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.relu(g)
    return a * a, 2 * a


def _gelu(_: Constants, g: Tensor) -> Tensor:
    return torch.erfc(g * -math.sqrt(0.5)).mul_(g).mul_(0.5)  # not 1 + erf, which cancels where g is negative


def _gelu_factors(_: Constants, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x F(x)`` and ``F(x) + x f(x)``, with the normal distribution's ``F`` and its density ``f``."""
    probability = torch.erfc(g * -math.sqrt(0.5)) * 0.5
    density = torch.exp(g * g * -0.5) * (1 / math.sqrt(2 * math.pi))
    return g * probability, probability + g * density


def _gelu_tanh(_: Constants, g: Tensor) -> Tensor:
    return torch.sigmoid((g * g * TANH_CUBIC + TANH_LINEAR) * g).mul_(g)


def _gelu_tanh_factors(_: Constants, g: Tensor) -> tuple[Tensor, Tensor]:
    square = g * g
    s = torch.sigmoid((square * TANH_CUBIC + TANH_LINEAR) * g)
    a = g * s
    return a, s + a * (1 - s) * (square * (3 * TANH_CUBIC) + TANH_LINEAR)


def _relu_factors(_: Constants, g: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(g), (g > 0).to(g.dtype)


SILU = Gate("silu", lambda _, g: torch.nn.functional.silu(g), _silu_factors)
CLAMPED_SILU = Gate("clamped_silu", _clamped_silu, _clamped_silu_factors, ("limit", "alpha"))
GELU = Gate("gelu", _gelu, _gelu_factors)
GELU_TANH = Gate("gelu_pytorch_tanh", _gelu_tanh, _gelu_tanh_factors)
RELU = Gate("relu", lambda _, g: torch.relu(g), _relu_factors)
SQUARED_RELU = Gate("relu2", lambda _, g: torch.relu(g).square_(), _squared_relu_factors)

# --- linear halves ----------------------------------------------------------------------------------------------------


def _clamped(c: Constants, u: Tensor, out: Tensor | None) -> Tensor:
    return torch.clamp(u, -c.limit, c.limit, out=out).add_(c.offset)


IDENTITY = Linear(lambda _c, u, _out: u, lambda _c, _u: None)
CLAMPED = Linear(_clamped, lambda c, u: u.abs() <= c.limit, ("limit", "offset"))

# --- the table --------------------------------------------------------------------------------------------------------

TABLE: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation("swiglu", SILU, IDENTITY),
        Activation("clamped_qgeglu", CLAMPED_SILU, CLAMPED),
        Activation("geglu", GELU, IDENTITY),
        Activation("geglu_tanh", GELU_TANH, IDENTITY),
        Activation("reglu", RELU, IDENTITY, exact=True),
        Activation("silu", SILU),
        Activation("gelu", GELU),
        Activation("gelu_tanh", GELU_TANH),
        Activation("relu", RELU, exact=True),
        Activation("srelu", SQUARED_RELU, exact=True),
    )
}
"""Every activation by name."""


def named(kind: str, argument: str = "kind", op: str | None = None) -> Activation:
    """Return the activation of that name.

    Args:
        kind: the name.
        argument: the argument's name, for the message.
        op: the op's name, for the message; None: no op.

    Raises:
        ValueError: there is none.
    """
    found = TABLE.get(kind) if isinstance(kind, str) else None
    if found is None:
        where = "" if op is None else f"tgl::{op}: "
        raise ValueError(f"{where}`{argument}` must be one of {', '.join(TABLE)}, but got {unknown(kind, TABLE)}")
    return found
