"""A model served by vLLM with its experts on the grouped ops; `make test-vllm` makes the environment."""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tgl
from tgl.testing import emulate

# One process, so that hooks see the model, and caches that fit a test.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    HF_HUB_OFFLINE="1",
)
vllm = pytest.importorskip("vllm")

import transformers  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation  # noqa: E402
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (  # noqa: E402
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod  # noqa: E402

from tgl.integrations import transformers as trainer  # noqa: E402
from tgl.integrations._vllm_experts import ACTIVATIONS, ExpertsMethod  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
VOCABULARY, STEP = 64, 16
# The second does not fit into the first step, so that the next one has its rest beside what the first one generates.
PROMPTS = [list(range(1, 13)), list(range(20, 30)), [5, 4, 3]]


class Call(NamedTuple):
    """One call of a layer's experts."""

    x: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    y: Tensor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
    )
    path = tmp_path_factory.mktemp("qwen3_moe")
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
    return str(path)


@contextlib.contextmanager
def served(checkpoint: str, quantization: str | None, dtype: str):
    """Yield vLLM with the model, and the calls of each layer's experts, to which every step adds one."""
    llm = vllm.LLM(
        checkpoint,
        quantization=quantization,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=32,
        max_num_seqs=4,
        max_num_batched_tokens=STEP,
        max_logprobs=-1,
        disable_log_stats=True,
    )
    try:
        yield llm, llm.apply_model(record)[0]
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def record(model: torch.nn.Module) -> list[list[Call]]:
    layers = []
    for layer in model.model.layers:
        experts, calls = layer.mlp.experts.routed_experts, []

        def forward(*, x, topk_weights, topk_ids, run=experts.forward_modular, calls=calls, **others):
            before = x.clone(), topk_ids.clone(), topk_weights.clone()
            y = run(x=x, topk_weights=topk_weights, topk_ids=topk_ids, **others)
            calls.append(Call(*before, y.clone()))
            return y

        experts.forward_modular = forward
        layers.append(calls)
    return layers


def generate(llm: Any, prompts: list[list[int]], tokens: int = 4) -> list[Any]:
    options = vllm.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=-1)
    requests = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False)
    return [request.outputs[0] for request in requests]


def logprobs(outputs: list[Any]) -> Tensor:
    """Return ``[tokens of all outputs, vocabulary]``."""
    rows = [[row[token].logprob for token in range(VOCABULARY)] for output in outputs for row in output.logprobs]
    return torch.tensor(rows, dtype=torch.float64)


def expected_logprobs(checkpoint: str, outputs: list[Any]) -> Tensor:
    """Return what transformers' model computes in float64 for the tokens that were generated."""
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, experts_implementation="eager"
    )
    rows = []
    for prompt, output in zip(PROMPTS, outputs):
        tokens = torch.tensor([*prompt, *output.token_ids])
        with torch.no_grad():
            logits = model(tokens[None]).logits[0]
        rows.append(logits[len(prompt) - 1 : -1].log_softmax(-1))
    return torch.cat(rows)


def test_vllm_finds_the_plugin():
    (plugin,) = {point.value for point in entry_points(group="vllm.general_plugins") if point.name == "tgl"}
    assert plugin == "tgl.integrations.vllm:register"


def test_logits_are_those_of_vllm_and_of_transformers(checkpoint: str) -> None:
    with served(checkpoint, None, "float32") as (llm, _):
        method = llm.apply_model(lambda model: model.model.layers[0].mlp.experts.routed_experts.quant_method)[0]
        assert type(method) is UnquantizedFusedMoEMethod  # unless it is requested, the plugin changes nothing
        own = generate(llm, PROMPTS)
    with served(checkpoint, "tgl", "float32") as (llm, layers):
        experts = llm.apply_model(lambda model: [layer.mlp.experts.routed_experts for layer in model.model.layers])[0]
        assert all(type(layer.quant_method) is ExpertsMethod for layer in experts)
        outputs = generate(llm, PROMPTS)
        steps = [call.x.shape[0] for call in layers[0]]
        # The second step has one token that the first request generates, and what is left of the other prompts.
        assert steps[:2] == [STEP, 1 + sum(map(len, PROMPTS)) - STEP], steps
        capturer = RoutedExpertsCapturer(STEP, llm.llm_engine.vllm_config)
        llm.apply_model(lambda model: bind_routed_experts_capturer(model, capturer))
        generate(llm, PROMPTS[:1], tokens=1)
        chosen = torch.stack([calls[-1].top_k_index for calls in layers], 1)
        assert torch.equal(capturer.snapshot_routing_data(len(PROMPTS[0])).long(), chosen.long())
    assert [output.token_ids for output in outputs] == [output.token_ids for output in own]
    expected = expected_logprobs(checkpoint, own)
    own_error, error = ((logprobs(run) - expected).abs().max() for run in (own, outputs))
    assert own_error < 1e-3
    assert error <= 2 * own_error


def test_experts_have_the_bits_of_the_trainer(checkpoint: str) -> None:
    """Prefill and decode of one request and of three, on emulated kernels, against one batch of a training step."""
    with served(checkpoint, "tgl", "bfloat16") as (llm, layers):
        for calls in layers:
            calls.clear()
        with emulate("sm_90") as machine:
            generate(llm, PROMPTS[:1], tokens=2)
            generate(llm, PROMPTS, tokens=3)
        assert machine.launches
    assert {1, 3, STEP} <= {call.x.shape[0] for call in layers[0]}

    trainer.register()
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, experts_implementation="tgl"
    )
    results: list[Tensor] = []
    for layer, calls in zip(model.model.layers, layers):
        replayed = [torch.cat([call[i] for call in calls]).clone() for i in range(3)]
        replayed[1] = replayed[1].long()
        layer.mlp.experts.register_forward_pre_hook(lambda _, args, replayed=tuple(replayed): replayed)
        layer.mlp.experts.register_forward_hook(lambda _, args, y: results.append(y))
    rows = sum(call.x.shape[0] for call in layers[0])
    with emulate("sm_90"):
        model(torch.zeros(1, rows, dtype=torch.long))
    for calls, y in zip(layers, results, strict=True):
        assert y.requires_grad
        assert torch.equal(torch.cat([call.y for call in calls]), y.detach())


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.value)
def test_activations_are_those_of_vllm(activation: MoEActivation) -> None:
    h = torch.randn(20, 64, generator=torch.Generator().manual_seed(1)) * 4
    y = tgl.grouped_activation(h, torch.tensor([8, 20], dtype=torch.int32), **ACTIVATIONS[activation])
    if activation is MoEActivation.SWIGLUOAI:  # vLLM's op exists on GPUs alone
        gate, up = h[:, ::2].clamp(max=7), h[:, 1::2].clamp(-7, 7)
        expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    else:
        expected = apply_moe_activation(activation, torch.empty_like(y), h.clone())
    torch.testing.assert_close(y, expected)


def test_other_activations_are_refused() -> None:
    config = type("Config", (), {"activation": MoEActivation.SITU, "swiglu_limit": None})
    with pytest.raises(NotImplementedError, match=r"serves the activations silu, gelu, .*, but got situ"):
        ExpertsMethod(config)


def test_example_of_the_page(checkpoint: str) -> None:
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert '"Qwen/Qwen3-30B-A3B"' in code
    options = f'"{checkpoint}", skip_tokenizer_init=True, enforce_eager=True, max_model_len=32'
    code = code.replace('"Qwen/Qwen3-30B-A3B"', options).replace(
        '"Why is the sky blue?"', '{"prompt_token_ids": [1, 2, 3]}'
    )
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert len(namespace["output"].outputs[0].token_ids) == 16
    namespace["llm"].llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
