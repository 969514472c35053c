"""The Mixture-of-Experts block of SonicMoE behind its router, as its own module and its own benchmark run it.

Each of its GEMMs is tuned by quack's autotuner at the first call of a size, over all configurations for the device, and
its sums by Triton's; nothing is set here that its benchmark on Hopper does not leave as it is. The kernels are compiled
by ``QUACK_COMPILE_WORKERS`` processes, 8 by default, and kept on disk.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor


def installed() -> str:
    """Its version and how it is tuned, in a line."""
    try:
        versions = f"sonic-moe {version('sonic-moe')} on quack-kernels {version('quack-kernels')}"
    except PackageNotFoundError as missing:
        return f"SonicMoE: {missing.name} is not installed"
    return f"{versions}: GEMMs by quack's autotuner over all its configurations at the first call, sums by Triton's"


def configurations() -> dict[str, list[str]]:
    """Return the configurations that quack's autotuner has chosen so far, by function and size."""
    if "quack.autotuner" not in sys.modules:
        return {}
    kind = sys.modules["quack.autotuner"].Autotuner
    loaded = [module for name, module in sys.modules.items() if name.startswith("quack.")]
    tuned = {name: f for module in loaded for name, f in vars(module).items() if isinstance(f, kind)}
    return {name: [str(chosen) for chosen in f.cache.values()] for name, f in tuned.items()}


def by_sonicmoe(
    x: Tensor, chosen: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, bias1: Tensor | None, bias2: Tensor | None
) -> Tensor:
    """SwiGLU. Without gradients it keeps nothing for a backward, as its benchmark of inference does.

    Args:
        x: ``[S, H]``.
        chosen, weights: int32 and float32 ``[S, k]``.
        w1, w2: ``[E, 2 I, H]``, all gates first, and ``[E, H, I]``.
        bias1, bias2: ``[E, 2 I]`` and ``[E, H]``, both or none.
    """
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import _DownProjection, _UpProjection
    from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton

    (tokens, top_k), experts, rows = chosen.shape, w1.shape[0], chosen.numel()

    def integers(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=x.device)

    count, offs, token, scatter, back = (integers(size) for size in (experts, experts + 1, rows, rows, rows))
    TC_topk_router_metadata_triton(chosen, experts, count, offs, token, scatter, back)
    order: tuple[Any, ...] = token, scatter, back, None, False  # each token has k choices
    kind, no_backward = ActivationType.SWIGLU, not torch.is_grad_enabled()
    a, h = _UpProjection.apply(x, w1.permute(1, 2, 0), bias1, offs, rows, top_k, *order, kind, no_backward, True)
    return _DownProjection.apply(a, h, w2.permute(1, 2, 0), bias2, weights, offs, tokens, top_k, *order, kind)
