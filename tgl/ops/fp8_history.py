"""Delayed scaling: ``tgl::fp8_scale_from_history`` and ``tgl::fp8_update_history_``, on state that the caller owns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..meta import checks, memory, quantized
from ..meta.formats import E4M3
from ._define import define
from ._library import register

SCALE = "fp8_scale_from_history"
UPDATE = "fp8_update_history_"


def _kernel_update(amax: Tensor, history: Tensor) -> None:
    quantized.fp8_update_history(amax, history)
    if memory.overlap(history, amax):
        checks.require(False, UPDATE, "history", "disjoint from `amax`", "overlapping memory")
    backends.run(UPDATE, history.device, amax, history)


def _options(
    *, algorithm: str = "max", dtype: torch.dtype | None = None, power_of_two: bool = False, margin: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    keywords = {"algorithm": algorithm, "dtype": dtype, "power_of_two": power_of_two, "margin": margin}
    return keywords, {**keywords, "dtype": dtype or E4M3}


_op = define(
    f'{SCALE}(Tensor history, Tensor scale, *, str algorithm="max", ScalarType? dtype=None, bool power_of_two=False, '
    "int margin=0) -> Tensor",
    quantized.fp8_scale_from_history,
    options=_options,
    no_derivative="scales are state, not values",
)
_op_update = register(f"{UPDATE}(Tensor amax, Tensor(a!) history) -> ()", _kernel_update, quantized.fp8_update_history)


def _call_update(amax: Tensor, history: Tensor) -> tuple[torch.device, tuple, dict[str, Any]]:
    quantized.fp8_update_history(amax, history)
    return history.device, (amax, history), {}


backends.describe_op(UPDATE, _call_update)


def fp8_scale_from_history(
    history: Tensor,
    scale: Tensor,
    *,
    algorithm: str = "max",
    dtype: torch.dtype | None = None,
    power_of_two: bool = False,
    margin: int = 0,
) -> Tensor:
    """Return the scale of every group for the next step of delayed scaling.

    ``max / amax`` divided by ``2^margin``, where ``amax`` is the largest of the history or the most recent one, and
    ``max`` is 448 (E4M3) or 57344 (E5M2); an infinite result becomes the largest float32. Where ``amax`` is 0, Inf or
    NaN the previous scale is kept. As in TransformerEngine's ``DelayedScaling``.

    Args:
        history: float32 ``[L, G]``, the last L amaxes of every group, most recent first.
        scale: float32 ``[G]``, the previous scale.
        algorithm: ``"max"`` or ``"most_recent"``.
        dtype: element dtype, ``torch.float8_e4m3fn`` (the default) or ``torch.float8_e5m2``.
        power_of_two: round the scale down to a power of two.
        margin: powers of two of headroom.

    Returns:
        float32 ``[G]``, for ``scale=`` of ``group_quantize``.

    Raises:
        TypeError, ValueError: arguments that do not fit, such as a history of another number of groups.
    """
    options: dict[str, Any] = {"algorithm": algorithm, "dtype": dtype, "power_of_two": power_of_two, "margin": margin}
    return _op(history, scale, **options)


def fp8_update_history_(amax: Tensor, history: Tensor) -> Tensor:
    """Prepend ``amax`` to ``history`` and drop its oldest entry, in place.

    Args:
        amax: float32 ``[G]``, from ``group_quantize``.
        history: float32 ``[L, G]``, most recent first; shares no memory with ``amax``.

    Returns:
        ``history``.

    Raises:
        TypeError, ValueError: a history that does not belong to as many groups as ``amax``.
    """
    _op_update(amax, history)
    return history
