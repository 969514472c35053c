"""``A(g) L(u)`` and its gradient factors in float32, with the products in the order of ``tgl.meta.activations``.

The sigmoid is 1 / (1 + exp(-z)) with an exponential of 2 ulp and a reciprocal of 1 ulp; it is 0 below z = -87.3, where
it would be subnormal. For 16-bit results ("fast") the exponential is 2 ^ (-z log2 e) of a rounded product, off by up to
2 + 1.5 |z| ulp: a 64th of half a unit of such a result, where that is not 0. GELU's tanh approximation is computed as
the sigmoid that it is. GELU itself needs the normal distribution function, computed as the exponential of -x^2 / 2
times a polynomial: unlike 1 + erf it loses no precision for negative x. NaN passes through clamps and the ReLUs.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from ...meta import activations
from ...meta.table import OnePerName
from .activation_spec import ActivationSpec

LOG2_E = 1.4426950408889634
# t P(t), with t = 1 / (1 + x / 4), approximates F(-x) / exp(-x^2 / 2) for all x >= 0, with F the normal distribution
# function. The polynomial has the least relative error, 0.6 units of 2^-24, and 4 when evaluated in float32.
MILLS_AT = 0.25
MILLS = (
    0.09973556669369414,
    0.09973643354531106,
    0.09346631383740545,
    0.08160350931606239,
    0.05897308273588353,
    0.06370527280094285,
    -0.031728432940806045,
    0.0956083835135128,
    -0.08088362209843211,
    0.019783475691474307,
)


class ActivationFactors(NamedTuple):
    """The values and derivatives ``A, A', L, L'``."""

    a: Float32
    a1: Float32
    linear: Float32
    slope: Float32


class Gradients(NamedTuple):
    """Gradients of the gate and of the linear half (None if there is none), the summand of a probability's gradient,
    and the activation's result. The compiler drops what a kernel does not use.
    """

    gate: Float32
    linear: Float32 | None
    probability: Float32
    result: Float32


def at_most(value: Float32, limit: Float32) -> Float32:
    """Return ``min(value, limit)``, NaN for NaN."""
    return cutlass.select_(value > limit, limit, value)


def at_least(value: Float32, limit: Float32) -> Float32:
    """Return ``max(value, limit)``, NaN for NaN."""
    return cutlass.select_(value < limit, limit, value)


def sigmoid(z: Float32, fast: bool) -> Float32:
    """Return ``1 / (1 + exp(-z))``."""
    power = cute.math.exp2(z * Float32(-LOG2_E), approx=True, ftz=True) if fast else cute.math.exp(-z)
    return cute.arch.rcp_approx(Float32(1) + power)


# --- gates and linear halves ------------------------------------------------------------------------------------------


def _silu(g: Float32, fast: bool) -> Float32:
    return g * sigmoid(g, fast)


def _silu_factors(g: Float32, fast: bool) -> tuple[Float32, Float32]:
    """Return SiLU and its derivative: ``(x s(x))' = s (1 + x (1 - s))``."""
    one, s = Float32(1), sigmoid(g, fast)
    return g * s, s * (one + g * (one - s))


def _normal(g: Float32, fast: bool) -> tuple[Float32, Float32]:
    """Return the normal distribution function at ``g``, and ``exp(-g^2 / 2)``."""
    x, half = cute.math.absf(g), g * g * Float32(-0.5)
    power = cute.math.exp2(half * Float32(LOG2_E), approx=True, ftz=True) if fast else cute.math.exp(half)
    t = cute.arch.rcp_approx(cute.math.fma(x, Float32(MILLS_AT), Float32(1)))
    ratio = Float32(MILLS[-1])
    for coefficient in MILLS[-2::-1]:
        ratio = cute.math.fma(ratio, t, Float32(coefficient))
    above = ratio * t * power
    return cutlass.select_(g < Float32(0), above, Float32(1) - above), power


def _gelu(g: Float32, fast: bool) -> Float32:
    return g * _normal(g, fast)[0]


def _gelu_factors(g: Float32, fast: bool) -> tuple[Float32, Float32]:
    """Return GELU and its derivative: ``(x F(x))' = F(x) + x f(x)``."""
    probability, power = _normal(g, fast)
    return g * probability, cute.math.fma(g * Float32(1 / math.sqrt(2 * math.pi)), power, probability)


def _gelu_tanh(g: Float32, fast: bool) -> Float32:
    z = cute.math.fma(g * g, Float32(activations.TANH_CUBIC), Float32(activations.TANH_LINEAR)) * g
    return g * sigmoid(z, fast)


def _gelu_tanh_factors(g: Float32, fast: bool) -> tuple[Float32, Float32]:
    """Return GELU by tanh and its derivative: ``(x s(z))' = s + x s (1 - s) z'``."""
    square, linear = g * g, Float32(activations.TANH_LINEAR)
    s = sigmoid(cute.math.fma(square, Float32(activations.TANH_CUBIC), linear) * g, fast)
    a = g * s
    slope = cute.math.fma(square, Float32(3 * activations.TANH_CUBIC), linear)
    return a, cute.math.fma(a * (Float32(1) - s), slope, s)


def _relu(g: Float32, fast: bool) -> Float32:
    return at_least(g, Float32(0))


def _relu_factors(g: Float32, fast: bool) -> tuple[Float32, Float32]:
    return at_least(g, Float32(0)), cutlass.select_(g > Float32(0), Float32(1), Float32(0))


def _clamped_qgeglu(spec: ActivationSpec, g: Float32, u: Float32 | None, fast: bool) -> Float32:
    g = at_most(g, Float32(spec.limit))
    u = at_least(at_most(u, Float32(spec.limit)), Float32(-spec.limit))
    return g * sigmoid(Float32(spec.alpha) * g, fast) * (u + Float32(spec.offset))


def _clamped_qgeglu_factors(spec: ActivationSpec, g: Float32, u: Float32 | None, fast: bool) -> ActivationFactors:
    one, limit = Float32(1), Float32(spec.limit)
    inside = cutlass.select_(g <= limit, one, Float32(0))
    held = at_least(at_most(u, limit), -limit)
    slope = cutlass.select_(held == u, one, Float32(0))
    g = at_most(g, limit)
    z = Float32(spec.alpha) * g
    s = sigmoid(z, fast)
    return ActivationFactors(g * s, s * (one + z * (one - s)) * inside, held + Float32(spec.offset), slope)


def _squared_relu(spec: ActivationSpec, g: Float32, u: Float32 | None, fast: bool) -> Float32:
    a = at_least(g, Float32(0))
    return a * a


def _squared_relu_factors(spec: ActivationSpec, g: Float32, u: Float32 | None, fast: bool) -> ActivationFactors:
    """Return the factors of squared ReLU, which is r r with the derivative 2 r."""
    a = at_least(g, Float32(0))
    return ActivationFactors(a, Float32(2), a, Float32(1))


# --- the kernels' dict ------------------------------------------------------------------------------------------------


class ActivationFunction(NamedTuple):
    """One activation.

    Attributes:
        value: ``(spec, g, u, fast) -> A(g) L(u)``; ``u`` is None if there is no linear half.
        factors: ``(spec, g, u, fast) -> A, A', L, L'``.
    """

    value: Callable[[ActivationSpec, Float32, Float32 | None, bool], Float32]
    factors: Callable[[ActivationSpec, Float32, Float32 | None, bool], ActivationFactors]


def _gated(value: Callable[..., Float32], factors: Callable[..., tuple[Float32, Float32]]) -> ActivationFunction:
    """Return ``A(g) u`` from ``(g, fast) -> A`` and ``(g, fast) -> A, A'``."""
    return ActivationFunction(
        lambda _spec, g, u, fast: value(g, fast) * u,
        lambda _spec, g, u, fast: ActivationFactors(*factors(g, fast), u, Float32(1)),
    )


def _plain(value: Callable[..., Float32], factors: Callable[..., tuple[Float32, Float32]]) -> ActivationFunction:
    """Return ``A(g)`` from functions as for ``_gated``."""
    return ActivationFunction(
        lambda _spec, g, _u, fast: value(g, fast),
        lambda _spec, g, _u, fast: ActivationFactors(*factors(g, fast), Float32(1), Float32(1)),
    )


FUNCTIONS = OnePerName(
    activations.TABLE,
    "functions of activations, cutlass_kernels/activation/functions.py",
    {
        "swiglu": _gated(_silu, _silu_factors),
        "clamped_qgeglu": ActivationFunction(_clamped_qgeglu, _clamped_qgeglu_factors),
        "geglu": _gated(_gelu, _gelu_factors),
        "geglu_tanh": _gated(_gelu_tanh, _gelu_tanh_factors),
        "reglu": _gated(_relu, _relu_factors),
        "silu": _plain(_silu, _silu_factors),
        "gelu": _plain(_gelu, _gelu_factors),
        "gelu_tanh": _plain(_gelu_tanh, _gelu_tanh_factors),
        "relu": _plain(_relu, _relu_factors),
        "srelu": ActivationFunction(_squared_relu, _squared_relu_factors),
    },
)
"""Every activation by name."""


def activate(spec: ActivationSpec, g: Float32, u: Float32 | None, fast: bool) -> Float32:
    """Return ``A(g) L(u)``."""
    return FUNCTIONS[spec.kind].value(spec, g, u, fast)


def widened(rounded: cute.Tensor) -> cute.Tensor:
    """Return registers of any shape, just rounded to another dtype, as float32.

    A bfloat16 is the upper half of its float32. If this were written as a conversion, the compiler would fuse it with
    the rounding and round a second time, number by number, at a quarter of the rate.
    """
    values = cute.make_rmem_tensor(rounded.shape, Float32)
    if rounded.element_type is BFloat16:
        words, wide = cute.recast_tensor(rounded, Int32), cute.recast_tensor(values, Int32)
        for i in range(cute.size(rounded) // 2):
            wide[2 * i], wide[2 * i + 1] = words[i] << 16, words[i] & -65536
    else:
        values.store(rounded.load().to(Float32))
    return values


def gradients(
    spec: ActivationSpec, g: Float32, u: Float32 | None, dy: Float32, factor: Float32 | None, fast: bool
) -> Gradients:
    """Return ``p dy A'(g) L(u)``, ``p dy A(g) L'(u)``, ``dy A(g) L(u)`` and ``p A(g) L(u)``, the last with the bits of
    ``activate``, for a row's ``p = factor`` (None: 1).
    """
    a, a1, linear, slope = FUNCTIONS[spec.kind].factors(spec, g, u, fast)
    through_a, through_linear = dy * linear, dy * a
    summand, result = a * through_a, a * linear
    if factor is not None:
        through_a, through_linear, result = through_a * factor, through_linear * factor, result * factor
    return Gradients(through_a * a1, None if u is None else through_linear * slope, summand, result)
