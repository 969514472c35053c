"""CPU implementations of ``group_quantize`` and ``group_dequantize``, one module per format family.

Every module has two functions:

``quantize(x, offs, scale, row_scale, rng, *, options, out) -> None``
    ``x`` is ``[T, K]`` with ``offs``, or ``[G, N, K]`` with ``offs=None``, float32, bfloat16 or float16, in any layout
    with a unit stride (or expanded). ``options`` is a resolved ``meta.quantized.Options``, ``out`` the ``Components``
    to write; all arguments have been checked. Writes every byte of every component that is not ``[0]``, zeros in tails
    and padding included, except ``out.dbias``, which the caller writes. Values in x's tail are not read.

``dequantize(data, scale, offs, amax, *, options, out) -> None``
    ``data`` and ``scale`` are the rowwise components, or the columnwise ones if ``options.columnwise``, and ``amax``
    the one beside them. ``options`` is a ``meta.quantized.DequantizeOptions``. Writes all of ``out``, ``[T, K]`` or
    ``[G, N, K]`` in x's order, zeros in the tail.

``offs`` lies on the host, so it may be read (``_rows.Groups``); bad values must not lead out of bounds. Work is done in
steps of rows that fit the cache, through buffers that every step reuses (and, if they are small, the next call of the
same thread), so that memory beyond ``out`` does not grow with T. There is no Python loop over rows or blocks, and one
over groups only to say where each begins. ``row_scale`` multiplies rows when they are loaded (``_rows.Rows``), rounded
to x's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

from . import fp8, mxfp8, nvfp4
from ._dbias import dbias

__all__ = ["DEQUANTIZE", "QUANTIZE", "dbias"]

QUANTIZE: dict[str, Callable[..., None]] = {
    "mxfp8": mxfp8.quantize,
    "nvfp4": nvfp4.quantize,
    "fp8_tensor": fp8.quantize_tensor,
    "fp8_block": fp8.quantize_block,
}
DEQUANTIZE: dict[str, Callable[..., None]] = {
    "mxfp8": mxfp8.dequantize,
    "nvfp4": nvfp4.dequantize,
    "fp8_tensor": fp8.dequantize_tensor,
    "fp8_block": fp8.dequantize_block,
}
