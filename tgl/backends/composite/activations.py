"""Ops with the expert's activation as prologue or epilogue, as two ops: the other one and the activation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ... import backends
from ...meta import specs
from ...meta.components import Components
from ...meta.quantized import Options

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params


def produce_gemm_activation(
    made: dict[str, specs.TensorSpec | None],
    operands: list,
    *,
    params: Params,
    rows: Tensor | None = None,
    zero_tail: bool = True,
    **hint: int,
) -> dict[str, Tensor | None]:
    """Form the product, then the activation of the rounded product; the activation's tail is always zero.

    The product is formed even if it is not an output; it is then freed after the activation.
    """
    a, b, offs, bias, probs = operands
    operands.clear()
    result = made["y"]
    assert result is not None
    product = made["h"] or specs.TensorSpec((result.shape[0], b.shape[2]), result.dtype, result.device)
    tables: dict[str, Any] = hint if rows is None else {"rows": rows, **hint}
    h = backends.produce("grouped_gemm", a.device, product, [a, b, offs, bias, None], zero_tail=zero_tail, **tables)
    del a  # so that the last reference to it is gone
    y = result.empty()  # same as activate, without its frame in every warm call
    backends.run("grouped_activation", h.device, h, offs, probs, params=params, out=y, stage="activation")
    return {"y": y, "h": None if made["h"] is None else h}


def produce_low_rank_activation(
    made: dict[str, specs.TensorSpec], operands: list, *, params: Params
) -> dict[str, Tensor]:
    """Form the sum of two products, then the activation of the rounded sum."""
    *factors, offs, bias, probs = operands
    operands.clear()
    device = offs.device
    h = backends.produce("grouped_gemm_low_rank", device, made["h"], [*factors, offs, bias, None], zero_tail=True)
    del factors  # so that the last reference to them is gone
    y = activate(made["y"], h, offs, probs, params=params)
    return {"y": y, "h": h}


def produce_gemm_dactivation(
    made: dict[str, Any],
    operands: list,
    *,
    params: Params,
    rows: Tensor | None = None,
    zero_tail: bool = True,
    **hint: int,
) -> dict[str, Tensor | None]:
    """Form the product in the dtype of ``h``, then the activation backward, then its forward if ``act`` is an output.

    ``act`` comes last, when it can reuse the product's memory. Tails are always zero.
    """
    dy, b, h, offs, probs = operands
    operands.clear()
    spec = specs.TensorSpec((h.shape[0], b.shape[2]), h.dtype, h.device)
    tables: dict[str, Any] = hint if rows is None else {"rows": rows, **hint}
    da = backends.produce("grouped_gemm", dy.device, spec, [dy, b, offs, None, None], zero_tail=False, **tables)
    del dy
    dh, dprobs = h.new_empty(h.shape), h.new_empty(made["dprobs"].shape, dtype=made["dprobs"].dtype)
    gradients = {"dx": dh, "dprobs": dprobs}
    backends.run(
        "grouped_activation_backward", h.device, da, h, offs, probs, params=params, **gradients, stage="dactivation"
    )
    del da
    wanted = made["act"]
    act = None if wanted is None else activate(wanted, h, offs, probs, params=params)
    return {"dh": dh, "dprobs": dprobs, "act": act}


def activate(made: specs.TensorSpec, h: Tensor, offs: Tensor, probs: Tensor | None, *, params: Params) -> Tensor:
    """Return ``probs A(h)``."""
    act = made.empty()
    backends.run("grouped_activation", h.device, h, offs, probs, params=params, out=act, stage="activation")
    return act


def activation_quantize(
    x: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    *,
    params: Params,
    options: Options,
    out: Components,
) -> None:
    """Apply the activation, round it to the dtype of ``x``, and quantise."""
    activated = specs.grouped_activation(x, offs, probs, kind=params.kind).empty()
    backends.run("grouped_activation", x.device, x, offs, probs, params=params, out=activated)
    backends.run("group_quantize", x.device, activated, offs, scale, None, None, None, options=options, out=out)
