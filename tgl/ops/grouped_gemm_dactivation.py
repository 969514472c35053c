"""``tgl::grouped_gemm_dactivation``: input gradient of an expert's second GEMM and activation backward, as one op.

A kernel need not write the gradient in between to memory and read it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta import specs
from ._define import Casts, define
from ._library import Formula
from ._rows import given, sum_by_index
from .grouped_activation import SCHEMA, Params, activation_options, second_order

NAME = "grouped_gemm_dactivation"


def _save(ctx: Any, needs: tuple[bool, ...], *operands: Any, output: tuple[Tensor, Tensor], **params: Any) -> None:
    ctx.save_for_backward(*operands)
    ctx.params = Params(**params)


def _backward(ctx: Any, needs: tuple[bool, ...], cx: Tensor, cp: Tensor) -> tuple[Tensor | None, ...]:
    """Return second derivatives: those of the activation in ``a = dy b``, ``h`` and ``probs``, then of the GEMM."""
    dy, b, h, offs, probs, rows = ctx.saved_tensors
    da = torch.ops.tgl.grouped_gemm(dy, b, offs, **given(rows=rows))
    along, d_h, d_probs = second_order(ctx.params, da, h, offs, probs, cx, cp)
    d_dy = torch.ops.tgl.grouped_gemm(along, b.transpose(1, 2), offs) if needs[0] else None
    if d_dy is not None and rows is not None:
        d_dy = sum_by_index(d_dy, rows, dy.shape[0])
    d_b = torch.ops.tgl.grouped_gemm_wgrad(dy, along, offs, **given(a_rows=rows)) if needs[1] else None
    return d_dy, d_b, d_h, None, d_probs, None


_op = define(
    f"{NAME}(Tensor dy, Tensor b, Tensor h, Tensor offs, Tensor? probs=None, Tensor? rows=None, *, {SCHEMA}) -> "
    "(Tensor dh, Tensor dprobs)",
    specs.grouped_gemm_dactivation,
    rows={"dy": "rows", "h": "rows", "probs": "vector"},
    indexed={"dy": "tokens", "h": "tokens", "probs": "tokens", "rows": "tokens"},
    tables=("rows",),
    absent=("act",),
    options=activation_options,
    formula=Formula(_save, _backward),
    autocast=Casts(("dy", "b", "h"), "probs"),
)


def grouped_gemm_dactivation(
    dy: Tensor,
    b: Tensor,
    h: Tensor,
    offs: Tensor,
    probs: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    kind: str = "swiglu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the pre-activation: every group of ``dy`` times its matrix, then the activation backward.

    For the layer ``y = grouped_gemm(grouped_activation(h, offs, probs, ...), w, offs)`` and ``b`` the transpose of
    ``w``, the gradients of ``h`` and ``probs`` from that of ``y``. With ``da = grouped_gemm(dy, b, offs)``, rounded to
    the dtype of ``h``, and the factors of ``grouped_activation`` in float32 (float64 for float64): for every row

    - ``dg = probs da A'(g) L(u)`` and ``du = probs da A(g) L'(u)``, in the columns of ``g`` and ``u`` in ``h``, rounded
      once;
    - ``dprobs``, the sum of ``da A(g) L(u)`` over the row, in a fixed order. The order depends on the implementation,
      so ``dprobs`` of two implementations may differ in the last bits; ``dh`` does not.

    Rows past ``offs[-1]`` come out as zeros and are never read. Differentiable in all but ``offs`` and ``rows``, twice.

    With ``rows``, row ``rows[t]`` of ``dy`` is read instead of ``dy[t]``: for tokens whose result is the sum of ``y``
    over their top-k slots, with routing weights inside the activation as ``probs``, the gradient of every row ``t`` is
    that of its token, ``tgl.Routing.token[t]``. No other factor is needed: ``dh`` includes the weight through
    ``probs``, and ``dprobs`` is the gradient of the weight.

    Args:
        dy: ``[T, K]``, float64, float32, bfloat16 or float16, at any strides; with ``rows``, ``[S, K]`` with any number
            of rows.
        b: ``[G, K, I]`` of the same dtype, at any strides.
        h: ``[T, 2 I]`` for the gated kinds, ``[T, I]`` for the others; of the same dtype: the pre-activation.
        offs: int32 ``[G]`` on the same device: cumulative group ends.
        probs: ``[T]``, dtype of ``h`` or float32: the ``probs`` of the forward.
        rows: int32 ``[T]`` on the device of ``dy``, as in ``grouped_gemm``: the row of ``dy`` for every row of ``h``.
        kind, interleaved, limit, alpha, offset: see ``grouped_activation``.

    Returns:
        ``dh`` like ``h``, contiguous, and ``dprobs [T]`` in float32 (float64 for float64); ``[0]`` without ``probs``.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: a forward-mode derivative is requested.
    """
    # None rather than a float default, which would make Dynamo compile twice under dynamic=True.
    constants = {"limit": limit, "alpha": alpha, "offset": offset}
    given = {name: value for name, value in constants.items() if value is not None}
    return _op(dy, b, h, offs, probs, rows, kind=kind, interleaved=interleaved, **given)
