"""``python -m examples.finetune_transformers``: train a transformers model with experts on text, by ``Trainer``.

Without arguments a small Qwen3-MoE with random weights learns the bytes of the Python standard library on this machine:
nothing is downloaded. ``--model`` takes a checkpoint and its tokenizer instead, ``--text`` other text. A GPU
is used where there is one::

    python -m examples.finetune_transformers --model Qwen/Qwen3-30B-A3B --text book.txt --batch 1 --context 2048
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset

import tgl.integrations.transformers

from .train_moe import data

HELD_OUT = 16  # windows of text that are scored before and after
SIZES = {
    "vocab_size": 256,  # bytes
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
}


class Windows(Dataset):
    """Pieces of ``context`` tokens, one behind the other, as models for causal language modelling take them."""

    def __init__(self, tokens: torch.Tensor, context: int) -> None:
        self.pieces = tokens[: tokens.shape[0] // context * context].view(-1, context)

    def __len__(self) -> int:
        return self.pieces.shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.pieces[index].long()
        return {"input_ids": piece, "labels": piece}


def options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        prog="finetune_transformers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", metavar="NAME", help="a checkpoint: a folder, or a name on the hub")
    parser.add_argument("--config", default="qwen3_moe", metavar="TYPE", help="model type of random weights")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="files of text in UTF-8")
    parser.add_argument("--experts", default="tgl", metavar="NAME", help="experts implementation, to compare with")
    parser.add_argument("--out", type=Path, default=Path("finetune_output"), metavar="DIR", help="folder of Trainer")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    for name, default, text in (
        ("steps", 100, "training steps"),
        ("batch", 8, "windows in a step and device"),
        ("context", 128, "tokens in a window"),
        ("seed", 0, "seed of weights and batches"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    chosen = parser.parse_args(arguments)
    for path in chosen.text or ():
        if not path.is_file():
            parser.error(f"--text must be files, but {path} is none")
    for name in ("steps", "batch", "context"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} must be at least 1, but got {getattr(chosen, name)}")
    return chosen


def load(chosen: argparse.Namespace) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model, its experts run as ``--experts`` says, and the tokens of all text."""
    if chosen.text:
        raw = b"\n".join(path.read_bytes() for path in chosen.text)
    else:
        raw = data.load(chosen.context).train.numpy().tobytes()
    if chosen.model is None:
        config = transformers.AutoConfig.for_model(chosen.config, **SIZES)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.set_experts_implementation(chosen.experts)
        return model, torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(chosen.model, experts_implementation=chosen.experts)
    return model, torch.tensor(tokenizer.encode(raw.decode(errors="replace")))


def main(arguments: list[str] | None = None) -> tuple[float, float]:
    """Train; the losses per token of held-out windows before and after."""
    chosen = options(arguments)
    transformers.set_seed(chosen.seed)
    tgl.integrations.transformers.register()
    model, tokens = load(chosen)
    held_out = HELD_OUT * chosen.context
    if tokens.shape[0] < 2 * held_out:
        raise SystemExit(f"finetune_transformers: --text must have {2 * held_out} tokens, but has {tokens.shape[0]}")
    gpu = torch.cuda.is_available()
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(chosen.out),
            max_steps=chosen.steps,
            per_device_train_batch_size=chosen.batch,
            per_device_eval_batch_size=chosen.batch,
            learning_rate=chosen.lr,
            lr_scheduler_type="cosine",
            logging_steps=max(1, chosen.steps // 10),
            seed=chosen.seed,
            bf16=gpu,
            use_cpu=not gpu,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Windows(tokens[:-held_out], chosen.context),
        eval_dataset=Windows(tokens[-held_out:], chosen.context),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    kind = model.config.model_type
    print(f"{kind} by {chosen.experts!r}: held-out loss {before:.3f} before, {after:.3f} after {chosen.steps} steps")
    return before, after


if __name__ == "__main__":
    main()
