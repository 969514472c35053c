"""``grouped_mlp`` and its backward as a sequence of ops: the GEMMs, activations and bias gradients of an expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import backends
from ...meta import specs
from ...meta.specs import TensorSpec, new_spec
from .activations import activate

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params

Specs = dict[str, TensorSpec | None]
Tensors = dict[str, Tensor | None]
Operand = tuple[Tensor, Tensor | None]
NO_HINT: Mapping[str, int] = {}

FC1, FC2 = "FC1 + activation", "FC2"
FC2_DGRAD, FC1_DGRAD = "FC2 dgrad + dactivation", "FC1 dgrad"
FC2_WGRAD, FC1_WGRAD = "FC2 wgrad", "FC1 wgrad"
"""Stages in a profile; with a fused kernel the activation is part of a GEMM's stage."""


def forward(made: Specs, operands: list, *, params: Params) -> Tensors:
    """Return ``h = x w1 + bias1``, ``act = probs A(h)`` (freed if it has no spec) and ``y = act w2 + probs bias2``."""
    x, w1, w2, offs, probs, bias1, bias2 = operands
    rows, device = x.shape[0], x.device
    between = {"y": new_spec(((rows, w2.shape[1]), x.dtype, device, None)), "h": made["h"]}
    first = backends.produce(
        "grouped_gemm_activation", device, between, [x, w1, offs, bias1, probs], params=params, stage=FC1
    )
    scale = probs if bias2 is not None else None
    given = [first["y"], w2, offs, bias2, scale]
    y = backends.produce("grouped_gemm", device, made["y"], given, zero_tail=True, stage=FC2)
    return {"y": y, "h": first["h"], "act": None if made["act"] is None else first["y"]}


def backward(made: Specs, operands: list, *, params: Params) -> Tensors:
    """Return the gradients that have a spec. Tensors are freed as soon as they are not needed."""
    dy, x, w1, w2, offs, h, act, probs, bias2 = operands
    operands.clear()
    device, dw2 = dy.device, made["dw2"]
    grads: Tensors = dict.fromkeys(made)
    further = any([made["dx"], made["dw1"], made["dprobs"], made["dbias1"]])
    # Memory peaks while dw1 is computed, together with either dw2 or its operands: keep the smaller of dw2 and act.
    last = further and h.shape[0] * w2.shape[1] < w2.numel()
    inner = TensorSpec((h.shape[0], w2.shape[1]), h.dtype, device) if dw2 is not None and act is None else None
    if inner is not None and not further:
        act = activate(inner, h, offs, probs, params=params)
    if dw2 is not None and act is not None and not last:
        grads["dw2"], dw2, act = wgrad((act, None), (dy, None), offs, dw2, FC2_WGRAD), None, None
    scaled = None
    if bias2 is not None or made["dbias2"] is not None:
        grads["dbias2"], scaled = bias_gradients(dy, bias2, probs, offs, made["dbias2"], made["dprobs"])
    if not further:
        return grads

    sums = TensorSpec((h.shape[0] if probs is not None else 0,), specs.accumulator(h.dtype), device)
    wanted = {"dh": TensorSpec(tuple(h.shape), h.dtype, device), "dprobs": sums, "act": inner}
    given = [dy, w2.transpose(1, 2), h, offs, probs]
    del h
    back = backends.produce("grouped_gemm_dactivation", device, wanted, given, params=params, stage=FC2_DGRAD)
    del given
    dh, dprobs = back["dh"], back["dprobs"]
    if inner is not None:
        act = back["act"]
    del back
    if dw2 is not None and act is not None and not last:
        grads["dw2"], dw2, act = wgrad((act, None), (dy, None), offs, dw2, FC2_WGRAD), None, None
    if made["dprobs"] is not None:
        dprobs = dprobs.to(made["dprobs"].dtype)
        grads["dprobs"] = dprobs if scaled is None else dprobs.add_(scaled.to(dprobs.dtype))
    del dprobs
    if made["dbias1"] is not None:
        grads["dbias1"] = made["dbias1"].empty()
        backends.run("grouped_dbias", device, dh, offs, out=grads["dbias1"], stage="FC1 dbias")
    if made["dw1"] is not None:
        grads["dw1"] = wgrad((x, None), (dh, None), offs, made["dw1"], FC1_WGRAD)
    del x
    if made["dx"] is not None:
        given = [dh, w1.transpose(1, 2), offs, None, None]
        grads["dx"] = backends.produce("grouped_gemm", device, made["dx"], given, zero_tail=True, stage=FC1_DGRAD)
        del given
    del dh
    if dw2 is not None and act is not None:
        grads["dw2"] = wgrad((act, None), (dy, None), offs, dw2, FC2_WGRAD)
    return grads


def bias_gradients(
    dy: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    offs: Tensor,
    dbias: TensorSpec | None,
    dprobs: TensorSpec | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Differentiate ``probs bias``: return the gradient of ``bias`` if it has a spec, and each row's share of the
    gradient of ``probs`` if either has a spec.
    """
    device, acc = dy.device, specs.accumulator(dy.dtype)
    if bias is not None and probs is not None and (dbias is not None or dprobs is not None):
        scaled = torch.empty(dy.shape[0], dtype=acc, device=device)
        sums = torch.empty(bias.shape, dtype=acc, device=device)
        results = {"dbias": sums, "dscales": scaled}
        backends.run("grouped_dbias_dscales", device, dy, bias, probs, offs, **results, stage="FC2 dbias")
        return sums if dbias is not None else None, scaled
    if dbias is None:
        return None, None
    sums = dbias.empty()
    backends.run("grouped_dbias", device, dy, offs, out=sums, stage="FC2 dbias")
    return sums, None


def wgrad(
    a: Operand, b: Operand, offs: Tensor, spec: TensorSpec, stage: str, hint: Mapping[str, int] = NO_HINT
) -> Tensor:
    """Return ``a^T b`` of every group, in the memory order of ``spec``.

    Args:
        a, b: rows, and the int32 index by which to read them, or None.
        stage: see ``produce``.
        hint: keywords for the GEMM's implementation.
    """
    turned = spec.stride is not None
    (rows, index), (others, other_index) = (b, a) if turned else (a, b)
    tables: dict[str, Any] = {**hint}
    if index is not None:
        tables["a_rows"] = index
    if other_index is not None:
        tables["b_rows"] = other_index
    given = [rows, others, offs]
    made: Tensor = backends.produce(
        "grouped_gemm_wgrad", offs.device, spec.by_rows if turned else spec, given, stage=stage, **tables
    )
    return made.transpose(1, 2) if turned else made
