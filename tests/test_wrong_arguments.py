"""A value of the wrong type, for every argument of what is public: an error that names it, before any work.

An op of the dispatcher says it in torch's own words: "Expected a value of type 'Tensor' for argument 'a'".
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tgl
import tgl.testing

T, G, S, K, N, TOP_K = 6, 3, 4, 32, 32, 2
MXFP8 = tgl.recipes.MXFP8BlockScaling()
WRONG: dict[str, Any] = {
    "a list": [1.0, 2.0],
    "an array": np.ones((4, 4)),
    "None": None,
    "a name": "abc",
    "a float": 8 / 3,
    "a negative number": -1,
    "zero": 0,
    "a bool": True,
}


def right(annotation: str, case: str) -> bool:
    """Return whether the value may be an argument of this annotation."""
    kinds = {kind.strip() for kind in annotation.split("|")}
    if case == "None":
        return "None" in kinds
    if case == "a bool":
        return bool({"bool", "float"} & kinds)
    if case == "zero":
        return bool({"int", "float"} & kinds)
    return case in ("a float", "a negative number") and "float" in kinds


def names_it(error: Exception, argument: str) -> bool:
    if isinstance(error, (TypeError, ValueError)) and f"`{argument}`" in str(error):
        return True
    return isinstance(error, RuntimeError) and f"for argument '{argument}' but instead found type" in str(error)


ELSEWHERE = (
    "num_groups",  # of ``quantize``, instead of ``offs``; of ``allocate_wgrad`` any number will do
    "margin",  # of ``fp8_scale_from_history``: any integer will do
)

Call = tuple[Callable[..., Any], dict[str, Any]]
offs, splits = torch.tensor([1, 3, 6], dtype=torch.int32), torch.tensor([1, 2, 3])
rows, tokens, scale = torch.randn(T, K), torch.randn(S, K), torch.rand(T)
index, weights = torch.randint(G, (S, TOP_K)), torch.rand(S, TOP_K)
w1, w2, gated = torch.randn(G, K, 2 * N), torch.randn(G, N, K), torch.randn(T, 2 * N)
routing, quantized = tgl.route(index, G), tgl.group_quantize(rows, offs, format="mxfp8")
layout = {"scale": quantized.scale, "offs": offs, "shape": (T, K), "format": "mxfp8"}


def calls_of_ops() -> dict[str, Call]:
    found = {}
    for name in tgl.testing.SIGNATURES:
        function = getattr(tgl, name, None)
        if function is not None:
            sample = next(iter(tgl.testing.sample_inputs(name)))
            found[name] = function, {**sample.tensors(), **sample.options}
    return found


FUNCTIONS: dict[str, Call] = {
    **calls_of_ops(),
    "dispatch": (tgl.dispatch, {"x": tokens, "routing": routing}),
    "dispatch_weights": (tgl.dispatch_weights, {"weights": weights, "routing": routing}),
    "combine": (tgl.combine, {"y": torch.randn(8, K), "routing": routing, "weights": weights}),
    "moe": (tgl.moe, {"x": tokens, "routing": index, "weights": weights, "w1": w1, "w2": w2}),
    "route": (tgl.route, {"top_k_index": index, "num_experts": G, "num_rows": 8}),
    "topk_router": (tgl.topk_router, {"logits": torch.randn(S, G), "top_k": TOP_K, "bias": None, "losses": True}),
    "round_tokens": (
        tgl.round_tokens,
        {"top_k_index": index, "scores": torch.rand(S, G), "multiple": 2, "rounding": "up", "max_choices": 2},
    ),
    "allocate_wgrad": (
        tgl.allocate_wgrad,
        {"num_groups": 2, "shape": (4, 4), "dtype": torch.float32, "device": "cpu", "alignment": 256},
    ),
    "quantize": (tgl.quantize, {"x": rows, "offs": offs, "format": "mxfp8"}),
    "grouped_activation_quantize": (
        tgl.grouped_activation_quantize,
        {"x": gated, "offs": offs, "probs": scale, "format": "mxfp8"},
    ),
    "to_blocked_scale": (tgl.to_blocked_scale, layout),
}
SIZES = {"num_gemms": G, "in_features": K, "out_features": N}
WIDTHS = {"num_gemms": G, "hidden_size": K, "ffn_hidden_size": N}
CLASSES: dict[str, Call] = {
    "GroupedLinear": (tgl.GroupedLinear, SIZES),
    "GroupedPackedLinear": (tgl.GroupedPackedLinear, SIZES),
    "GroupedMLP": (tgl.GroupedMLP, WIDTHS),
    "MoE": (tgl.MoE, WIDTHS),
    "MoELayer": (tgl.MoELayer, {"hidden_size": K, "intermediate_size": N, "num_experts": G, "top_k": TOP_K}),
    "GroupedActivation": (tgl.GroupedActivation, {}),
    "GroupedLoRALinear": (tgl.GroupedLoRALinear, {"base": tgl.GroupedLinear(G, K, N), "rank": 4}),
}
GROUPED = {"inp": rows, "m_splits": splits}
MODULES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "GroupedLinear": (tgl.GroupedLinear(G, K, N), GROUPED),
    "GroupedLinear, discrete": (tgl.GroupedLinear(G, K, N, single_grouped_weight=False), GROUPED),
    "GroupedLinear, MXFP8": (tgl.GroupedLinear(G, K, N, recipe=MXFP8), GROUPED),
    "GroupedPackedLinear": (tgl.GroupedPackedLinear(G, K, N, params_dtype=torch.float32), GROUPED),
    "GroupedLoRALinear": (tgl.GroupedLoRALinear(tgl.GroupedLinear(G, K, N), 4), GROUPED),
    "GroupedMLP": (tgl.GroupedMLP(G, K, N), GROUPED),
    "GroupedMLP, MXFP8": (tgl.GroupedMLP(G, K, N, recipe=MXFP8), GROUPED),
    "GroupedActivation": (tgl.GroupedActivation(), {"inp": gated, "m_splits": splits}),
    "Sequential": (tgl.Sequential(tgl.GroupedLinear(G, K, 2 * N), tgl.GroupedActivation()), GROUPED),
    "MoELayer": (tgl.MoELayer(K, N, G, TOP_K), {"x": tokens}),
    "MoE": (tgl.MoE(G, K, N), {"x": tokens, "routing": index, "weights": weights}),
    "MoE, MXFP8": (tgl.MoE(G, K, N, recipe=MXFP8), {"x": tokens, "routing": index, "weights": weights}),
}


def check(
    call: Callable[..., Any],
    arguments: dict[str, Any],
    *,
    signature: Callable[..., Any] | None = None,
    lenient: bool = False,
) -> None:
    """``lenient``: flags and integers may be what the dispatcher takes for them."""
    call(**arguments)
    passed = []
    for argument, parameter in inspect.signature(signature or call).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or argument == "self":
            continue
        for case, value in WRONG.items():
            annotation = str(parameter.annotation)
            if right(annotation, case):
                continue
            if lenient and "bool" in annotation and case in ("None", "a float", "a negative number", "zero"):
                continue
            if lenient and "int" in annotation and case == "a bool":
                continue
            if argument in ELSEWHERE:
                continue
            try:
                call(**{**arguments, argument: value})
            except Exception as error:
                if names_it(error, argument):
                    continue
                passed.append(f"{argument}, {case}: {type(error).__name__}: {error}")
            else:
                passed.append(f"{argument}, {case}: no error")
    assert not passed, "\n".join(passed)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    call, arguments = FUNCTIONS[name]
    check(call, arguments, lenient=True)


@pytest.mark.parametrize("name", CLASSES)
def test_constructors(name):
    call, arguments = CLASSES[name]
    check(call, arguments)


@pytest.mark.parametrize("name", MODULES)
def test_calls_of_modules(name):
    module, arguments = MODULES[name]
    check(module, arguments, signature=module.forward)


def test_a_block_has_experts_and_widths():
    for argument in WIDTHS:
        with pytest.raises(ValueError, match=f"`{argument}` must be at least 1, but got 0"):
            tgl.MoE(**{**WIDTHS, argument: 0})
        with pytest.raises(TypeError, match=rf"`{argument}` must be an integer, but got {8 / 3 * K}"):
            tgl.MoE(**{**WIDTHS, argument: 8 / 3 * K})
    assert tgl.MoE(np.int64(G), K, N).num_gemms == G  # an integer of numpy is one


COMPILED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "route": (*FUNCTIONS["route"], "top_k_index"),
    "dispatch": (*FUNCTIONS["dispatch"], "x"),
    "combine": (*FUNCTIONS["combine"], "weights"),
    "moe": (*FUNCTIONS["moe"], "x"),
    "GroupedLinear": (*MODULES["GroupedLinear"], "inp"),
    "GroupedMLP": (*MODULES["GroupedMLP, MXFP8"], "probs"),
    "MoE": (*MODULES["MoE"], "weights"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name, fresh_compiler):
    call, arguments, argument = COMPILED[name]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"(?s)`{argument}` must be a tensor.*, but got a list"):
        torch.compile(call, backend="eager", fullgraph=True)(**{**arguments, argument: [[1.0]]})


LEFT = {
    "explain": "test_a_call_that_is_only_described",
    "warmup": "test_a_call_that_is_only_described",
    "Sequential": "takes modules, as torch's does",
    "register_implementation": "for implementers",
    "cpu_offload": "a context",
    "debug_checks": "a context",
}
ONLY_OPS = re.compile("scale_layout|blocked_scale|wgrad_stash_|grouped_gemm_scaled_activation_quantize")


def test_nothing_public_is_left_out():
    api = (Path(__file__).parent / "public_api.txt").read_text()
    functions = set(re.findall(r"^tgl\.(\w+)\(", api, re.MULTILINE)) - set(LEFT)
    assert {name for name in functions if not ONLY_OPS.search(name)} <= set(FUNCTIONS)
    modules = {
        n for n in re.findall(r"^class tgl\.(\w+)\(", api, re.MULTILINE) if issubclass(getattr(tgl, n), nn.Module)
    }
    assert modules - set(LEFT) == set(CLASSES)


def test_a_call_that_is_only_described():
    for call in (tgl.explain, tgl.warmup):
        with pytest.raises(ValueError, match=r"`op` must be one of .*, but got 'grouped_gem'"):
            call("grouped_gem")
        with pytest.raises(TypeError, match="tgl::grouped_gemm: `b` must be a tensor, but got a list"):
            call("grouped_gemm", rows, [1.0], offs)
