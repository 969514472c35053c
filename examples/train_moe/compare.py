"""The trained model against itself with a plain loop over its experts: same weights, same data, same process."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import Transformer
from .train import autocast

ROUNDS = 9
TOLERANCE = 1e-9  # relative, in float64, where the two only differ by the order of a few sums

StepModel = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Comparison:
    """Results of ``compare``.

    Attributes:
        rates: tokens per second of forward and backward, by arm; the plain loop first.
        losses: nats per byte on the same windows, by arm.
        loss_gap: relative difference of the loss in float64 between the loop and the grouped GEMMs, both eager and
            without a recipe.
        gradient_gap: the largest difference of a parameter's gradient, relative to the norm of that gradient, likewise.
    """

    rates: dict[str, float]
    losses: dict[str, float]
    loss_gap: float
    gradient_gap: float

    @property
    def agree(self) -> bool:
        return max(self.loss_gap, self.gradient_gap) <= TOLERANCE


def compare(model: Transformer, compiled: StepModel | None, windows: Tensor, dtype: torch.dtype) -> Comparison:
    """Time the arms in turns, so that whatever else the machine does hits all of them alike.

    Args:
        model: the trained model; its weights are not changed.
        compiled: its compiled form, if there is one.
        windows: int64 ``[batch, length + 1]`` on the model's device, what every arm is run on.
        dtype: as in training.
    """
    loop = copy.deepcopy(model).use_plain_loop()
    arms: dict[str, StepModel] = {"plain loop, eager": loop, "tgl, eager": model}
    if compiled is not None:
        arms["tgl, compiled"] = compiled
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    losses = {}
    for done in range(ROUNDS + 1):
        for name, arm in arms.items():
            loop.zero_grad(set_to_none=True)
            model.zero_grad(set_to_none=True)
            _wait(windows.device)
            start = time.perf_counter()
            with autocast(windows.device, dtype):
                nats, _, _ = arm(windows)
            nats.backward()
            _wait(windows.device)
            if done:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
            losses[name] = nats.item()
    model.zero_grad(set_to_none=True)
    tokens = windows[:, 1:].numel()
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    return Comparison(rates, losses, *_gaps(model, windows))


def _gaps(model: Transformer, windows: Tensor) -> tuple[float, float]:
    exact = model.without_recipe().double()
    loop = copy.deepcopy(exact).use_plain_loop()
    ours, theirs = exact(windows)[0], loop(windows)[0]
    ours.backward()
    theirs.backward()
    pairs = [(p.grad, q.grad) for p, q in zip(exact.parameters(), loop.parameters(), strict=True)]
    tiny = torch.finfo(torch.float64).tiny
    gradient = max(((p - q).norm() / q.norm().clamp(min=tiny)).item() for p, q in pairs)
    return ((ours - theirs).abs() / theirs).item(), gradient


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
