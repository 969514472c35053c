"""``tgl::update_amax_history_``: delayed scaling: the next call's scale comes from amaxes of earlier ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..meta import memory, scaled
from ..meta.formats import ELEMENTS
from ._library import define

NAME = "update_amax_history_"
FP32_MAX = torch.finfo(torch.float32).max


def _kernel(
    amax: Tensor, history: Tensor, scale: Tensor, *, dtype: torch.dtype, margin: int = 0, algo: str = "max"
) -> None:
    scaled.update_amax_history_(amax, history, scale, dtype=dtype, margin=margin, algo=algo)
    memory.writable(NAME, "history", history, amax=amax)
    memory.writable(NAME, "scale", scale, amax=amax, history=history)
    backends.run(NAME, amax.device, amax, history, scale, dtype=dtype, margin=margin, algo=algo)


def _steps(amax: Tensor, history: Tensor, scale: Tensor, *, dtype: torch.dtype, margin: int, algo: str) -> None:
    history.copy_(torch.cat([amax[None], history[:-1]]))
    largest = history.amax(0) if algo == "max" else amax
    fresh = (ELEMENTS[dtype].max / largest * 2.0**-margin).clamp(max=FP32_MAX)
    scale.copy_(torch.where((largest > 0) & largest.isfinite(), fresh, scale))


def _call(amax: Tensor, history: Tensor, scale: Tensor, **options: Any) -> tuple[torch.device, tuple, dict[str, Any]]:
    scaled.update_amax_history_(amax, history, scale, **options)
    return amax.device, (amax, history, scale), options


_op = define(
    f"{NAME}(Tensor amax, Tensor(a!) history, Tensor(b!) scale, *, ScalarType dtype, int margin=0, "
    'str algo="max") -> ()',
    _kernel,
    scaled.update_amax_history_,
)
backends.describe_op(NAME, _call)
for _device in ("cpu", "cuda"):
    backends.add(backends.Implementation(NAME, "steps of aten", _device, _steps))


def update_amax_history_(
    amax: Tensor, history: Tensor, scale: Tensor, *, dtype: torch.dtype, margin: int = 0, algo: str = "max"
) -> None:
    """Put ``amax`` at the front of ``history``, drop the oldest entry, and set ``scale`` for the next call, in place.

    ``scale = max of dtype / largest / 2 ** margin``, at most the largest float32, with ``largest`` the maximum over the
    history of the group, or ``amax`` itself. Where ``largest`` is zero, infinite or NaN the scale stays as it is.

    Args:
        amax: float32 ``[G]``, as ``group_quantize`` returns it.
        history: float32 ``[H, G]``, the most recent first; zeros where there was no call yet.
        scale: float32 ``[G]``, as ``group_quantize`` takes it; ones before the first call.
        dtype: element type that is scaled to.
        margin: powers of two to stay below its range.
        algo: ``"max"`` or ``"most_recent"``.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    _op(amax, history, scale, dtype=dtype, margin=margin, algo=algo)
