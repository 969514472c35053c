"""``tgl::grouped_activation``: the expert's activation, gated or not, times a probability per row.

The kinds and their formulas are in ``meta/activations.py``. Forward, backward and second order follow from A, A', A'',
L and L'.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..meta import activations, placement, specs
from ..meta.activations import Activation, Factors
from ._define import define
from ._library import Formula

SCHEMA = 'str kind="swiglu", bool interleaved=False, float limit=7.0, float alpha=1.702, float offset=1.0'
FLOATS = frozenset({"limit", "alpha", "offset"})


class Params(NamedTuple):
    """The keyword arguments of the op."""

    kind: str = "swiglu"
    interleaved: bool = False
    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0

    @property
    def activation(self) -> Activation:
        """The activation of this kind."""
        return activations.named(self.kind)

    @property
    def gated(self) -> bool:
        """Whether the activation has a linear half."""
        return self.activation.gated

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return views of the gate and of the linear half of ``x``."""
        if not self.gated:
            return x, None
        if self.interleaved:
            return x[:, 0::2], x[:, 1::2]
        middle = x.shape[1] // 2
        return x[:, :middle], x[:, middle:]

    def join(self, gate: Tensor, linear: Tensor | None) -> Tensor:
        """Invert ``halves``, as a new tensor."""
        if linear is None:
            return gate
        if self.interleaved:
            return torch.stack([gate, linear], dim=2).flatten(1)
        return torch.cat([gate, linear], dim=1)

    def value(self, g: Tensor, u: Tensor | None) -> Tensor:
        """Return ``A(g) L(u)``."""
        return self.activation.value(self, g, u)

    def factors(self, g: Tensor, u: Tensor | None) -> Factors:
        """Return ``A, A', L, L'`` (the last two None without a linear half, L' None where it is 1)."""
        return self.activation.factors(self, g, u)


def activation_options(out_dtype: torch.dtype | None = None, **params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the keywords of an op with an activation into those of its shape rule and of implementations."""
    parsed = Params(**params)
    return {"kind": parsed.kind} | ({} if out_dtype is None else {"out_dtype": out_dtype}), {"params": parsed}


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    x: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    *,
    output: Tensor,
    **params: Any,
) -> None:
    ctx.save_for_backward(x, offs, probs)
    ctx.params = params


def _backward(ctx: Any, needs: tuple[bool, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return dg = p dy A'(g) L(u), du = p dy A(g) L'(u) and dp = sum over the row of dy A(g) L(u)."""
    x, offs, probs = ctx.saved_tensors
    dx, dprobs = torch.ops.tgl.grouped_activation_backward(dy, x, offs, probs, **ctx.params)
    return dx if needs[0] else None, None, dprobs.to(probs.dtype) if probs is not None and needs[2] else None


def _save_backward(
    ctx: Any,
    needs: tuple[bool, ...],
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    *,
    output: tuple[Tensor, Tensor],
    **params: Any,
) -> None:
    ctx.save_for_backward(dy, x, offs, probs)
    ctx.params = Params(**params)


def _second_backward(ctx: Any, needs: tuple[bool, ...], cx: Tensor, cp: Tensor) -> tuple[Tensor | None, ...]:
    dy, x, offs, probs = ctx.saved_tensors
    d_dy, d_x, d_p = second_order(ctx.params, dy, x, offs, probs, cx, cp)
    return d_dy, d_x, None, d_p


def second_order(
    params: Params, dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None, cx: Tensor, cp: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return derivatives of ``cg dg + cu du + cp dp`` (see ``_backward``) in dy, x and p; cg, cu, cp: cotangents."""
    acc = specs.accumulator(x.dtype)
    tail = placement.tail(offs, x.shape[0])[:, None]
    wide = x.to(acc).masked_fill(tail, 0)
    g, u = params.halves(wide)
    a, a1, linear, slope = params.factors(g, u)
    a2 = params.activation.curvature(params, g)
    cg, cu = params.halves(cx.to(acc).masked_fill(tail, 0))
    dy = dy.to(acc).masked_fill(tail, 0)
    one = torch.ones_like(a)
    linear = one if linear is None else linear
    slope = (one if u is not None else torch.zeros_like(a)) if slope is None else slope
    cu = torch.zeros_like(cg) if cu is None else cu
    p = one[:, :1] if probs is None else probs.to(acc)[:, None].masked_fill(tail, 0)
    cp = torch.zeros_like(one[:, :1]) if probs is None else cp[:, None].masked_fill(tail, 0)
    along = cg * a1 * linear + cu * a * slope
    d_dy = p * along + cp * a * linear
    d_g = p * dy * (cg * a2 * linear + cu * a1 * slope) + cp * dy * a1 * linear
    d_u = (p * dy * cg * a1 + cp * dy * a) * slope if u is not None else None
    d_p = None if probs is None else (dy * along).sum(1).to(probs.dtype)
    return d_dy.to(x.dtype), params.join(d_g, d_u).to(x.dtype), d_p


# --- registration -----------------------------------------------------------------------------------------------------

_op = define(
    f"grouped_activation(Tensor x, Tensor offs, Tensor? probs=None, *, {SCHEMA}) -> Tensor",
    specs.grouped_activation,
    rows={"x": "rows", "probs": "vector"},
    options=activation_options,
    formula=Formula(_save, _backward),
)
define(
    "grouped_activation_backward(Tensor dy, Tensor x, Tensor offs, Tensor? probs=None, *, "
    f"{SCHEMA}) -> (Tensor dx, Tensor dprobs)",
    specs.grouped_activation_backward,
    rows={"dy": "rows", "x": "rows", "probs": "vector"},
    options=activation_options,
    formula=Formula(_save_backward, _second_backward),
)


def grouped_activation(
    x: Tensor,
    offs: Tensor,
    probs: Tensor | None = None,
    *,
    kind: str = "swiglu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    offset: float | None = None,
) -> Tensor:
    """Apply the expert's activation to routed rows, times a probability per row.

    With ``g`` and ``u`` the gate and the linear half of a row, computed in float32 (float64 for float64), rounded once:

    - ``"swiglu"``: ``g sigmoid(g) u`` (Shazeer, "GLU Variants Improve Transformer", 2020);
    - ``"clamped_qgeglu"``: ``g' sigmoid(alpha g') (u' + offset)``, with ``g' = min(g, limit)`` and ``u'`` clamped to
      ``[-limit, limit]`` (the gate of gpt-oss); derivatives exactly on a bound are those inside it;
    - ``"geglu"``, ``"geglu_tanh"`` and ``"reglu"``: ``A(g) u`` with GELU, GELU's tanh approximation, and ReLU;
    - ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"relu"``: ``A(x)``, not gated;
    - ``"srelu"``: ``max(x, 0)^2``, not gated.

    ``"gelu"`` is ``x P(X <= x)`` of the normal distribution, as in ``torch.nn.functional.gelu`` and transformers;
    ``"gelu_tanh"`` is ``approximate="tanh"`` there, and ``gelu`` in TransformerEngine and JAX.

    Rows past ``offs[-1]`` come out as zeros and are never read. Differentiable in ``x`` and ``probs``, twice.

    Args:
        x: ``[T, 2 I]`` for the gated kinds, ``[T, I]`` for the others; float64, float32, bfloat16 or float16.
        offs: int32 ``[G]`` on the same device: cumulative group ends.
        probs: ``[T]``, dtype of ``x`` or float32: factor of each row.
        kind: name of the activation.
        interleaved: gate and linear half alternate by column instead of standing side by side (gate first).
        limit, alpha, offset: the constants of ``"clamped_qgeglu"``; default 7, 1.702 and 1.

    Returns:
        ``[T, I]`` in the dtype of ``x``.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: a forward-mode derivative is requested.
    """
    # None rather than a float default: under dynamic=True Dynamo would make a default symbolic, find it constant and
    # compile the whole graph a second time.
    constants = {"limit": limit, "alpha": alpha, "offset": offset}
    given = {name: value for name, value in constants.items() if value is not None}
    return _op(x, offs, probs, kind=kind, interleaved=interleaved, **given)
