"""A user's code against tgl, for type checkers: correct calls, and wrong ones that they must find.

`make lint` has mypy check it, and `make types` pyright, both strictly. A wrong call has a comment that the checker
ignores it; where the checker finds nothing to ignore, that is an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import tgl
from tgl import recipes
from tgl.integrations import peft as adapters
from tgl.integrations import torch as drop_in
from tgl.integrations import transformers as adapter


class Block(nn.Module):
    """Layers, with the options that a training loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 8)
        self.experts = tgl.MoE(8, 64, 128, recipe=recipes.MXFP8BlockScaling())
        self.linear = tgl.GroupedLinear(8, 64, 32, bias=False, params_dtype=torch.bfloat16, delay_wgrad_compute=True)
        self.mlp = tgl.GroupedMLP(8, 64, 128, activation="geglu", single_grouped_weight=False)
        self.tuned = tgl.GroupedLoRALinear(tgl.GroupedLinear(8, 64, 64), rank=8, alpha=16)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        routing = tgl.route(chosen, 8)
        assert_type(routing, tgl.Routing)
        assert_type(routing.offs, Tensor)
        rows = tgl.dispatch(x, routing)
        assert_type(rows, Tensor)
        rows = self.mlp.forward_offsets(rows, routing.offs, tgl.dispatch_weights(weights, routing))
        assert_type(rows, Tensor)
        y: Tensor = self.experts(tgl.combine(rows, routing), chosen, weights)
        return y

    def finish(self) -> None:
        self.linear.backward_dw()
        self.experts.quantize_weight()


def ops(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Ops, and quantised operands of both kinds."""
    y = tgl.grouped_gemm(x, w, offs)
    assert_type(y, Tensor)
    made = tgl.group_quantize(x, offs, format="mxfp8", columnwise=False)
    assert_type(made, tgl.Components)
    assert_type(made.data, Tensor)
    packed = tgl.quantize(x, offs, "mxfp8")
    assert_type(packed, tgl.GroupedTensor)
    assert_type(packed.dequantize(), Tensor)
    assert_type(tgl.grouped_activation(y, offs, kind="swiglu"), Tensor)
    return tgl.grouped_gemm_wgrad(x, y, offs)


def tools(x: Tensor, w: Tensor, offs: Tensor) -> bool:
    """Functions that report and check how a call is served."""
    adapter.register()
    with tgl.debug_checks():
        report = tgl.explain(tgl.grouped_gemm, x, w, offs)
    assert_type(tgl.explain("grouped_gemm", x, w, offs), tgl.backends.Explanation)
    return bool(report.emulates and report.batch_invariant)


def unchanged_code(x: Tensor, w: Tensor, offs: Tensor, model: nn.Module) -> Tensor:
    """Code that calls ATen's products, and PEFT's adapters on experts."""
    drop_in.enable()
    drop_in.enable(["cuda", "cpu"])
    assert_type(drop_in.served(), tuple[str, ...])
    drop_in.disable()
    assert_type(adapters.attach(model), list[str])
    adapters.detach(model)
    with drop_in.enabled("cpu"):
        return torch.nn.functional.grouped_mm(x, w, offs=offs)


def wrong(x: Tensor, w: Tensor) -> None:
    """Every call has one mistake."""
    tgl.grouped_gemm(x, w, "offs")  # type: ignore[arg-type]
    tgl.GroupedLinear("8", 64, 32)  # type: ignore[arg-type]
    tgl.MoE(8, 64, 128, recipe=8)  # type: ignore[arg-type]
    tgl.route(x)  # type: ignore[call-arg]
    tgl.quantize(x, None)  # type: ignore[call-arg]
    tgl.quantize(x, None, "mxfp8").no_such_method()  # type: ignore[attr-defined]
    tgl.group_quantize(x, None, format="mxfp8").missing  # type: ignore[attr-defined] # noqa: B018
    adapter.register(1)  # type: ignore[arg-type]
    drop_in.enable(1)  # type: ignore[arg-type]
    adapters.attach("model")  # type: ignore[arg-type]
