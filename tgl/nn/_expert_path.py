"""The decision which path a call of an expert layer takes: ``tgl.moe``, ``GroupedMLP``, ``MoE``, ``ExpertParallelMLP``.

From the fastest to the slowest path:

- one op from the input to the output, with autograd formula: ``tgl::grouped_mlp`` or ``tgl::moe``;
- one autograd function, ``ExpertFunction``, which quantises, recomputes and offloads between its GEMMs;
- the layers and the activation one after the other, with autograd in between;
- the same with the layers called as modules, so that hooks fire and replaced layers run.

A reason against a path holds against all faster ones. ``tgl.explain`` prints the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import backends, offload
from ..backends.layer_path import LayerPath, Reason
from ..ops._library import autocast_enabled
from ._external_quantization import PLAIN
from ._submodules import has_own_forward, hooked
from ._transforms import compiled_for_cpu
from .grouped_linear import GroupedLinear
from .grouped_lora_linear import GroupedLoRALinear

ONE_OP = "one op"
ONE_FUNCTION = "one autograd function"
LAYERS = "separate layers"
MODULES = "layers called as modules"
FUNCTION_ON_TOKENS = "one autograd function from tokens to tokens"

KINDS = (GroupedLinear, GroupedLoRALinear)  # layers with `forward_offsets` and a bias scale per row

_AS_ONE_OP = LayerPath(ONE_OP)


class ExpertLayer(Protocol):
    """A ``GroupedMLP``; its layers may be any modules."""

    _modules: Any
    recompute_activation: bool


def weights_path(device: torch.device, *weights: Tensor) -> LayerPath:
    """Return the path of ``tgl.moe`` with ``weights`` of both layers."""
    against = _against_op(device, weights)
    return LayerPath(LAYERS, True, tuple(against)) if against else _AS_ONE_OP


def expert_path(
    layer: ExpertLayer, x: Tensor, *, tokens: bool = False, buffers: bool = False, exchanged: str | None = None
) -> LayerPath:
    """Return the path of a call with ``x``: tokens, or rows that are grouped by expert.

    Args:
        layer: the layer.
        x: the input.
        tokens: whether the layer has to permute ``x``, as ``MoE`` does.
        buffers: whether the caller gave ``out`` or ``dgrad_out``.
        exchanged: how ``x`` is sent to other ranks, ``"tokens"`` or ``"codes"``, if the backward has to repeat or
            convert the exchange, which only one op and one function support.
    """
    fc1, fc2 = layer._modules["fc1"], layer._modules["fc2"]
    if hooked(fc1, fc2) or has_own_forward(fc1, fc2, kinds=KINDS):
        return LayerPath(MODULES, tokens, _against_layers(fc1, fc2))
    against = _against_op_of(fc1, fc2, x.device)
    if buffers:
        against.append((ONE_OP, "the caller", "passes `out` or `dgrad_out`"))
    if exchanged is not None:
        against += _against_op_between_exchanges(fc1, fc2, x, exchanged, casts=not against)
    if not against and exchanged is None:
        return _AS_ONE_OP
    permuted: list[Reason] = []
    if tokens and type(x) not in PLAIN:
        permuted.append((FUNCTION_ON_TOKENS, "`x`", f"is a {type(x).__name__}, whose rows an op permutes"))
    slower: list[Reason] = []
    if torch._C._are_functorch_transforms_active():
        slower.append((ONE_FUNCTION, "`x`", "is inside a transform of torch.func"))
    for name, linear in (("fc1", fc1), ("fc2", fc2)):
        if isinstance(linear, GroupedLoRALinear):
            slower.append((ONE_FUNCTION, f"`{name}`", "is a GroupedLoRALinear"))
    if not (slower or exchanged or layer.recompute_activation or fc2.gemms.fuses_activation or offload.in_graph()):
        slower = _against_function_on_dense(fc1, fc2, x.device, tokens and not permuted)
    reasons = (*against, *permuted, *slower)
    if not reasons:
        return _AS_ONE_OP
    return LayerPath(LAYERS if slower else ONE_FUNCTION, tokens and bool(slower or permuted), reasons)


def op_parameters(layer: ExpertLayer) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return ``w1``, ``w2``, ``bias1`` and ``bias2`` of plain layers as the op takes them."""
    made = []
    for name in ("weight", "bias"):
        for linear in (layer._modules["fc1"], layer._modules["fc2"]):
            own = linear._parameters
            made.append(own[name] if name in own else getattr(linear, name))  # a parametrized one is an attribute
    w1, w2, bias1, bias2 = made
    return w1.transpose(1, 2), w2.transpose(1, 2), bias1, bias2


def _against_layers(fc1: Any, fc2: Any) -> tuple[Reason, ...]:
    """Return why the layers have to be called as modules."""
    against = []
    for name, linear in (("fc1", fc1), ("fc2", fc2)):
        if hooked(linear):
            against.append((LAYERS, f"`{name}`", "has hooks, of its own or for all modules"))
        if has_own_forward(linear, kinds=KINDS):
            against.append((LAYERS, f"`{name}`", f"is a {type(linear).__name__} with a forward of its own"))
    return tuple(against)


def _against_op_of(fc1: Any, fc2: Any, device: torch.device) -> list[Reason]:
    """Return what the layers have that one op does not, else what rules out the op for their weights."""
    against = []
    for name, linear in (("fc1", fc1), ("fc2", fc2)):
        if type(linear) is not GroupedLinear:
            against.append((ONE_OP, f"`{name}`", f"is a {type(linear).__name__}"))
        if isinstance(linear, GroupedLinear):
            for words in linear.beyond_gemm:
                against.append((ONE_OP, f"`{name}`", words))
    if against:
        return against
    weights = []
    for linear in (fc1, fc2):
        weight = linear._parameters.get("weight")  # saves the frames of Module.__getattr__
        weights.append(linear.weight if weight is None else weight)
    return _against_op(device, weights)


def _against_op(device: torch.device, weights: Sequence[Tensor]) -> list[Reason]:
    """Return why layers with these weights are no op: sharded ones are distributed op by op, and a compiler for a CPU
    fuses the activation with its neighbours.
    """
    against = []
    for weight in weights:
        if type(weight) not in PLAIN:
            against.append((ONE_OP, "a weight", f"is a {type(weight).__name__}"))
    if torch.compiler.is_compiling():
        if compiled_without_kernels(device):
            against.append((ONE_OP, "the compiler", f"fuses the activation in a graph for {device.type}"))
        if offload.in_graph():
            against.append((ONE_OP, "the graph", "offloads activations"))
    return against


def compiled_without_kernels(device: torch.device) -> bool:
    """Return whether a graph is being compiled for a device without kernels of one op."""
    return torch.compiler.is_compiling() and device.type != "cuda" and backends.cpu_target.arch is None


def _against_op_between_exchanges(fc1: Any, fc2: Any, x: Tensor, exchanged: str, casts: bool) -> list[Reason]:
    """Return why the op does not take what other ranks sent; ``casts``: whether to look for weights that are cast."""
    against = []
    if exchanged != "tokens":
        against.append((ONE_OP, "the exchange", f"sends {exchanged} instead of tokens"))
    elif casts:
        if autocast_enabled(x.device.type):
            against.append((ONE_OP, "autocast", "casts the weights"))
        for name, linear in (("fc1", fc1), ("fc2", fc2)):
            if linear.weight.dtype != x.dtype:
                against.append((ONE_OP, f"`{name}`", f"has a weight of {linear.weight.dtype} for {x.dtype}"))
    return against


def _against_function_on_dense(fc1: Any, fc2: Any, device: torch.device, tokens: bool) -> list[Reason]:
    """Return why a function is not worth while if it neither quantises, recomputes nor offloads the activation.

    With a permutation it saves tokens instead of rows. Plain layers are left to their ops for the second derivatives.
    """
    if not tokens:
        return [(ONE_FUNCTION, "the activation", "is not quantised, recomputed or offloaded")]
    if fc1.plain and fc2.plain:
        return [(ONE_FUNCTION, "the layers", "are plain, and their ops have second derivatives")]
    if compiled_for_cpu(device):
        return [(ONE_FUNCTION, "the compiler", "fuses the activation in a graph for a CPU")]
    return []
