"""``tgl::group_quantize``: rows in groups (or a stack of matrices) to a quantised format, in one or both directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import memory, quantized
from ..meta.quantized import OUT_NAMES, Components, Options
from . import _quantize_cpu
from ._library import define
from ._quantize_cpu import QUANTIZE

NAME = "group_quantize"
_ARGS = "Tensor x, Tensor? offs, Tensor? scale=None, Tensor? row_scale=None, Tensor? rng=None"
_OPTIONS = (
    "str format, bool rowwise=True, bool columnwise=True, ScalarType? dtype=None, "
    'str scaling="rceil", str scale_layout="compact", bool? power_of_two=None, float eps=0., bool block_2d=False, '
    "bool rht=False, bool dbias=False"
)
_BUFFERS = ", ".join(f"Tensor({alias}!) {name}" for alias, name in zip("abcdefg", OUT_NAMES))

# --- kernels ----------------------------------------------------------------------------------------------------------


def _kernel(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    **keywords: Any,
) -> Components:
    options = Options(**keywords).resolved(NAME)
    out = quantized.group_quantize(x, offs, scale, row_scale, rng, options=options).empty()
    _run(x, offs, scale, row_scale, rng, None, options, out)
    return out


def _kernel_out(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    noop: Tensor | None = None,
    **keywords: Any,
) -> None:
    out, options = _check_out(x, offs, scale, row_scale, rng, noop, **keywords)
    operands = {"x": x, "offs": offs, "scale": scale, "row_scale": row_scale, "rng": rng, "noop": noop}
    for name, buffer in zip(OUT_NAMES, out):
        if buffer.numel():
            memory.writable(NAME, name, buffer, **operands)
        operands[name] = buffer
    _run(x, offs, scale, row_scale, rng, noop, options, out)


def _check_out(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    noop: Tensor | None = None,
    **keywords: Any,
) -> tuple[Components, Options]:
    out = Components(*(keywords.pop(name) for name in OUT_NAMES))
    options = Options(**keywords).resolved(NAME)
    quantized.group_quantize_out(x, offs, scale, row_scale, rng, noop, options=options, out=out)
    return out, options


def _run(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    rng: Tensor | None,
    noop: Tensor | None,
    options: Options,
    out: Components,
) -> None:
    if offs is not None:
        debug.check_offs(NAME, offs, x.shape[0])
    backends.run(NAME, x.device, x, offs, scale, row_scale, rng, noop, options=options, out=out)


def _steps_of_aten(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    rng: Tensor | None,
    noop: Tensor | None,
    *,
    options: Options,
    out: Components,
) -> None:
    if noop is not None and noop.any():
        return
    if options.dbias:
        assert offs is not None
        _quantize_cpu.dbias(x, offs, row_scale, out=out.dbias)
    QUANTIZE[options.format](x, offs, scale, row_scale, rng, options=options, out=out)


# --- registration -----------------------------------------------------------------------------------------------------


def _fake(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    **keywords: Any,
) -> Components:
    options = Options(**keywords).resolved(NAME)
    return quantized.group_quantize(x, offs, scale, row_scale, rng, options=options).empty()


def _fake_out(*args: Any, **keywords: Any) -> None:
    _check_out(*args, **keywords)


_ADVICE = "tgl.quantize makes a GroupedTensor through which gradients pass; or use torch.no_grad()"
_op = define(
    f"{NAME}({_ARGS}, *, {_OPTIONS}) -> ({', '.join(f'Tensor {name}' for name in Components._fields)})",
    _kernel,
    _fake,
    no_derivative=_ADVICE,
)
_op_out = define(
    f"{NAME}.out({_ARGS}, Tensor? noop=None, *, {_OPTIONS}, {_BUFFERS}) -> ()",
    _kernel_out,
    _fake_out,
    no_derivative=_ADVICE,
)


def _call(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    noop: Tensor | None = None,
    *,
    out: Components | None = None,
    **keywords: Any,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    options = Options(**keywords).resolved(NAME)
    if out is None:
        out = quantized.group_quantize(x, offs, scale, row_scale, rng, options=options).meta()
    else:
        quantized.group_quantize_out(x, offs, scale, row_scale, rng, noop, options=options, out=out)
    return x.device, (x, offs, scale, row_scale, rng, noop), {"options": options, "out": out}


backends.describe_op(NAME, _call)
backends.add(backends.Implementation(NAME, "steps of aten", "cpu", _steps_of_aten))


def group_quantize(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    rng: Tensor | None = None,
    noop: Tensor | None = None,
    *,
    format: str,
    rowwise: bool = True,
    columnwise: bool = True,
    dtype: torch.dtype | None = None,
    scaling: str = "rceil",
    scale_layout: str = "compact",
    power_of_two: bool | None = None,
    eps: float | None = None,
    block_2d: bool = False,
    rht: bool = False,
    dbias: bool = False,
    out: Components | None = None,
) -> Components:
    """Quantise."""
    options: dict[str, Any] = {
        "format": format,
        "rowwise": rowwise,
        "columnwise": columnwise,
        "dtype": dtype,
        "scaling": scaling,
        "scale_layout": scale_layout,
        "power_of_two": power_of_two,
        "block_2d": block_2d,
        "rht": rht,
        "dbias": dbias,
    }
    if eps is not None:  # a float default would make Dynamo compile twice under dynamic=True
        options["eps"] = eps
    if out is None:
        if noop is not None:
            raise ValueError(f"tgl::{NAME}: `noop` must be None without `out`, but got a tensor")
        return Components(*_op(x, offs, scale, row_scale, rng, **options))
    _op_out(x, offs, scale, row_scale, rng, noop, **options, **dict(zip(OUT_NAMES, out)))
    return out
