"""Muon for weights of experts: an optimizer on stacks of matrices, which ``torch.optim.Muon`` refuses.

    optimizer = tgl.optim.Muon([mlp.fc1.weight, mlp.fc2.weight], lr=1e-3)

It does to every matrix of a stack what ``torch.optim.Muon`` does to one. The matrices of a stack are equal in size, so
that the products of its iteration are batched ones: two of three have symmetric results, and are ``tgl.batched_syrk``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import backends
from .ops import batched_syrk

COEFFICIENTS = (3.4445, -4.775, 2.0315)
_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""The factor of the learning rate for matrices of a size, by the name that ``adjust_lr_fn`` has."""


class Muon(torch.optim.Optimizer):
    """Momentum whose every matrix is made nearly orthogonal before it is added (Jordan et al., "Muon", 2024).

    For each matrix ``w`` with gradient ``g``: ``m += (1 - momentum) (g - m)``, the step is ``m``, or with ``nesterov``
    ``g + momentum (m - g)``; ``w`` is multiplied by ``1 - lr weight_decay``, and ``lr`` times the step's nearest
    orthogonal matrix, by ``ns_steps`` of Newton and Schulz in bfloat16, is taken off.

    The values are those of ``torch.optim.Muon`` on the matrices one by one, as far as torch's batched products have the
    bits of single ones: on a CPU where one takes more than 16^3 multiplications. On a GPU for which ``batched_syrk``
    has a kernel its sums are formed in another order, so that values differ by bfloat16's rounding; ``tgl.explain``
    tells. bfloat16 parameters without ``nesterov`` differ: the other optimizer then divides its momentum by the norm in
    every step, in place.

    A step holds up to four tensors of the size of a parameter in bfloat16 besides its momentum. Of a gated FC1 gate and
    linear half are one matrix, as they are for ``torch.optim.Muon``. A matrix that is sharded is not served.

    Args:
        params: parameters ``[G, M, N]``, or groups of them.
        lr: learning rate.
        weight_decay: decoupled, multiplied by ``lr``.
        momentum: of the average of gradients.
        nesterov: whether the step looks ahead by one more gradient.
        ns_coefficients: a, b and c of ``x = a x + (b s + c s s) x`` with ``s = x x^T``.
        eps: what a norm is at least.
        ns_steps: how many of these.
        adjust_lr_fn: what multiplies the learning rate: ``"original"``, ``sqrt(max(1, M / N))``, or
            ``"match_rms_adamw"``, ``0.2 sqrt(max(M, N))``.

    Raises:
        ValueError: a parameter is no stack of matrices, or an option is out of range.
        TypeError: a parameter is not of a floating dtype.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        adjust_lr_fn: str = "original",
        **iteration: Any,
    ) -> None:
        options = {"ns_coefficients": COEFFICIENTS, "eps": 1e-7, "ns_steps": 5}
        unknown = iteration.keys() - options.keys()
        if unknown:
            raise TypeError(f"`{min(unknown)}` must be one of {', '.join(options)}")
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum)):
            if not value >= 0:
                raise ValueError(f"`{name}` must be at least 0, but got {value}")
        if adjust_lr_fn not in _SCALES:
            raise ValueError(f"`adjust_lr_fn` must be one of {', '.join(_SCALES)}, but got {adjust_lr_fn!r}")
        options |= {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, {**options, **iteration, "adjust_lr_fn": adjust_lr_fn})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Another group, whose parameters are checked.

        Raises:
            ValueError, TypeError: as for the class.
        """
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dim() != 3:
                raise ValueError(f"`params` must be 3-D [G, M, N], but got {tuple(p.shape)}")
            if not p.is_floating_point():
                raise TypeError(f"`params` must be floating, but got {p.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; returns what ``closure`` does, which is called first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                average = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = p.grad.lerp(average, momentum) if group["nesterov"] else average
                update = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * _SCALES[group["adjust_lr_fn"]](*p.shape[1:]))
        return loss


def orthogonalized(
    stack: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """bfloat16 ``[G, M, N]``: matrices with the singular vectors of those of ``stack``, and singular values near 1."""
    a, b, c = coefficients
    tall = stack.shape[1] > stack.shape[2]
    x = stack.bfloat16()
    x = x.mT if tall else x
    # Of each matrix by itself, as summation over dimensions has another order and would round otherwise.
    norms = torch.stack(torch._foreach_norm(x.unbind()))
    x = x / norms.clamp(min=eps)[:, None, None]
    # On devices that no implementation is registered for there is no op.
    update = batched_syrk if backends.first("batched_syrk", x.device) is not None else _batched_products
    for _ in range(steps):
        s = update(x)
        x = torch.baddbmm(x, update(s, s, alpha=c, beta=b), x, beta=a)
    return x.mT if tall else x


def _batched_products(x: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """``batched_syrk`` as products of torch; ``c`` is None or ``x``."""
    return torch.bmm(x, x.mT) if c is None else torch.baddbmm(c, x, x, beta=beta, alpha=alpha)
