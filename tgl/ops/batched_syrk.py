"""``tgl::batched_syrk``: symmetric products of matrices and their own transposes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..meta.batched_syrk import OP as NAME
from ..meta.batched_syrk import batched_syrk as spec
from ._define import define
from ._library import autocast_nothing


def _adapt(operands: list, options: dict[str, Any]) -> tuple[list, dict[str, Any]]:
    """Drop ``c`` if ``beta`` is 0, so that it is not read."""
    x, c = operands
    return [x, c if options["beta"] else None], options


_op = define(
    f"{NAME}(Tensor x, Tensor? c=None, *, float alpha=1.0, float beta=1.0) -> Tensor",
    spec,
    rows={},
    adapt=_adapt,
    no_derivative="it is an optimizer's product; detach it or use torch.no_grad()",
    autocast=autocast_nothing,
)


def batched_syrk(x: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """Multiply every matrix of a stack by its own transpose: ``alpha x[g] x[g]^T + beta c[g]``.

    The symmetric rank-k update of BLAS (SYRK), with both triangles of the result stored. On sm_90 a kernel computes one
    triangle, about half of the work of a batched product, and its results are symmetric to the bit; elsewhere torch's
    batched products are used, which may not be exactly symmetric. Sums are formed in float32 (float64 for float64) and
    rounded once. ``tgl.explain`` names the implementation of a call. Not differentiable.

    Args:
        x: ``[G, M, K]``, float64, float32, bfloat16 or float16, any layout. The kernel reads bfloat16 and float16 with
            a unit stride in K or M, all other strides and the address multiples of 16 bytes, and M a multiple of 8.
        c: ``[G, M, M]``, dtype and device of ``x``; must be symmetric, and at least its lower triangle is read. It may
            be ``x`` itself, which must then be symmetric, too. Not read if ``beta`` is 0.
        alpha, beta: factors, applied in float32.

    Returns:
        ``[G, M, M]`` of the dtype of ``x``, contiguous.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes or devices that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    return _op(x, c, alpha=alpha, beta=beta)
