"""A few dozen training steps of the demo's model on any device: losses, norms, and the first step's gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import tgl
from examples.train_moe.model import Config, Transformer
from examples.train_moe.recipes import RECIPES

BALANCE, CLIP, RATE = 0.01, 1.0, 2e-3


class Size(NamedTuple):
    """Sizes of the model and of a step; ``windows`` of ``context`` bytes."""

    dim: int
    layers: int
    experts: int
    context: int
    windows: int
    steps: int


class History(NamedTuple):
    """The record of a run.

    Attributes:
        losses: nats per byte of every step.
        norms: norm of all gradients of every step, before clipping.
        gradients: of every parameter in the first step, float32 on the CPU.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]


def batches(size: Size) -> list[Tensor]:
    """The same int64 ``[windows, context + 1]`` for every run, of this package's own sources."""
    text = b"\0".join(path.read_bytes() for path in sorted(Path(tgl.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    shape, length = (size.windows, 1), size.context + 1
    return [
        data[torch.randint(len(data) - length, shape, generator=generator) + torch.arange(length)].long()
        for _ in range(size.steps)
    ]


def make_model(recipe: str, size: Size) -> Transformer:
    """The same weights for every recipe."""
    torch.manual_seed(0)
    return Transformer(Config(size.dim, size.layers, size.experts, 4, size.context, RECIPES[recipe]))


def eager(model: Transformer) -> Callable:
    return model


def compiled(model: Transformer) -> Callable:
    """Return the step as ``python -m examples.train_moe`` compiles it."""
    return torch.compile(model, fullgraph=True)


def backward(call: Callable, windows: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the gradients of one step; returns the loss."""
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        nats, balance, _ = call(windows)
    (nats + BALANCE * balance).backward()
    return nats.detach()


def captured(model: Transformer, windows: Tensor, dtype: torch.dtype, call: Callable) -> Callable[[Tensor], Tensor]:
    """Forward and backward as a CUDA graph: a function that replays it on other windows."""
    held, state = windows.clone(), {name: t.clone() for name, t in model.state_dict().items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            backward(call, held, dtype)
    torch.cuda.current_stream().wait_stream(stream)
    model.load_state_dict(state)  # what a recipe remembers has moved on in the rounds that warmed up
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = backward(call, held, dtype)

    def replay(new: Tensor) -> Tensor:
        held.copy_(new)
        graph.replay()
        return loss

    return replay


def train(
    recipe: str,
    size: Size,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    how: Callable[[Transformer], Callable] = eager,
    capture: bool = False,
    threads: int | None = None,
) -> History:
    """Train from the same weights on the same batches; ``dtype`` bfloat16 is autocast over float32 parameters."""
    if threads is not None:
        torch.set_num_threads(threads)
    windows = [w.to(device) for w in batches(size)]
    model = make_model(recipe, size).to(device)
    call = how(model)
    replay = captured(model, windows[0], dtype, call) if capture else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses, norms, gradients = [], [], {}
    for step, w in enumerate(windows):
        if replay is None:
            optimizer.zero_grad(set_to_none=True)
        loss = replay(w) if replay is not None else backward(call, w, dtype)
        if step == 0:
            gradients = {name: p.grad.detach().float().cpu().clone() for name, p in model.named_parameters()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss))
    return History(losses, norms, gradients)
