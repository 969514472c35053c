"""``tgl::group_requantize``: columnwise components from rowwise ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import quantized
from ..meta.quantized import Components, ComponentSpecs, DequantizeOptions, Options
from ..meta.specs import TensorSpec
from ._library import define

NAME = "group_requantize"
_OPS = ("group_dequantize", "group_quantize")

# --- kernels ----------------------------------------------------------------------------------------------------------


def _specs(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None = None, **keywords: Any
) -> tuple[Options, ComponentSpecs]:
    options = Options(rowwise=False, columnwise=True, **{"dtype": data.dtype, **_given(keywords)}).resolved(NAME)
    return options, quantized.group_requantize(data, scale, offs, amax, options=options)


def _given(keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if value is not None}


def _kernel(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None = None, **keywords: Any
) -> tuple[Tensor, Tensor, Tensor]:
    options, specs = _specs(data, scale, offs, amax, **keywords)
    out = specs.empty()
    if offs is not None:
        debug.check_offs(NAME, offs, data.shape[0])
    backends.run(NAME, data.device, data, scale, offs, amax, options=options, out=out)
    return out[3:6]


class _Steps(NamedTuple):
    """The arguments of the two ops that make a result: of ``group_dequantize``, and of ``group_quantize``."""

    dequantize: tuple[tuple, dict[str, Any]]
    quantize: tuple[tuple, dict[str, Any]]


def _steps(
    data: Tensor,
    scale: Tensor,
    offs: Tensor | None,
    amax: Tensor | None,
    options: Options,
    out: Components,
    allocate: Callable[[TensorSpec], Tensor],
) -> _Steps:
    read = DequantizeOptions(options.format, False, options.scale_layout, options.block_2d)
    wide = allocate(quantized.group_dequantize(data, scale, offs, amax, options=read, out_dtype=torch.float32, op=NAME))
    return _Steps(
        ((data, scale, offs, amax), {"options": read, "out": wide}),
        ((wide, offs, None, None, None, None), {"options": options, "out": out}),
    )


def _through_float32(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: Options, out: Components
) -> None:
    for op, (args, keywords) in zip(_OPS, _steps(data, scale, offs, amax, options, out, TensorSpec.empty)):
        backends.run(op, data.device, *args, **keywords)


def _supports(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: Options, out: Components
) -> backends.Reason:
    steps = zip(_OPS, _steps(data, scale, offs, amax, options, out, TensorSpec.meta))
    reasons = (backends.reason_against(op, data.device, *args, **keywords) for op, (args, keywords) in steps)
    return next(filter(None, reasons), None)


def _prepare(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: Options, out: Components
) -> None:
    for op, (args, keywords) in zip(_OPS, _steps(data, scale, offs, amax, options, out, TensorSpec.empty)):
        backends.prepare(op, data.device, *args, **keywords)


# --- registration -----------------------------------------------------------------------------------------------------

_op = define(
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
for _device in ("cpu", "cuda"):
    backends.add(
        backends.Implementation(
            NAME,
            "through float32",
            _device,
            _through_float32,
            _supports,
            note="group_dequantize into a float32 [T, K], group_quantize",
            prepare=_prepare,
        )
    )


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

    What ``group_quantize`` with ``rowwise=False`` makes of the float32 values the rowwise components stand for: for
    operands whose high-precision original is gone. Rounds a second time.

    Args:
        data, scale, offs, amax: rowwise components, as for ``group_dequantize``.
        format, scale_layout, block_2d: what they are; the result is the same.
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
