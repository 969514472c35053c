"""``tgl::grouped_mlp``: the whole expert MLP (FC1, activation and FC2) as one op forward and one backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import mlp as specs
from ..meta.remembered import remembered
from ._define import Casts, define
from ._library import Formula, unobserved
from ._output_mask import Gradients, requested, results
from ._preactivation import backward_may_follow
from .grouped_activation import FLOATS, SCHEMA, Params

NAME = "grouped_mlp"
BACKWARD = "grouped_mlp_backward"

# --- kernels ----------------------------------------------------------------------------------------------------------


def _options(recompute: bool = False, compute_h: bool = True, **params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    parsed = Params(**params)
    return {"kind": parsed.kind, "recompute": recompute, "compute_h": compute_h}, {"params": parsed}


def _options_backward(*, output_mask: Sequence[bool], **params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    parsed = Params(**params)
    return {"output_mask": tuple(output_mask), "kind": parsed.kind}, {"params": parsed}


_checked = remembered(specs.grouped_mlp, {"x": "rows", "probs": "vector"}, split=_options, floats=FLOATS, op=NAME)
_checked_backward = remembered(
    specs.grouped_mlp_backward,
    {"dy": "rows", "x": "rows", "h": "rows", "act": "rows", "probs": "vector"},
    split=_options_backward,
    floats=FLOATS,
    op=BACKWARD,
)


def _kernel(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    probs: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    recompute: bool = False,
    compute_h: bool = True,
    **params: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    operands, keeps_act = [x, w1, w2, offs, probs, bias1, bias2], compute_h and not recompute
    (y, h, act), given, kept = _checked(*operands, recompute=recompute, compute_h=compute_h, **params)
    if debug.active:
        debug.check_offs(NAME, offs, x.shape[0])
    wanted = {"y": y, "h": h if compute_h else None, "act": act if keeps_act else None}
    made = backends.produce(NAME, x.device, wanted, operands, given, kept)
    return made["y"], made["h"] if compute_h else h.empty(), made["act"] if keeps_act else act.empty()


def _kernel_backward(
    dy: Tensor,
    x: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    h: Tensor,
    act: Tensor | None,
    probs: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    output_mask: Sequence[bool],
    **params: Any,
) -> tuple[Tensor, ...]:
    operands = [dy, x, w1, w2, offs, h, act, probs, bias2]
    return results(_GRADIENTS, *_gradients(operands, output_mask, params))


_GRADIENTS = ("dx", "dw1", "dw2", "dprobs", "dbias1", "dbias2")


def _gradients(operands: list, mask: Sequence[bool], params: dict[str, Any]) -> Gradients:
    """Return the gradients of the backward; ``operands`` may be empty afterwards."""
    device, offs = operands[0].device, operands[4]
    made, given, kept = _checked_backward(*operands, output_mask=tuple(mask), **params)
    if debug.active:
        debug.check_offs(BACKWARD, offs, operands[0].shape[0])
    return backends.produce(BACKWARD, device, requested(_GRADIENTS, made, mask), operands, given, kept), made


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(
    ctx: Any,
    needs: tuple[bool, ...],
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    *,
    output: tuple[Tensor, Tensor, Tensor],
    recompute: bool,
    compute_h: bool = True,
    **params: Any,
) -> None:
    _, h, act = output
    ctx.save_for_backward(
        x if needs[1] else None, w1, w2, offs, h, act if needs[2] and not recompute else None, probs, bias2
    )
    ctx.set_materialize_grads(False)  # only a second backward has gradients of h and act
    ctx.params = params
    ctx.bias_dtypes = None if bias1 is None else bias1.dtype, None if bias2 is None else bias2.dtype


def _backward(
    ctx: Any, needs: tuple[bool, ...], dy: Tensor | None, dh: Tensor | None, dact: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients: ``dact = dy w2^T``, dh by the activation backward, ``dx = dh w1^T``, dw2, dw1, ...

    As one op; if a second derivative may follow, or is being computed, as differentiable ops instead.
    """
    mask = [needs[i] for i in (0, 1, 2, 4, 5, 6)]
    if dy is None or dh is not None or dact is not None or torch.is_grad_enabled():
        grads = composed_gradients(ctx.saved_tensors, mask, dy, dh, dact, ctx.params)
    elif unobserved(dy):
        # Bypass the dispatcher, which would hold all operands to the end: the layer's peak would be a third higher.
        operands = [dy, *ctx.saved_tensors]
        ctx.maybe_clear_saved_tensors()
        grads = tuple(map(_gradients(operands, mask, ctx.params)[0].get, _GRADIENTS))
    else:
        grads = _op_backward(dy, *ctx.saved_tensors, output_mask=mask, **ctx.params)
    dx, dw1, dw2, dprobs, dbias1, dbias2 = [g if want else None for g, want in zip(grads, mask)]
    dtype1, dtype2 = ctx.bias_dtypes
    dbias1 = None if dbias1 is None else dbias1.to(dtype1)
    dbias2 = None if dbias2 is None else dbias2.to(dtype2)
    return dx, dw1, dw2, None, dprobs, dbias1, dbias2


def composed_gradients(
    saved: Sequence[Any],
    mask: Sequence[bool],
    dy: Tensor | None,
    dh: Tensor | None,
    dact: Tensor | None,
    params: dict[str, Any],
) -> tuple[Tensor | None, ...]:
    """Return gradients that are differentiable in the saved tensors, including the node's outputs ``h`` and ``act``."""
    x, w1, w2, offs, h, act, probs, bias2 = saved
    ops = torch.ops.tgl
    dx = dw1 = dw2 = dprobs = dbias1 = dbias2 = None
    if dact is not None and dact.shape != (h.shape[0], w2.shape[1]):
        dact = None  # the gradient of the empty tensor that `act` is when it is recomputed
    further = any(mask[i] for i in (0, 1, 3, 4))
    if dy is not None:
        if mask[2]:
            dw2 = _wgrad(ops.grouped_activation(h, offs, probs, **params) if act is None else act, dy, offs, w2)
        if further:
            back = ops.grouped_gemm(dy, w2.transpose(1, 2), offs)
            dact = back if dact is None else dact + back
        if bias2 is not None and probs is not None and (mask[3] or mask[5]):
            dbias2, dprobs = ops.grouped_dbias_dscales(dy, bias2, probs, offs)
            dprobs = dprobs.to(probs.dtype)
        elif bias2 is not None and mask[5]:
            dbias2 = ops.grouped_dbias(dy, offs)
    if dact is not None and further:
        back, sums = ops.grouped_activation_backward(dact, h, offs, probs, **params)
        dh = back if dh is None else dh + back
        if probs is not None:
            dprobs = sums.to(probs.dtype) if dprobs is None else sums.to(probs.dtype) + dprobs
    if dh is not None:
        dw1 = _wgrad(x, dh, offs, w1) if mask[1] else None
        dx = ops.grouped_gemm(dh, w1.transpose(1, 2), offs) if mask[0] else None
        dbias1 = ops.grouped_dbias(dh, offs) if mask[4] else None
    return dx, dw1, dw2, dprobs, dbias1, dbias2


def _wgrad(a: Tensor, b: Tensor, offs: Tensor, w: Tensor) -> Tensor:
    if specs.by_columns(w):
        return torch.ops.tgl.grouped_gemm_wgrad(b, a, offs).transpose(1, 2)
    return torch.ops.tgl.grouped_gemm_wgrad(a, b, offs)


# --- registration -----------------------------------------------------------------------------------------------------

_op = define(
    f"{NAME}(Tensor x, Tensor w1, Tensor w2, Tensor offs, Tensor? probs=None, Tensor? bias1=None, Tensor? bias2=None, "
    f"*, bool recompute=False, {SCHEMA}, bool compute_h=True) -> (Tensor y, Tensor h, Tensor act)",
    specs.grouped_mlp,
    options=_options,
    kernel=_kernel,
    formula=Formula(_save, _backward, only_with="compute_h"),
    autocast=Casts(("x", "w1", "w2", "bias1", "bias2"), "probs"),
)
_op_backward = define(
    f"{BACKWARD}(Tensor dy, Tensor? x, Tensor w1, Tensor w2, Tensor offs, Tensor h, Tensor? act, Tensor? probs=None, "
    f"Tensor? bias2=None, *, bool[] output_mask, {SCHEMA}) -> "
    "(Tensor dx, Tensor dw1, Tensor dw2, Tensor dprobs, Tensor dbias1, Tensor dbias2)",
    specs.grouped_mlp_backward,
    options=_options_backward,
    kernel=_kernel_backward,
    no_derivative="the backward of tgl::grouped_mlp is differentiable under create_graph=True",
)


def grouped_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    probs: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    kind: str = "swiglu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    offset: float | None = None,
    recompute: bool = False,
) -> Tensor:
    """Run the experts' MLPs: ``grouped_gemm``, ``grouped_activation`` and ``grouped_gemm`` as one op.

    For row ``t`` of group ``g``: ``h = x[t] @ w1[g] + bias1[g]``, ``a = probs[t] * activation(h)`` and
    ``y[t] = a @ w2[g] + probs[t] * bias2[g]``, each rounded to the dtype of ``x``, with the bits of the three ops. Rows
    past ``offs[-1]`` come out as zeros and are never read. Differentiable in all floating arguments, twice; the
    backward is one op too, which forms only the requested gradients. Where no backward can follow, ``h`` is not
    written.

    Args:
        x: ``[T, H]``, float64, float32, bfloat16 or float16, at any strides.
        w1: ``[G, H, N]`` of the same dtype, at any strides; ``N = 2 I`` for the gated kinds, ``I`` for the others.
        w2: ``[G, I, O]`` of the dtype of ``x``, at any strides.
        offs: int32 ``[G]`` on the same device: cumulative group ends.
        probs: ``[T]``, dtype of ``x`` or float32: factor of the expert's result.
        bias1, bias2: ``[G, N]`` and ``[G, O]``, dtype of ``x`` or float32.
        kind, interleaved, limit, alpha, offset: the activation, see ``grouped_activation``.
        recompute: recompute ``a`` in the backward instead of saving it.

    Returns:
        ``[T, O]`` in the dtype of ``x``.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: a forward-mode derivative is requested.
    """
    given: dict[str, Any] = {"kind": kind, "interleaved": interleaved, "recompute": recompute}
    for name, value in (("limit", limit), ("alpha", alpha), ("offset", offset)):
        if value is not None:  # otherwise see ``grouped_activation``
            given[name] = value
    given["compute_h"] = backward_may_follow(x, w1, w2, probs, bias1, bias2)
    return _op(x, w1, w2, offs, probs, bias1, bias2, **given)[0]
