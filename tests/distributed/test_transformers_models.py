"""A model of transformers, loaded in parts by its own configuration, against the whole of it on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tgl.integrations import transformers_parallel

pytest.importorskip("transformers.distributed.expert_parallel")

TOKENS, VOCABULARY = 6, 32  # of a batch
# Sizes of DistributedConfig. On four ranks: two copies of the experts, each shared out over two ranks; batches of two
# ranks, and experts in two copies or in one.
TWO = {"fsdp_size": 2, "ep_size": 2}
FOUR = (
    {"fsdp_size": 4, "ep_size": 2},
    {"fsdp_size": 2, "tp_size": 2, "tp_plan": "auto", "ep_size": 2},
    {"fsdp_size": 2, "tp_size": 2, "tp_plan": "auto", "ep_size": 4},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """Write a checkpoint of a Qwen3-MoE with two layers and eight experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return str(path)


def check(path: str, sizes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    transformers_parallel.register(max_tokens=TOKENS, capacity_factor=None)
    config = DistributedConfig(**sizes, ep_implementation="tgl")
    # FSDP2 divides gradients of float64 twice where no other rank has a copy of the experts.
    dtype, bound = (torch.float64, 1e-12) if config.efsdp_size > 1 else (torch.float32, 1e-5)
    ours = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=config)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
    batches = torch.randint(VOCABULARY, (config.dp_size, 1, TOKENS))
    batch = batches[dist.get_rank() // config.tp_size]

    expected = [whole(input_ids=b, labels=b).loss for b in batches]
    torch.stack(expected).mean().backward()
    loss = ours(input_ids=batch, labels=batch).loss
    torch.testing.assert_close(loss, expected[dist.get_rank() // config.tp_size], rtol=0, atol=bound)
    loss.backward()
    names = dict(whole.named_parameters())
    for name, parameter in ours.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        actual = parameter.grad.full_tensor()
        torch.testing.assert_close(actual, names.pop(name).grad, rtol=0, atol=bound, msg=name)
    assert not names
    for layer in ours.model.layers:
        layer.mlp.experts.exchange.check()


def test_two_ranks(ranks, checkpoint):
    ranks(check, checkpoint, TWO)


@pytest.mark.slow
def test_four_ranks(four_ranks, checkpoint):
    for sizes in FOUR:
        four_ranks(check, checkpoint, sizes)
