"""``tgl.MoELayer`` with the weights of transformers' layers: the same results and gradients, there and back."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import tgl

pytest.importorskip("transformers")
from tgl.integrations import transformers as adapter

SIZES = {"hidden_size": 16, "num_experts_per_tok": 2}
MODELS = {
    "mixtral": ("MixtralSparseMoeBlock", "MixtralConfig", {"intermediate_size": 12, "num_local_experts": 6}),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", {"moe_intermediate_size": 12, "num_experts": 6}),
    "qwen3_moe, renormalised": (
        "Qwen3MoeSparseMoeBlock",
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 12, "num_experts": 6, "norm_topk_prob": True},
    ),
    "deepseek_v3": (
        "DeepseekV3MoE",
        "DeepseekV3Config",
        {"moe_intermediate_size": 12, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
    ),
    "gpt_oss": ("GptOssMLP", "GptOssConfig", {"intermediate_size": 12, "num_local_experts": 6}),
}


def pair(name):
    """Return transformers' module, ``MoELayer`` with its weights, and the family."""
    block, config, options = MODELS[name]
    family = name.split(",")[0]
    package = f"transformers.models.{family}"
    made = getattr(importlib.import_module(f"{package}.configuration_{family}"), config)(**SIZES, **options)
    theirs = getattr(importlib.import_module(f"{package}.modeling_{family}"), block)(made)
    for t in (*theirs.parameters(), *theirs.buffers()):
        torch.nn.init.normal_(t, std=0.3)
    ours = tgl.MoELayer(**adapter.layer_options(made))
    ours.load_state_dict(adapter.to_layer(theirs.state_dict(), family))
    return theirs, ours, family


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients(name):
    theirs, ours, family = pair(name)
    x = torch.randn(2, 7, SIZES["hidden_size"])
    grad = torch.randn_like(x)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    wanted, made = theirs(leaves[0]), ours(leaves[1])
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    wanted.backward(grad)
    made.backward(grad)
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-5, atol=1e-5)
    grads = adapter.from_layer({n: p.grad for n, p in ours.named_parameters()}, family)
    assert set(grads) == {n for n, _ in theirs.named_parameters()}
    for n, p in theirs.named_parameters():
        torch.testing.assert_close(grads[n], p.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name):
    theirs, ours, family = pair(name)
    state = theirs.state_dict()
    back = adapter.from_layer(ours.state_dict(), family)
    assert set(back) == set(state)
    assert all(torch.equal(back[key], value) for key, value in state.items())


def test_examples_of_the_page(capsys):
    text = (Path(__file__).parents[2] / "docs" / "moe_layer.md").read_text()
    scope: dict = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(example, scope)
    assert capsys.readouterr().out.startswith("RouterOutput(weights=float32[2, 10, 2], ")


def test_unknown_names():
    with pytest.raises(
        ValueError, match=r"`family` must be one of mixtral, .* but got 'mixtrel' \(did you mean 'mixtral'"
    ):
        adapter.to_layer({}, "mixtrel")
    with pytest.raises(ValueError, match=r"`state` must hold experts and gate.weight only, but has norm.weight"):
        adapter.to_layer({"norm.weight": torch.ones(2)}, "mixtral")
