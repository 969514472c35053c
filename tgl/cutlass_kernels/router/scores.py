"""Scores of logits and their order, in registers; a lane has ``CHUNK`` adjacent experts of every ``CHUNK * width``.

Numbers are ordered as integers: the bits of a float32, those below the sign inverted if it is set. Both zeros are one
number, NaN is above all. ``LOWEST`` is below the order of minus infinity.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int16, Int32, cute

from ...meta.router import EPSILON, SCORES
from ...meta.table import OnePerName
from ..activation.functions import sigmoid
from ..activation.kernel import neighbours
from ..bits import INFINITY, as_bits, as_float
from .router_spec import CHUNK, LANES

LOWEST = -(1 << 31)
HIGHEST = (1 << 31) - 1


class ScoreFunction(NamedTuple):
    """A score of one logit: ``x -> score``, and ``(x, score) -> its derivative``."""

    value: Callable[[Float32], Float32]
    slope: Callable[[Float32, Float32], Float32]


def _sqrtsoftplus(x: Float32) -> Float32:
    """Return the root of ``max(x, 0) + log(u)``, ``u = 1 + exp(-|x|)``; ``e / (u - 1)`` corrects the rounding of u."""
    e = cute.math.exp(-cute.math.absf(x))
    u = Float32(1) + e
    rest = u - Float32(1)
    tiny = rest == Float32(0)
    log = cutlass.select_(tiny, e, cute.math.log(u) * e / cutlass.select_(tiny, Float32(1), rest))
    return cute.math.sqrt(cutlass.select_(x > Float32(0), x, Float32(0)) + log)


CURVES: OnePerName[ScoreFunction] = OnePerName(
    (s.name for s in SCORES.values() if s.slope is not None),
    "score functions of routers (cutlass_kernels/router/scores.py)",
    {
        "sigmoid": ScoreFunction(lambda x: sigmoid(x, False), lambda x, s: s * (Float32(1) - s)),
        "sqrtsoftplus": ScoreFunction(
            _sqrtsoftplus, lambda x, s: Float32(0.5) * sigmoid(x, False) / cutlass.max(s, Float32(2.0**-126))
        ),
    },
)


def order(bits: Int32, infinity: int, lowest: int, highest: int) -> Int32:
    """Return the order of a number from its bits, sign extended; ``infinity`` are the bits of infinity."""
    rank = bits ^ ((bits >> 31) & highest)
    rank = cutlass.select_(bits == lowest, Int32(0), rank)
    return cutlass.select_((bits & highest) > infinity, Int32(highest), rank)


def order_of(value: Float32) -> Int32:
    """Return the order of a float32."""
    return order(as_bits(value), INFINITY, LOWEST, HIGHEST)


def value_of(rank: Int32) -> Float32:
    """Return the float32 with this order."""
    return as_float(rank ^ ((rank >> 31) & HIGHEST))


@cute.jit
def expert_of(lane: Int32, item: cutlass.Constexpr, width: cutlass.Constexpr) -> Int32:
    """Return the expert of a lane's item."""
    return (item // CHUNK * width + lane) * CHUNK + item % CHUNK


@cute.jit
def load(spec: cutlass.Constexpr, logits: cute.Tensor, token: Int32, lane: Int32) -> cute.Tensor:
    """Load a lane's logits ``[items]`` in their dtype; minus infinity past the last expert."""
    held = cute.make_rmem_tensor(spec.items, logits.element_type)
    for first in cutlass.range_constexpr(0, spec.items, spec.vector):
        part = cute.make_tensor(held.iterator + first, cute.make_layout(spec.vector))
        column = expert_of(lane, first, spec.width)
        if cutlass.const_expr((first // CHUNK + 1) * spec.width * CHUNK <= spec.experts):
            _read(spec, logits, token, column, part)
        else:
            part.fill(-float("inf"))
            if column < spec.experts:
                _read(spec, logits, token, column, part)
    return held


@cute.jit
def _read(spec: cutlass.Constexpr, logits: cute.Tensor, token: Int32, column: Int32, part: cute.Tensor):
    if cutlass.const_expr(spec.vector == 1):
        part[0] = logits[token, column]
    else:
        cute.autovec_copy(neighbours(logits, token, column, spec.vector), part)


@cute.jit
def store(spec: cutlass.Constexpr, out: cute.Tensor, token: Int32, lane: Int32, held: cute.Tensor):
    """Write a lane's items to a contiguous matrix."""
    for first in cutlass.range_constexpr(0, spec.items, spec.vector):
        part = cute.make_tensor(held.iterator + first, cute.make_layout(spec.vector))
        column = expert_of(lane, first, spec.width)
        if column < spec.experts:
            if cutlass.const_expr(spec.vector == 1):
                out[token, column] = part[0]
            else:
                cute.autovec_copy(part, neighbours(out, token, column, spec.vector))


def whole_sum(value: Float32, width: int) -> Float32:
    """Return the sum over the lanes of a token, with the same bits in all of them."""
    for step in range(width.bit_length() - 1):
        value = value + cute.arch.shuffle_sync_bfly(value, 1 << step)
    return value


def whole_max(value: Any, width: int) -> Any:
    """Return the maximum over the lanes of a token, of integers, or of float32 without NaN."""
    if width == LANES and isinstance(value, Int32):
        return cute.arch.warp_redux_sync(value, kind="max")
    for step in range(width.bit_length() - 1):
        value = cutlass.max(value, cute.arch.shuffle_sync_bfly(value, 1 << step))
    return value


def whole_min(value: Int32, width: int) -> Int32:
    """Return the minimum over the lanes of a token."""
    if width == LANES:
        return cute.arch.warp_redux_sync(value, kind="min")
    for step in range(width.bit_length() - 1):
        value = cutlass.min(value, cute.arch.shuffle_sync_bfly(value, 1 << step))
    return value


def powers(spec: Any, x: cute.Tensor) -> tuple[cute.Tensor, Float32, Float32]:
    """Return ``exp(x - top)`` of a lane's logits, the token's largest logit ``top``, and the token's sum of powers."""
    top = x[0]
    for i in range(1, spec.items):
        top = cutlass.max(top, x[i])
    top = whole_max(top, spec.width)
    made, total = cute.make_rmem_tensor(spec.items, Float32), Float32(0)
    for i in range(spec.items):
        made[i] = cute.math.exp(x[i] - top)
        total = total + made[i]
    return made, top, whole_sum(total, spec.width)


def curved(spec: Any, x: cute.Tensor, lane: Int32) -> tuple[cute.Tensor, Float32]:
    """Return elementwise scores, 0 past the last expert, and their sum over the token."""
    made, total = cute.make_rmem_tensor(spec.items, Float32), Float32(0)
    value = CURVES[spec.score].value
    for i in range(spec.items):
        present = expert_of(lane, i, spec.width) < spec.experts
        made[i] = cutlass.select_(present, value(x[i]), Float32(0))
        total = total + made[i]
    return made, whole_sum(total, spec.width) + Float32(EPSILON)


def packed(element: Any) -> bool:
    """Return whether the order of a logit and the number of its expert fit one word."""
    return element.width == 16


def packed_order(held: cute.Tensor, item: int, expert: Int32) -> Int32:
    """Return the order of a 16-bit logit, ties broken by the lower expert."""
    infinity = 0x7F80 if held.element_type is cutlass.BFloat16 else 0x7C00
    bits = Int32(cute.recast_tensor(held, Int16)[item])
    return (order(bits, infinity, -(1 << 15), (1 << 15) - 1) << 16) | (0xFFFF - expert)
