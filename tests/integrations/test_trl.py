"""GRPO of TRL on a model whose experts run on the grouped ops; `make test-trl` makes the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
trl = pytest.importorskip("trl")

import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from tgl.integrations import transformers as integration  # noqa: E402

LETTERS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz "]
PROMPTS = ["experts", "hello", "a router", "tokens"]
CONFIG = {
    "vocab_size": len(LETTERS),
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}


def tokenizer() -> Any:
    letters = Tokenizer(models.WordLevel(dict(zip(LETTERS, range(len(LETTERS)))), unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model(experts: str) -> Any:
    integration.register()
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**CONFIG))
    made.set_experts_implementation(experts)
    return made


def trained(experts: str, folder: Path, **options: Any) -> tuple[Any, Any, list[str]]:
    """Train by GRPO for four updates, two of each rollout; return the trainer, the model, and all completions."""
    completed: list[str] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        completed.extend(completions)
        return [text.count("e") + text.count("t") / 2 for text in completions]

    settings = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "max_steps": 4}
    settings |= {"num_iterations": 2, "learning_rate": 1e-2, "optim": "sgd", "logging_steps": 1, "report_to": []}
    settings |= {"save_strategy": "no", "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 3}
    own, data = model(experts), Dataset.from_dict({"prompt": PROMPTS * 2})
    trainer = trl.GRPOTrainer(
        own,
        reward,
        args=trl.GRPOConfig(output_dir=str(folder), **(settings | options)),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer, own, completed


def test_trains_as_with_the_models_own_experts(tmp_path: Path) -> None:
    """The same completions, losses and, after four updates, parameters as with transformers' loop over experts."""
    (ours, model_of_ours, texts), (theirs, model_of_theirs, wanted) = (
        trained(experts, tmp_path / experts) for experts in ("tgl", "eager")
    )
    assert texts == wanted
    for name in ("loss", "grad_norm"):
        found, right = ([entry[name] for entry in t.state.log_history if name in entry] for t in (ours, theirs))
        assert found == pytest.approx(right, rel=1e-4, abs=1e-6)
        assert len(right) == 4
    assert max(right) > 0  # of the norms: rewards differ within a group
    first = dict(model("eager").named_parameters())
    for name, wanted_value in model_of_theirs.named_parameters():
        moved = (wanted_value - first[name]).norm()
        assert (dict(model_of_ours.named_parameters())[name] - wanted_value).norm() <= 1e-3 * moved, name


def test_rollouts_by_continuous_batching(tmp_path: Path) -> None:
    """They are what the model generates greedily where the likeliest token is always taken."""
    batching = {"page_size": 16, "num_blocks": 32, "max_batch_tokens": 64, "use_cuda_graph": False}
    rollouts = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": batching}
    trainer, own, texts = trained("tgl", tmp_path, top_k=1, max_steps=1, num_iterations=1, **rollouts)
    assert own.config._experts_implementation == "tgl"
    encode = trainer.processing_class
    greedy = set()
    for prompt in PROMPTS:
        made = model("tgl").generate(**encode(prompt, return_tensors="pt"), max_new_tokens=6, do_sample=False)
        greedy.add(encode.decode(made[0, len(prompt) :], skip_special_tokens=True))
    assert len(texts) == 8
    assert set(texts) <= greedy
