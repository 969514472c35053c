"""``tgl::batched_syrk``: matrices times their own transposes, whose products are symmetric."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..meta.batched_syrk import OP as NAME
from ..meta.batched_syrk import batched_syrk as spec
from ..meta.remembered import remembered
from ._library import autocast_nothing, define

_ADVICE = "it is an optimizer's product; detach it or use torch.no_grad()"
_checked = remembered(spec)


def _kernel(x: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    out: Tensor = _checked(x, c).empty()
    backends.run(NAME, x.device, x, c if beta else None, alpha=alpha, beta=beta, out=out)
    return out


def _fake(x: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    return spec(x, c).empty()


def _call(
    x: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
) -> tuple[torch.device, tuple, dict[str, Any]]:
    return x.device, (x, c if beta else None), {"alpha": alpha, "beta": beta, "out": spec(x, c).meta()}


_op = define(
    f"{NAME}(Tensor x, Tensor? c=None, *, float alpha=1.0, float beta=1.0) -> Tensor",
    _kernel,
    _fake,
    no_derivative=_ADVICE,
    autocast=autocast_nothing,
)
backends.describe_op(NAME, _call)


def batched_syrk(x: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """Multiply every matrix of a stack by its own transpose: ``alpha x[g] x[g]^T + beta c[g]``.

    The symmetric rank-k update of BLAS (SYRK), of whose result both triangles are stored. On sm_90 a kernel computes
    one of them, about half of the work of a batched product, and its results are symmetric to the bit; what is left to
    torch's batched products is as symmetric as these. Sums are formed in float32 (float64 for float64) and rounded
    once. ``tgl.explain`` names what serves a call. Not differentiable.

    Args:
        x: ``[G, M, K]``, float64, float32, bfloat16 or float16, any layout. The kernel reads bfloat16 and float16 with
            a unit stride in K or M, all other strides and the address multiples of 16 bytes, and M a multiple of 8.
        c: ``[G, M, M]``, dtype and device of ``x``; symmetric by contract, and read below the diagonal at least. It may
            be ``x`` itself, which then is symmetric, too. Not read where ``beta`` is 0.
        alpha, beta: factors, applied in float32.

    Returns:
        ``[G, M, M]`` of the dtype of ``x``, contiguous.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes or devices that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    return _op(x, c, alpha=alpha, beta=beta)
