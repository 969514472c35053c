"""``tgl::grouped_gemm_scaled_activation_quantize``: scaled GEMM, activation and quantisation for the second GEMM."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..meta import scaled
from ..meta.components import Components
from ..meta.quantized import Options
from ._define import define
from ._library import autocast_nothing
from .grouped_activation import SCHEMA, Params
from .grouped_gemm_scaled import ADVICE

NAME = "grouped_gemm_scaled_activation_quantize"
_ARGS = (
    "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offs, Tensor? a_amax=None, Tensor? b_amax=None, "
    "Tensor? bias=None, Tensor? probs=None, Tensor? scale=None"
)
_OPTIONS = (
    'str format, str b_direction="rowwise", bool rowwise=True, bool columnwise=True, ScalarType? dtype=None, '
    'str scaling="rceil", str scale_layout="compact", bool? power_of_two=None, float eps=0., bool rht=False, '
    f"{SCHEMA}, ScalarType? out_dtype=None"
)


@functools.lru_cache(maxsize=256)
def _options(
    *, b_direction: str = "rowwise", out_dtype: torch.dtype | None = None, **keywords: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    params = Params(**{name: keywords.pop(name) for name in Params._fields if name in keywords})
    options = Options(**keywords).resolved(NAME)
    rule = {"b_direction": b_direction, "kind": params.kind, "options": options, "out_dtype": out_dtype}
    return rule, {"b_direction": b_direction, "params": params, "options": options}


def _results(made: dict[str, Any]) -> tuple[Tensor, ...]:
    return made["h"], *made["out"][:-1]


_op = define(
    f"{NAME}({_ARGS}, *, {_OPTIONS}) -> (Tensor h, {', '.join(f'Tensor {name}' for name in Components._fields[:-1])})",
    scaled.grouped_gemm_scaled_activation_quantize,
    rows={"a": "contiguous rows", "a_scale": "tokens", "probs": "vector"},
    moves=scaled.grouped_gemm_scaled_moves,
    options=_options,
    destinations=("h", "out"),
    results=_results,
    no_derivative=ADVICE,
    autocast=autocast_nothing,
)


def grouped_gemm_scaled_activation_quantize(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    format: str,
    b_direction: str = "rowwise",
    rowwise: bool = True,
    columnwise: bool = True,
    dtype: torch.dtype | None = None,
    scaling: str = "rceil",
    scale_layout: str = "compact",
    power_of_two: bool | None = None,
    eps: float | None = None,
    rht: bool = False,
    kind: str = "swiglu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    offset: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Components]:
    """Multiply quantised rows by their group's quantised matrix, apply the expert's activation, and quantise it.

    Equal to the byte to ``h = grouped_gemm_scaled(a, a_scale, b, b_scale, offs, a_amax, b_amax, bias, ...)`` and then
    ``grouped_activation_quantize(h, offs, probs, scale, ...)``. As one op, a kernel need not read ``h`` back from
    memory. Not differentiable; ``GroupedMLP(recipe=...)`` is.

    Args:
        a, a_scale, b, b_scale, offs, a_amax, b_amax, bias, b_direction, out_dtype: see ``grouped_gemm_scaled``; N is
            ``2 I`` for the gated kinds and ``I`` for the others, with columns ordered like those of ``x`` in
            ``grouped_activation``.
        probs, kind, interleaved, limit, alpha, offset: see ``grouped_activation``.
        scale, rowwise, columnwise, dtype, scaling, power_of_two, eps, rht: see ``group_quantize``.
        format, scale_layout: format and scale layout of the operands and of the result.

    Returns:
        ``h [T, 2 I]`` (not gated, ``[T, I]``), which the activation's backward needs, and ``Components`` of
        ``[T, I]``; ``dbias`` is empty. Rows past ``offs[-1]`` are zero in both and never read.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    options: dict[str, Any] = {
        "format": format,
        "b_direction": b_direction,
        "rowwise": rowwise,
        "columnwise": columnwise,
        "dtype": dtype,
        "scaling": scaling,
        "scale_layout": scale_layout,
        "power_of_two": power_of_two,
        "rht": rht,
        "kind": kind,
        "interleaved": interleaved,
        "out_dtype": out_dtype,
    }
    # None rather than a float default, which would make Dynamo compile twice under dynamic=True.
    constants = {"eps": eps, "limit": limit, "alpha": alpha, "offset": offset}
    options |= {name: value for name, value in constants.items() if value is not None}
    h, *parts = _op(a, a_scale, b, b_scale, offs, a_amax, b_amax, bias, probs, scale, **options)
    return h, Components._make((*parts, a.new_empty(0, dtype=torch.float32)))
