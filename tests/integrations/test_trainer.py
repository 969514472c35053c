"""Small MoE models of transformers with tgl's experts: trained, saved, offloaded and resumed by the usual tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tgl.integrations import transformers as models

accelerate = pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tgl.integrations import peft as adapters  # noqa: E402

SIZES = {
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32)
    ),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, num_local_experts=4)),
}
MODEL = pytest.mark.parametrize("kind", MODELS)
TOKENS = torch.arange(14).view(2, 7) % 11
DATA = [{"input_ids": (t := torch.arange(i, i + 7) % 11), "labels": t} for i in range(16)]


def make(kind: str, seed: int = 0, *, adapted: bool = False) -> Any:
    models.register()
    torch.manual_seed(seed)
    model = MODELS[kind]()
    for parameter in model.parameters():  # transformers leaves some to a checkpoint
        nn.init.normal_(parameter, std=0.1)
    model.set_experts_implementation("tgl")
    if not adapted:
        return model
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, lora_bias=False)
    model = peft.get_peft_model(model, config)
    adapters.attach(model)
    return model


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def assert_same(a: Any, b: Any) -> None:
    """Equal to the bit, tensor by tensor."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, Tensor):
        assert torch.equal(a, b)


def trainer_of(model: Any, path: Path) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(path),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=DATA)


@pytest.mark.parametrize(
    "kind, adapted",
    [("qwen3_moe", False), pytest.param("gpt_oss", False, marks=pytest.mark.slow), ("qwen3_moe", True)],
)
def test_a_trainer_goes_on_where_it_was_stopped(kind: str, adapted: bool, tmp_path: Path) -> None:
    trainer = trainer_of(make(kind, adapted=adapted), tmp_path)
    trainer.train()
    path = str(tmp_path / "checkpoint-2")
    if kind == "qwen3_moe" and not adapted:
        # Files of Qwen3-MoE name experts one by one, and Trainer's own load (transformers 5.24) finds none of them.
        model = transformers.Qwen3MoeForCausalLM.from_pretrained(path, experts_implementation="tgl")
    else:
        model = make(kind, adapted=adapted)
    resumed = trainer_of(model, tmp_path / "again")
    resumed.train(resume_from_checkpoint=path)
    assert resumed.state.global_step == 4
    assert_same(trainer.model.state_dict(), resumed.model.state_dict())
    assert_same(trainer.optimizer.state_dict()["state"], resumed.optimizer.state_dict()["state"])
    assert torch.equal(logits(trainer.model), logits(resumed.model))


@MODEL
def test_pretrained(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    train(model, torch.optim.AdamW(model.parameters()), 2)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, experts_implementation="tgl")
    assert_same(model.state_dict(), again.state_dict())
    assert torch.equal(logits(model), logits(again))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@MODEL
def test_distributed_checkpoint(kind: str, tmp_path: Path) -> None:
    pairs = []
    for seed in (0, 5):
        model = make(kind, seed)
        pairs.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    (model, optimizer), (other, other_optimizer) = pairs
    train(model, optimizer, 2)
    dcp.save(dict(zip("mo", get_state_dict(model, optimizer))), checkpoint_id=tmp_path, no_dist=True)
    state = dict(zip("mo", get_state_dict(other, other_optimizer)))
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, other_optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
    for pair in pairs:
        train(*pair, 1)
    assert_same(model.state_dict(), other.state_dict())
    assert_same(optimizer.state_dict()["state"], other_optimizer.state_dict()["state"])
    assert torch.equal(logits(model), logits(other))


@pytest.mark.parametrize("place", ["cpu", "disk"])
@MODEL
def test_offloaded(kind: str, place: str, tmp_path: Path) -> None:
    model = make(kind)
    expected = logits(model)
    offload = accelerate.cpu_offload if place == "cpu" else accelerate.disk_offload
    offload(model, *([tmp_path] if place == "disk" else []), execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    assert torch.equal(logits(model), expected)


def test_adapters_from_a_directory(tmp_path: Path) -> None:
    model = make("qwen3_moe", adapted=True)
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), 2)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make("qwen3_moe"), tmp_path)
    adapters.attach(again)
    assert torch.equal(logits(model), logits(again))
