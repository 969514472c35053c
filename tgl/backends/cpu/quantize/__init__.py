"""CPU implementations of ``group_quantize`` and ``group_dequantize``, one module per format family.

Every format has two functions:

``quantize(source, options, out) -> None``
    ``source`` is a ``_rows.Source``. Its ``x`` is ``[T, K]`` with ``offs``, or ``[G, N, K]`` with ``offs=None``,
    float32, bfloat16 or float16, at any strides; with ``slots`` it is ``[S, N, K]``,
    and group g has the matrix ``slots[g]``. Rows by an index come as an ``Indexed`` of that shape ``[T, K]``, of which
    steps of rows are put in order one at a time. ``options`` is a resolved ``meta.quantized.Options``, ``out`` the
    ``Components`` to write; all arguments have been checked. Writes every byte of every component that is not ``[0]``,
    zeros in tails and padding included, except ``out.dbias``, which the caller writes. Values in x's tail are not read.

``dequantize(data, scale, offs, amax, *, options, out) -> None``
    ``data`` and ``scale`` are the rowwise components, or the columnwise ones if ``options.columnwise``, and ``amax``
    the one beside them. ``options`` is a ``meta.quantized.DequantizeOptions``. Writes all of ``out``, ``[T, K]`` or
    ``[G, N, K]`` in x's order, zeros in the tail.

``offs`` and ``slots`` lie on the host, so they may be read (``_rows.Groups``, ``_rows.Float32Rows``); bad values must
not lead out of bounds. Work is done in steps of rows that fit the cache, through buffers that every step reuses (and,
if they are small, the next call of the same thread), so that memory beyond ``out`` does not grow with T. There is no
Python loop over rows or blocks, and one over groups only to say where each begins. ``row_scale`` multiplies rows when
they are loaded (``_rows.Float32Rows``), rounded to x's dtype. ``tgl.backends.cpu`` and ``tgl.backends.composite``
import this package.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ....meta.components import Components
from ....meta.formats import FORMATS
from ....meta.quantized import DequantizeOptions, Options
from ....meta.table import OnePerName
from ...portable.group_factors import no_factors, of_amaxes, of_scales
from ...portable.indexed import indexed
from . import fp8, mxfp4, mxfp8, nvfp4
from ._dbias import dbias
from ._rows import Source

__all__ = ["DEQUANTIZE", "GROUP_FACTORS", "QUANTIZE", "dbias", "group_dequantize", "group_quantize"]

QUANTIZE: OnePerName[Callable[..., None]] = OnePerName(
    FORMATS,
    "QUANTIZE in tgl/backends/cpu/quantize/__init__.py",
    {
        "mxfp8": mxfp8.quantize,
        "nvfp4": nvfp4.quantize,
        "mxfp4": mxfp4.quantize,
        "fp8_tensor": fp8.quantize_tensor,
        "fp8_block": fp8.quantize_block,
    },
)
DEQUANTIZE: OnePerName[Callable[..., None]] = OnePerName(
    FORMATS,
    "DEQUANTIZE in tgl/backends/cpu/quantize/__init__.py",
    {
        "mxfp8": mxfp8.dequantize,
        "nvfp4": nvfp4.dequantize,
        "mxfp4": mxfp4.dequantize,
        "fp8_tensor": fp8.dequantize_tensor,
        "fp8_block": fp8.dequantize_block,
    },
)

GROUP_FACTORS: OnePerName[Callable[..., Tensor | None]] = OnePerName(
    FORMATS,
    "GROUP_FACTORS in tgl/backends/cpu/quantize/__init__.py",
    {
        "mxfp8": no_factors,
        "nvfp4": of_amaxes,
        "mxfp4": no_factors,
        "fp8_tensor": of_scales,
        "fp8_block": no_factors,
    },
)
"""On any device, ``group_factors(a_scale, b_scale, a_amax, b_amax)``: see ``portable.group_factors``."""


def group_quantize(
    x: Tensor,
    offs: Tensor | None,
    scale: Tensor | None,
    row_scale: Tensor | None,
    rng: Tensor | None,
    noop: Tensor | None,
    *,
    options: Options,
    out: Components,
    slots: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    if noop is not None and noop.any():
        return
    operand = indexed(x, rows)
    quantize = QUANTIZE[options.format]
    if options.dbias:
        assert offs is not None
        dbias(operand, offs, row_scale, out=out.dbias)
    quantize(Source(operand, offs, scale, row_scale, rng, slots), options, out)


def group_dequantize(
    data: Tensor, scale: Tensor, offs: Tensor | None, amax: Tensor | None, *, options: DequantizeOptions, out: Tensor
) -> None:
    DEQUANTIZE[options.format](data, scale, offs, amax, options=options, out=out)
