"""The training loop, evaluation and sampling."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from .data import Corpus
from .model import Transformer
from .parallel import OneRank

BALANCE = 0.01  # weight of the load-balancing loss: enough that no expert starves, too little to cost accuracy
PEAK_RATE = 3e-3
EVALUATE_AT = (0.02, 0.05, *(i / 10 for i in range(1, 11)))  # shares of the run; the loss falls fastest at the start
EVALUATION_TOKENS = 4096  # per forward pass


@dataclass
class History:
    """The record of a training run.

    Attributes:
        train: training loss of every step, nats per byte.
        held_out: ``(steps done, held-out loss in nats per byte)``, from before the first step to after the last.
        usage: ``[layers, experts]`` share of the held-out rows that each expert got in the last evaluation.
        first_step: seconds of the first step, which compiles.
        stepping: seconds of all other steps, evaluations not counted.
    """

    train: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    usage: Tensor = field(default_factory=lambda: torch.empty(0))
    first_step: float = 0.0
    stepping: float = 0.0


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """Parameters stay in their own dtype; bfloat16 is for the arithmetic."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over the first twentieth, then a cosine down to a twentieth of the peak."""
    warm = max(1, steps // 20)
    if step < warm:
        return PEAK_RATE * (step + 1) / warm
    return PEAK_RATE * (0.05 + 0.475 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def fit(
    model: Transformer,
    step_model: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    corpus: Corpus,
    *,
    steps: int,
    batch: int,
    dtype: torch.dtype,
    seed: int,
    ranks: OneRank | None = None,
) -> History:
    """Train ``model`` in place through ``step_model``, which is the model itself or its compiled form.

    Several ``ranks`` share the ``batch`` windows of a step, and return one history.
    """
    ranks = ranks or OneRank()
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    history = History()
    evaluations = {max(1, round(share * steps)) for share in EVALUATE_AT}
    written = batch * model.config.context

    loss, history.usage = evaluate(ranks.whole(model), corpus, dtype)
    history.held_out.append((0, loss))
    pause = 0.2 if sys.stderr.isatty() else 15  # a log is not redrawn
    quiet = ranks.rank > 0
    bar = tqdm(total=steps, desc="training", unit="step", dynamic_ncols=True, mininterval=pause, disable=quiet)
    bar.set_postfix_str("compiling" if step_model is not model else "")
    for step in range(steps):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        windows = ranks.windows(corpus.batch(batch, generator)).to(device)
        with autocast(device, dtype):
            nats, balance, _ = step_model(windows)
        (nats + BALANCE * balance).backward()
        loss_of_step = ranks.finish_backward(model, nats)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        history.train.append(loss_of_step)
        seconds = time.perf_counter() - start
        if step == 0:
            history.first_step = seconds
        else:
            history.stepping += seconds
        if step + 1 in evaluations:
            loss, history.usage = evaluate(ranks.whole(model), corpus, dtype)
            history.held_out.append((step + 1, loss))
        bar.update()
        rate = f", {step * written / history.stepping / 1e3:.1f}k tokens/s" if step else ""
        bar.set_postfix_str(
            f"loss {history.train[-1]:.3f}, held out {history.held_out[-1][1]:.3f}{rate}", refresh=False
        )
    bar.close()
    return history


@torch.no_grad()
def evaluate(model: Transformer, corpus: Corpus, dtype: torch.dtype) -> tuple[float, Tensor]:
    """Held-out loss in nats per byte, and each expert's share of the rows, ``[layers, experts]`` on the CPU."""
    device = model.embedding.weight.device
    model.eval()
    total, rows = 0.0, torch.zeros((), dtype=torch.int64)
    for windows in corpus.held_out.split(max(1, EVALUATION_TOKENS // model.config.context)):
        with autocast(device, dtype):
            nats, _, batch_rows = model(windows.to(device))
        total += nats.item() * windows.shape[0]
        rows = rows + batch_rows.cpu()
    model.train()
    return total / corpus.held_out.shape[0], rows / rows.sum(dim=1, keepdim=True)


@torch.no_grad()
def sample(
    model: Transformer, prompt: bytes, length: int, *, dtype: torch.dtype, seed: int, heat: float = 0.7
) -> bytes:
    """Continue ``prompt`` by ``length`` bytes drawn from the model at temperature ``heat``."""
    device = model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        window = torch.tensor([text[-model.config.context :]], device=device)
        with autocast(device, dtype):
            logits = model.logits(window)[0][0, -1]
        probs = (logits.double().cpu() / heat).softmax(dim=0)
        text.append(int(torch.multinomial(probs, 1, generator=generator)))
    return bytes(text)
