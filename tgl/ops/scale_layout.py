"""``tgl::scale_to_layout`` and ``tgl::scale_from_layout``: convert scales to other libraries' layouts, and back.

A layout is a map of offsets (``meta.scale_layout``), computed on the device: the first op scatters through it, the
second gathers. They only move bytes, so a round trip returns the same bytes. The first can also gather scales of tokens
by an index of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import scale_layout
from ..meta.remembered import remembered
from ._library import register
from ._rows import given

TO, FROM = "scale_to_layout", "scale_from_layout"
_OPTIONS = "SymInt[] shape, str layout, str format, bool columnwise=False, bool block_2d=False"
_ADVICE = "scales are not differentiated; detach them or use torch.no_grad()"


_remembered = remembered(scale_layout.scales)


# --- registration -----------------------------------------------------------------------------------------------------


def _define(name: str) -> torch._ops.OpOverload:
    def spec(scales: scale_layout.Scales) -> Any:
        return scales.other if name == TO else scales.compact

    def checked(
        check: Callable[..., scale_layout.Scales],
        scale: Tensor,
        offs: Tensor | None,
        rows: Tensor | None,
        *,
        shape: Sequence[int],
        **options: Any,
    ) -> scale_layout.Scales:
        given = "compact" if name == TO else options["layout"]
        return check(name, scale, offs, tuple(shape), given=given, rows=rows, **options)

    def kernel(scale: Tensor, offs: Tensor | None, rows: Tensor | None = None, **keywords: Any) -> Tensor:
        scales = checked(_remembered, scale, offs, rows, **keywords)
        out = spec(scales).empty()
        if debug.active and rows is not None and offs is not None:
            debug.check_offs(name, offs, rows.shape[0])
            debug.check_rows(name, "rows", rows, offs, scale)
        backends.run(name, scale.device, scale, offs, scales=scales, out=out, **given(rows=rows))
        return out

    def fake(scale: Tensor, offs: Tensor | None, rows: Tensor | None = None, **keywords: Any) -> Tensor:
        return spec(checked(scale_layout.scales, scale, offs, rows, **keywords)).empty()

    def call(
        scale: Tensor, offs: Tensor | None, rows: Tensor | None = None, **keywords: Any
    ) -> tuple[torch.device, tuple, dict[str, Any]]:
        scales = checked(scale_layout.scales, scale, offs, rows, **keywords)
        return scale.device, (scale, offs), {"scales": scales, "out": spec(scales).meta(), **given(rows=rows)}

    tensors = "Tensor scale, Tensor? offs" + (", Tensor? rows=None" if name == TO else "")
    op = register(f"{name}({tensors}, *, {_OPTIONS}) -> Tensor", kernel, fake, no_derivative=_ADVICE)
    backends.describe_op(name, call)
    return op


_to = _define(TO)
_from = _define(FROM)


def to_blocked_scale(
    scale: Tensor,
    offs: Tensor | None,
    rows: Tensor | None = None,
    *,
    shape: Sequence[int],
    format: str,
    columnwise: bool = False,
) -> Tensor:
    """Convert compact scales to those of ``group_quantize(scale_layout="blocked")``.

    With ``rows`` the input has scales of tokens, and row t of the groups gets those of token ``rows[t]``. MXFP8's
    rowwise scales depend on a single row: for tokens ``[S, K]`` quantised as one group, this function gives the scales
    of ``group_quantize(x, offs, rows=rows)`` and ``dispatch`` the data.

    Args:
        scale: a compact ``scale`` or ``columnwise_scale`` of ``group_quantize``; with ``rows`` a ``scale``
            ``[S, ceil(K / block)]``, with any S.
        offs: int32 ``[G]`` cumulative group ends; None for weights. Not read on the host.
        rows: int32 ``[T]``, see ``grouped_gemm``: the token of every row of the groups, such as ``tgl.Routing.token``.
            An index outside ``[0, S)`` gives scales of zero. Only with ``offs``, and not with ``columnwise``.
        shape: ``(T, K)`` of the quantised rows in groups, or ``(G, N, K)`` of the weights.
        format: ``"mxfp8"``, ``"nvfp4"`` or ``"mxfp4"``.
        columnwise: whether ``scale`` is the columnwise component.

    Returns:
        uint8 ``[bytes]``, for weights ``[G, bytes]``; zero in the padding.

    Raises:
        TypeError, ValueError: arguments that do not fit together.
    """
    return _to(scale, offs, rows, shape=shape, layout="blocked", format=format, columnwise=columnwise)


def from_blocked_scale(
    scale: Tensor, offs: Tensor | None, *, shape: Sequence[int], format: str, columnwise: bool = False
) -> Tensor:
    """Invert ``to_blocked_scale``; the scales of the tail are zero.

    Args:
        scale: result of ``to_blocked_scale``; the other arguments and the errors are those of that function.

    Returns:
        The compact scales of ``group_quantize``.
    """
    return _from(scale, offs, shape=shape, layout="blocked", format=format, columnwise=columnwise)


def to_torch_scale_layout(
    scale: Tensor, offs: Tensor | None, *, shape: Sequence[int], format: str, columnwise: bool = False
) -> Tensor:
    """Convert compact scales to the layout of ``torch.nn.functional.scaled_grouped_mm`` (``SWIZZLE_32_4_4``).

    Every group is blocked on its own, with its rows padded to 128 and its columns to 4; the groups follow one another.
    Arguments and errors as for ``to_blocked_scale``.

    Returns:
        uint8, zero in the padding: rowwise ``[T + 128 G, columns]``; columnwise ``[rows, ceil(T / block) + 4 G]``; for
        weights ``[G, bytes]``.
    """
    return _to(scale, offs, shape=shape, layout="torch", format=format, columnwise=columnwise)


def from_torch_scale_layout(
    scale: Tensor, offs: Tensor | None, *, shape: Sequence[int], format: str, columnwise: bool = False
) -> Tensor:
    """Invert ``to_torch_scale_layout``; the scales of the tail are zero.

    Args:
        scale: result of ``to_torch_scale_layout``; the other arguments and the errors are those of that function.

    Returns:
        The compact scales of ``group_quantize``.
    """
    return _from(scale, offs, shape=shape, layout="torch", format=format, columnwise=columnwise)


def to_te_scale_layout(
    scale: Tensor,
    offs: Tensor | None,
    *,
    shape: Sequence[int],
    format: str,
    columnwise: bool = False,
    block_2d: bool = False,
    swizzled: bool = False,
) -> Tensor:
    """Convert compact scales to the flat scale buffer of TransformerEngine's ``GroupedTensor``.

    The groups' scale matrices follow one another, each padded as by ``get_scale_shape`` of the format's quantizer: to
    128 x 4 for MXFP8 and NVFP4 (columnwise MXFP8 4 x 128), the inner dimension to 4 for FP8 blockwise. The buffer is
    large enough for all possible group sizes; TransformerEngine's own contains just the matrices.

    Args:
        scale, offs, shape, columnwise: as for ``to_blocked_scale``.
        format: ``"mxfp8"``, ``"nvfp4"``, ``"mxfp4"`` (not in layout ``"te"``) or ``"fp8_block"``.
        block_2d: the blocks are 128 x 128 (``fp8_block`` weights).
        swizzled: each matrix is blocked, as with ``optimize_for_gemm`` (``"mxfp8"``, ``"nvfp4"``).

    Returns:
        ``[bytes]`` of uint8, or ``[values]`` of float32 for ``"fp8_block"``, zero in the padding.

    Raises:
        TypeError, ValueError: arguments that do not fit together.
    """
    layout = "te_swizzled" if swizzled else "te"
    return _to(scale, offs, shape=shape, layout=layout, format=format, columnwise=columnwise, block_2d=block_2d)


def from_te_scale_layout(
    scale: Tensor,
    offs: Tensor | None,
    *,
    shape: Sequence[int],
    format: str,
    columnwise: bool = False,
    block_2d: bool = False,
    swizzled: bool = False,
) -> Tensor:
    """Invert ``to_te_scale_layout``; the scales of the tail are zero.

    Args:
        scale: result of ``to_te_scale_layout``; the other arguments and the errors are those of that function.

    Returns:
        The compact scales of ``group_quantize``.
    """
    layout = "te_swizzled" if swizzled else "te"
    return _from(scale, offs, shape=shape, layout=layout, format=format, columnwise=columnwise, block_2d=block_2d)
