"""Ranks of the demo: several share the experts of every layer and the windows of every step.

The rest of the model lies on all of them. A rank takes its share of a step's windows, so that the losses are those of
one rank but for the order of sums.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tgl.meta.expert_parallel import ALL_TO_ALL

from .model import Transformer

CLIP = 1.0  # largest norm of the gradient of all parameters


class OneRank:
    """All experts and all windows."""

    rank = 0

    def shared(self, model: Transformer, tokens: int, engine: str = ALL_TO_ALL) -> Transformer:
        """The model to be trained on ``tokens`` bytes a step; ``engine`` moves them between ranks."""
        return model

    def whole(self, model: Transformer) -> Transformer:
        """The trained model with all experts."""
        return model

    def windows(self, windows: Tensor) -> Tensor:
        """The windows of this rank."""
        return windows

    def finish_backward(self, model: Transformer, nats: Tensor) -> float:
        """Make the gradients those of all windows, and clip them; returns the loss of all windows."""
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        return nats.item()

    def leave(self) -> None:
        """The end of what ranks do together."""


class Ranks(OneRank):
    """The ranks of ``group``, each with a share of the experts and of the windows."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), dist.get_rank(group)

    def shared(self, model: Transformer, tokens: int, engine: str = ALL_TO_ALL) -> Transformer:
        parallel = Transformer(replace(model.config, group=self.group, tokens=tokens // self.size, engine=engine))
        parallel = parallel.to(model.embedding.weight)
        first = model.config.experts // self.size * self.rank
        with torch.no_grad():
            for ours, theirs in zip(parallel.parameters(), model.parameters(), strict=True):
                ours.copy_(theirs if ours.shape == theirs.shape else theirs[first : first + len(ours)])
        return parallel

    def whole(self, model: Transformer) -> Transformer:
        whole = Transformer(replace(model.config, group=None, tokens=0)).to(model.embedding.weight)
        with torch.no_grad():
            for ours, theirs in zip(whole.parameters(), model.parameters(), strict=True):
                if ours.shape == theirs.shape:
                    ours.copy_(theirs)
                else:
                    parts = [torch.empty_like(theirs) for _ in range(self.size)]
                    dist.all_gather(parts, theirs.detach(), group=self.group)
                    ours.copy_(torch.cat(parts))
        return whole

    def windows(self, windows: Tensor) -> Tensor:
        return windows.chunk(self.size)[self.rank]

    def finish_backward(self, model: Transformer, nats: Tensor) -> float:
        """The gradient of an expert is summed over all windows already: tokens of all ranks have come to it."""
        experts = {id(p) for block in model.blocks for p in block.moe.experts.parameters()}
        everywhere = [p.grad for p in model.parameters() if id(p) not in experts]
        here = [p.grad for p in model.parameters() if id(p) in experts]
        for grad in everywhere:
            dist.all_reduce(grad, group=self.group)
        for grad in (*everywhere, *here):
            grad.div_(self.size)
        squares = nn.utils.get_total_norm(here).square()
        dist.all_reduce(squares, group=self.group)
        norm = (squares + nn.utils.get_total_norm(everywhere).square()).sqrt()
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        for block in model.blocks:
            block.moe.experts.check()  # that the rows of the step have found room
        loss = nats.detach().clone()
        dist.all_reduce(loss, group=self.group)
        return loss.item() / self.size

    def leave(self) -> None:
        dist.destroy_process_group()


def started(count: int, device: torch.device) -> tuple[torch.device, OneRank]:
    """``count`` ranks, which torchrun has started if they are several, and this one's device: on GPUs one of its own.

    Raises:
        ValueError: it has started another number, or the device is one that all of them would share.
    """
    running = int(os.environ.get("WORLD_SIZE", "1"))
    if running != count:
        raise ValueError(
            f"--ep must be the number of ranks that torchrun has started, {running}, but got {count}: "
            f"torchrun --nproc-per-node {count} -m examples.train_moe --ep {count}"
        )
    if count == 1:
        return device, OneRank()
    if device.type == "cuda":
        if device.index is not None:
            raise ValueError(f"--device must be cuda with --ep {count}, of which every rank has one, but got {device}")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # before anything is there, which would be on the first one
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return device, Ranks(dist.group.WORLD)
