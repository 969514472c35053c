"""Muon for expert weights: an optimizer for stacks of matrices, which ``torch.optim.Muon`` does not support.

    optimizer = tgl.optim.Muon([mlp.fc1.weight, mlp.fc2.weight], lr=1e-3)

Every matrix of a stack gets the update that ``torch.optim.Muon`` would give it. The matrices of a stack have equal
sizes, so the Newton-Schulz products are batched; two of the three are symmetric and use ``tgl.batched_syrk``.
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
"""Learning rate factor as a function of the matrix size, by value of ``adjust_lr_fn``."""


class Muon(torch.optim.Optimizer):
    """Momentum SGD whose update matrices are orthogonalised (Jordan et al., "Muon", 2024).

    For each matrix ``w`` with gradient ``g``: ``m += (1 - momentum) (g - m)``; the update is ``m``, or with
    ``nesterov`` ``g + momentum (m - g)``; ``w`` is multiplied by ``1 - lr weight_decay``, and ``lr`` times the nearest
    orthogonal matrix of the update, from ``ns_steps`` Newton-Schulz iterations in bfloat16, is subtracted.

    Results equal ``torch.optim.Muon`` on the single matrices wherever torch's batched products have the bits of single
    ones: on a CPU, where a product takes more than 16^3 multiplications. A GPU kernel of ``batched_syrk`` sums in
    another order, so that values differ by bfloat16 rounding; ``tgl.explain`` reports whether there is one. bfloat16
    parameters without ``nesterov`` differ, because ``torch.optim.Muon`` then divides its momentum by the norm in every
    step, in place.

    A step holds up to four bfloat16 tensors of a parameter's size besides its momentum. The gate and linear half of a
    gated FC1 are one matrix, as for ``torch.optim.Muon``. Sharded matrices are not supported.

    Args:
        params: parameters ``[G, M, N]``, or groups of them.
        lr: learning rate.
        weight_decay: decoupled, multiplied by ``lr``.
        momentum: decay of the moving average of gradients.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: a, b and c of the iteration ``x = a x + (b s + c s s) x`` with ``s = x x^T``.
        eps: lower bound of the norm that a matrix is divided by.
        ns_steps: number of Newton-Schulz iterations.
        adjust_lr_fn: factor of the learning rate: ``"original"``, ``sqrt(max(1, M / N))``, or
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
        """Add a parameter group after checking its parameters.

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
        """Perform one step; returns the result of ``closure``, which is called first."""
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
    """Return ``stack`` with all singular values moved near 1, the singular vectors kept; bfloat16 ``[G, M, N]``."""
    a, b, c = coefficients
    tall = stack.shape[1] > stack.shape[2]
    x = stack.bfloat16()
    x = x.mT if tall else x
    # One norm per matrix: a reduction over two dimensions sums in another order and rounds differently.
    norms = torch.stack(torch._foreach_norm(x.unbind()))
    x = x / norms.clamp(min=eps)[:, None, None]
    # Without an implementation for the device, `batched_syrk` would raise.
    update = batched_syrk if backends.first("batched_syrk", x.device) is not None else _batched_products
    for _ in range(steps):
        s = update(x)
        x = torch.baddbmm(x, update(s, s, alpha=c, beta=b), x, beta=a)
    return x.mT if tall else x


def _batched_products(x: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """Compute ``batched_syrk`` with torch's batched products; ``c`` is None or ``x``."""
    return torch.bmm(x, x.mT) if c is None else torch.baddbmm(c, x, x, beta=beta, alpha=alpha)
