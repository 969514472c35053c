"""Grouped layers with the features of a training loop, on integer data, where every order of summation is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tgl

G, K, N, T = 3, 5, 12, 9
SPLITS = torch.tensor([4, 0, 3])  # an empty group, and a tail of two rows
ROUTED = 7
TAIL = 7.0  # what a caller's buffer holds beforehand


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers: sums of products of them are exact in float32, and rounded once in bfloat16."""
    return torch.randint(-3, 4, shape).to(dtype)


def make_layer(bias: bool = True, dtype: torch.dtype = torch.float32, **options: Any) -> tgl.GroupedLinear:
    """A layer of small integers, the same for every choice of options."""
    torch.manual_seed(0)
    layer = tgl.GroupedLinear(G, K, N, bias, params_dtype=dtype, **options)
    with torch.no_grad():
        for name in ("weight", "bias"):
            parameters = layer.group_parameters(name)
            values = integers(G, *((N, K) if name == "weight" else (N,)))
            for p, value in zip(parameters, [values] if layer.single_grouped_weight else values):
                p.copy_(value)
    return layer


def give_main_grad(layer: tgl.GroupedLinear, dtype: torch.dtype = torch.float32) -> Tensor:
    """Set ``main_grad`` of the weights, holding ones; returns it packed."""
    weights = layer.group_parameters("weight")
    if layer.single_grouped_weight:
        weights[0].main_grad = torch.ones(G, N, K, dtype=dtype)
        return weights[0].main_grad
    packed = tgl.allocate_wgrad(G, (N, K), dtype).fill_(1)
    for weight, slot in zip(weights, packed):
        weight.main_grad = slot
    return packed


class Microbatch(NamedTuple):
    """One input with its cotangent and buffers; NaN in the tails, which nothing may read."""

    x: Tensor
    splits: Tensor
    dy: Tensor
    out: Tensor
    dgrad_out: Tensor


def make_microbatches(count: int, dtype: torch.dtype = torch.float32, splits: Tensor = SPLITS) -> list[Microbatch]:
    torch.manual_seed(1)
    batches = []
    for _ in range(count):
        x, dy = integers(T, K, dtype=dtype), integers(T, N, dtype=dtype)
        x[ROUTED:], dy[ROUTED:] = float("nan"), float("nan")
        out, dgrad_out = torch.full((T, N), TAIL, dtype=dtype), torch.full((T, K), TAIL, dtype=dtype)
        batches.append(Microbatch(x.requires_grad_(), splits, dy, out, dgrad_out))
    return batches


class Results(NamedTuple):
    """Results of a run: per microbatch outputs and input gradients, and the packed parameter gradients."""

    outputs: list[Tensor]
    input_gradients: list[Tensor]
    weight_gradient: Tensor
    bias_gradient: Tensor


def expected(layer: tgl.GroupedLinear, batches: Sequence[Microbatch]) -> Results:
    """Return ``torch.nn.functional.linear`` per group and microbatch, accumulated in float64."""
    weight, bias = (layer.packed(name).double().requires_grad_() for name in ("weight", "bias"))
    outputs, inputs = [], []
    for batch in batches:
        x = batch.x.detach()[:ROUTED].double().requires_grad_()
        parts = zip(x.split(batch.splits.tolist()), weight, bias)
        y = torch.cat([nn.functional.linear(part, w, b) for part, w, b in parts])
        y.backward(batch.dy[:ROUTED].double())
        outputs.append(y.detach())
        inputs.append(x.grad)
    return Results(outputs, inputs, weight.grad, bias.grad)


ORDERS: dict[str, str] = {"ffbb": "f0 f1 b0 b1", "ffbb reversed": "f0 f1 b1 b0", "fbfb": "f0 b0 f1 b1"}


def run(
    layer: tgl.GroupedLinear, batches: Sequence[Microbatch], forward: Callable, *, order: str, buffers: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Run forwards and backwards in that order, then ``backward_dw``; return outputs, and the gradients of inputs."""
    outputs: dict[int, Tensor] = {}
    upstream: dict[int, Tensor] = {}
    for step in order.split():
        i = int(step[1:])
        batch = batches[i]
        if step[0] == "f":
            x = batch.x * 1
            x.register_hook(lambda g, i=i: upstream.__setitem__(i, g))
            outputs[i] = forward(
                x, batch.splits, out=batch.out if buffers else None, dgrad_out=batch.dgrad_out if buffers else None
            )
        else:
            outputs[i].backward(batch.dy)
    layer.backward_dw()
    return [outputs[i] for i in sorted(outputs)], [upstream[i] for i in sorted(upstream)]


def packed_gradient(layer: tgl.GroupedLinear, name: str) -> Tensor:
    """``grad`` of the weights or the biases, as one tensor."""
    gradients = [p.grad for p in layer.group_parameters(name)]
    return gradients[0] if layer.single_grouped_weight else torch.stack(gradients)
