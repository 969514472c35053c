"""``A(g) L(u)`` and its factors in float32, as ``tgl.ops.grouped_activation`` defines them, in that order of products.

The sigmoid is 1 / (1 + exp(-z)) with an exponential of 2 ulp and a reciprocal of 1 ulp; it is 0 below z = -87.3, where
it would be a subnormal number. For results of 16 bits ("fast") the exponential is 2 ^ (-z log2 e) of a rounded product,
off by up to 2 + 1.5 |z| ulp: a 64th of half a unit of such a result, where that is not 0. NaN goes through clamps and
the ReLU.
"""

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from .spec import ActivationSpec

LOG2_E = 1.4426950408889634


class Factors(NamedTuple):
    """``A, A', L, L'``."""

    a: Float32
    a1: Float32
    linear: Float32
    slope: Float32


class Gradients(NamedTuple):
    """What goes to the gate and to the linear half (None if there is none), and the summand of a probability's."""

    gate: Float32
    linear: Float32 | None
    probability: Float32


def at_most(value: Float32, limit: Float32) -> Float32:
    """``min(value, limit)``, NaN for NaN."""
    return cutlass.select_(value > limit, limit, value)


def at_least(value: Float32, limit: Float32) -> Float32:
    """``max(value, limit)``, NaN for NaN."""
    return cutlass.select_(value < limit, limit, value)


def sigmoid(z: Float32, fast: bool) -> Float32:
    """``1 / (1 + exp(-z))``."""
    power = cute.math.exp2(z * Float32(-LOG2_E), approx=True, ftz=True) if fast else cute.math.exp(-z)
    return cute.arch.rcp_approx(Float32(1) + power)


def activate(spec: ActivationSpec, g: Float32, u: Float32 | None, fast: bool) -> Float32:
    """``A(g) L(u)``."""
    if u is None:
        a = at_least(g, Float32(0))
        return a * a
    if not spec.clamped:
        return g * sigmoid(g, fast) * u
    g = at_most(g, Float32(spec.limit))
    u = at_least(at_most(u, Float32(spec.limit)), Float32(-spec.limit))
    return g * sigmoid(Float32(spec.alpha) * g, fast) * (u + Float32(spec.offset))


def factors(spec: ActivationSpec, g: Float32, u: Float32 | None, fast: bool) -> Factors:
    """``A, A', L, L'``; ``(x s(x))' = s (1 + x (1 - s))``. Squared ReLU counts as r r with a derivative 2 r."""
    one = Float32(1)
    if u is None:
        a = at_least(g, Float32(0))
        return Factors(a, Float32(2), a, one)
    if not spec.clamped:
        s = sigmoid(g, fast)
        return Factors(g * s, s * (one + g * (one - s)), u, one)
    limit = Float32(spec.limit)
    inside = cutlass.select_(g <= limit, one, Float32(0))
    held = at_least(at_most(u, limit), -limit)
    slope = cutlass.select_(held == u, one, Float32(0))
    g = at_most(g, limit)
    z = Float32(spec.alpha) * g
    s = sigmoid(z, fast)
    return Factors(g * s, s * (one + z * (one - s)) * inside, held + Float32(spec.offset), slope)


def widened(rounded: cute.Tensor) -> cute.Tensor:
    """Registers in float32, of any shape, just rounded to another dtype.

    A bfloat16 is the upper half of its float32. Said as a conversion, the compiler would take it together with the
    rounding and round a second time, number by number, at a quarter of the rate.
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
    """``p dy A'(g) L(u)``, ``p dy A(g) L'(u)`` and ``dy A(g) L(u)``, for a row's ``p = factor`` (None: 1)."""
    a, a1, linear, slope = factors(spec, g, u, fast)
    through_a, through_linear = dy * linear, dy * a
    summand = a * through_a
    if factor is not None:
        through_a, through_linear = through_a * factor, through_linear * factor
    return Gradients(through_a * a1, None if u is None else through_linear * slope, summand)
