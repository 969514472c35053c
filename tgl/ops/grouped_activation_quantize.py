"""``tgl::grouped_activation_quantize``: the expert's activation, returned only in quantised form."""

from __future__ import annotations

import functools
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..meta import scaled
from ..meta.components import Components
from ..meta.quantized import Options
from ._define import define
from .grouped_activation import SCHEMA, Params
from .grouped_gemm_scaled import ADVICE

NAME = "grouped_activation_quantize"
_OPTIONS = (
    "str format, bool rowwise=True, bool columnwise=True, ScalarType? dtype=None, "
    'str scaling="rceil", str scale_layout="compact", bool? power_of_two=None, float eps=0., bool rht=False'
)


@functools.lru_cache(maxsize=256)
def _options(**keywords: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    params = Params(**{name: keywords.pop(name) for name in Params._fields if name in keywords})
    options = Options(**keywords).resolved(NAME)
    return {"kind": params.kind, "options": options}, {"params": params, "options": options}


_op = define(
    f"{NAME}(Tensor x, Tensor offs, Tensor? probs=None, Tensor? scale=None, *, {_OPTIONS}, {SCHEMA}) -> "
    f"({', '.join(f'Tensor {name}' for name in Components._fields[:-1])})",
    scaled.grouped_activation_quantize,
    rows={"x": "rows", "probs": "vector"},
    options=_options,
    destinations=("out",),
    results=itemgetter(slice(0, -1)),
    no_derivative=ADVICE,
)


def grouped_activation_quantize(
    x: Tensor,
    offs: Tensor,
    probs: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    format: str,
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
) -> Components:
    """Apply the expert's activation to routed rows, times a probability per row, and quantise the result.

    Equal to the byte to ``group_quantize(grouped_activation(x, offs, probs, ...), offs, scale, ...)``. As one op, a
    kernel need not write the activation to memory. Not differentiable; ``GroupedMLP(recipe=...)`` is.

    Args:
        x, offs, probs, kind, interleaved, limit, alpha, offset: see ``grouped_activation``.
        scale, format, rowwise, columnwise, dtype, scaling, scale_layout, power_of_two, eps, rht: see
            ``group_quantize``.

    Returns:
        ``Components`` of ``[T, I]``; ``dbias`` is empty.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    options: dict[str, Any] = {
        "format": format,
        "rowwise": rowwise,
        "columnwise": columnwise,
        "dtype": dtype,
        "scaling": scaling,
        "scale_layout": scale_layout,
        "power_of_two": power_of_two,
        "rht": rht,
        "kind": kind,
        "interleaved": interleaved,
    }
    # None rather than a float default, which would make Dynamo compile twice under dynamic=True.
    constants = {"eps": eps, "limit": limit, "alpha": alpha, "offset": offset}
    options |= {name: value for name, value in constants.items() if value is not None}
    parts = _op(x, offs, probs, scale, **options)
    return Components._make((*parts, x.new_empty(0, dtype=torch.float32)))
