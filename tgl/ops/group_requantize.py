"""``tgl::group_requantize``: columnwise components from rowwise ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import quantized
from ..meta.components import Components, SizedComponents
from ..meta.quantized import Options
from ..meta.remembered import remembered
from ._library import register

NAME = "group_requantize"

# --- kernels ----------------------------------------------------------------------------------------------------------


def _options(data_dtype: torch.dtype, **keywords: Any) -> Options:
    given = {name: value for name, value in keywords.items() if value is not None}
    return Options(rowwise=False, columnwise=True, **{"dtype": data_dtype, **given}).resolved(NAME)


def _specs(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None = None, **keywords: Any
) -> tuple[Options, SizedComponents]:
    options = _options(data.dtype, **keywords)
    return options, quantized.group_requantize(data, scale, offs, amax, options=options)


def _split(*, data_dtype: torch.dtype, **keywords: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    options = {"options": _options(data_dtype, **keywords)}
    return options, options


_FLOATS = frozenset({"eps"})
_checked = remembered(
    quantized.group_requantize,
    {"data": "contiguous rows", "scale": "tokens"},
    quantized.group_requantize_moves,
    _split,
    _FLOATS,
    NAME,
)
_checked_matrices = remembered(quantized.group_requantize, split=_split, floats=_FLOATS, op=NAME)


def _kernel(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None = None, **keywords: Any
) -> tuple[Tensor, Tensor, Tensor]:
    check = _checked if offs is not None else _checked_matrices
    specs, given, kept = check(data, scale, offs, amax, data_dtype=data.dtype, **keywords)
    if debug.active and offs is not None:
        debug.check_offs(NAME, offs, data.shape[0])
    made: Components = backends.produce(NAME, data.device, specs, [data, scale, offs, amax], given, kept)
    return made[3:6]


# --- registration -----------------------------------------------------------------------------------------------------

_op = register(
    f"{NAME}(Tensor data, Tensor scale, Tensor? offs, Tensor? amax=None, *, str format, ScalarType? dtype=None, "
    'str scaling="rceil", str scale_layout="compact", bool? power_of_two=None, float eps=0., bool block_2d=False, '
    "bool rht=False) -> (Tensor columnwise_data, Tensor columnwise_scale, Tensor columnwise_amax)",
    _kernel,
    lambda *args, **keywords: _specs(*args, **keywords)[1].empty()[3:6],
    no_derivative="it only changes the form of a quantised operand; use torch.no_grad()",
)


def _call(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None = None, **keywords: Any
) -> tuple[torch.device, tuple, dict[str, Any]]:
    options, specs = _specs(data, scale, offs, amax, **keywords)
    return data.device, (data, scale, offs, amax), {"options": options, "out": specs.meta()}


backends.describe_op(NAME, _call)


def group_requantize(
    data: Tensor,
    scale: Tensor,
    offs: Tensor | None,
    amax: Tensor | None = None,
    *,
    format: str,
    dtype: torch.dtype | None = None,
    scaling: str = "rceil",
    scale_layout: str = "compact",
    power_of_two: bool | None = None,
    eps: float | None = None,
    block_2d: bool = False,
    rht: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Make columnwise components of a quantised operand from its rowwise ones.

    The result is that of ``group_quantize`` with ``rowwise=False`` on the dequantised values in float32. It is for
    operands whose high-precision values are no longer available, and rounds a second time.

    Args:
        data, scale, offs, amax: rowwise components, as for ``group_dequantize``.
        format, scale_layout, block_2d: options of the rowwise components and of the result.
        dtype: element dtype of the result; default that of ``data``.
        scaling, power_of_two, eps, rht: as for ``group_quantize``.

    Returns:
        ``columnwise_data``, ``columnwise_scale``, ``columnwise_amax``.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: an argument requires grad.
    """
    options: dict[str, Any] = {
        "format": format,
        "dtype": dtype,
        "scaling": scaling,
        "scale_layout": scale_layout,
        "power_of_two": power_of_two,
        "block_2d": block_2d,
        "rht": rht,
    }
    if eps is not None:  # a float default would make Dynamo compile twice under dynamic=True
        options["eps"] = eps
    return _op(data, scale, offs, amax, **options)
