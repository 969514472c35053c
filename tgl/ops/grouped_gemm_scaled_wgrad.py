"""``tgl::grouped_gemm_scaled_wgrad`` and its accumulating form: weight gradients of quantised operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import memory, scaled
from ..meta.formats import FORMATS
from ..meta.remembered import remembered
from ._define import Out, describe, describe_in_place
from ._library import autocast_nothing, register
from ._requested_gradients import define_requested
from ._signature import OpSignature
from .allocate_wgrad import aligned
from .grouped_gemm_scaled import ADVICE

NAME = "grouped_gemm_scaled_wgrad"
ACCUMULATE = "grouped_gemm_scaled_wgrad_accumulate_"
_ARGS = "Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offs, Tensor? a_amax=None, Tensor? b_amax=None"
_OPTIONS = 'str format, str scale_layout="compact"'


_TRANSPOSED = frozenset(name for name, form in FORMATS.items() if form.transposed_columnwise)
_SCALES = {"a_scale": "tokens", "b_scale": "tokens"}


def _options(*, format: str, scale_layout: str = "compact", **of_result: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    made_with = {"format": format, "scale_layout": scale_layout}
    return made_with | of_result, made_with


def _remembered(name: str, check: Callable[..., Any]) -> dict[bool, Callable[..., Any]]:
    """Return ``check`` remembered separately for row-major and for transposed data."""
    how: dict[str, Any] = {"moves": scaled.grouped_gemm_scaled_wgrad_moves, "split": _options, "op": name}
    by_rows = remembered(check, {"a": "contiguous rows", "b": "contiguous rows", **_SCALES}, **how)
    return {False: by_rows, True: remembered(check, {"a": "transposed", "b": "transposed", **_SCALES}, **how)}


_checked = _remembered(NAME, scaled.grouped_gemm_scaled_wgrad)
_checked_out = _remembered(f"{NAME}.out", scaled.grouped_gemm_scaled_wgrad_out)
_checked_accumulate = _remembered(ACCUMULATE, scaled.grouped_gemm_scaled_wgrad_accumulate_)

# --- kernels ----------------------------------------------------------------------------------------------------------


def _kernel(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    *,
    format: str,
    alignment: int | None = None,
    **options: Any,
) -> Tensor:
    operands = [a, a_scale, b, b_scale, offs, a_amax, b_amax]
    if alignment is not None:
        options["alignment"] = alignment
    spec, given, kept = _checked[format in _TRANSPOSED](*operands, format=format, **options)
    if debug.active:
        _check_offs(NAME, operands, format)
    if alignment is None:
        made: Tensor = backends.produce(NAME, a.device, spec, operands, given, kept, accumulate=False)
        return made
    out = aligned(spec, alignment)
    backends.run(NAME, a.device, *operands, **given, accumulate=False, out=out)
    return out


def _kernel_out(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    *,
    format: str,
    scale_layout: str = "compact",
    out: Tensor,
) -> None:
    operands = (a, a_scale, b, b_scale, offs, a_amax, b_amax)
    _checked_out[format in _TRANSPOSED](*operands, format=format, scale_layout=scale_layout, out=out)
    memory.writable(NAME, "out", out, **dict(zip(scaled.GEMM_OPERANDS, operands)))
    _run(NAME, operands, format, scale_layout, out, accumulate=False)


def _kernel_accumulate(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    main_grad: Tensor,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    format: str,
    scale_layout: str = "compact",
    overwrite: bool = False,
) -> None:
    operands = (a, a_scale, b, b_scale, offs, a_amax, b_amax)
    table = {} if slots is None else {"slots": slots}
    options: dict[str, Any] = {"format": format, "scale_layout": scale_layout}
    check = _checked_accumulate[format in _TRANSPOSED]
    check(*operands[:5], main_grad, a_amax, b_amax, *table.values(), **options)
    memory.writable(ACCUMULATE, "main_grad", main_grad, **dict(zip(scaled.GEMM_OPERANDS, operands)), **table)
    debug.check_slots(ACCUMULATE, slots, "main_grad", main_grad, written=True)
    _run(ACCUMULATE, operands, format, scale_layout, main_grad, accumulate=not overwrite, **table)


def _check_offs(op: str, operands: Sequence, format: str) -> None:
    offs = operands[4]
    debug.check_offs(op, offs, int(scaled.most_tokens(operands[0], offs.shape[0], format)))


def _run(
    op: str, operands: tuple, format: str, scale_layout: str, out: Tensor, *, accumulate: bool, **table: Tensor
) -> None:
    if debug.active:
        _check_offs(op, operands, format)
    device = operands[0].device
    options: dict[str, Any] = {"format": format, "scale_layout": scale_layout, "accumulate": accumulate}
    backends.run(op, device, *operands, **options, out=out, **table)


# --- registration -----------------------------------------------------------------------------------------------------

_SCHEMA = f"{NAME}({_ARGS}, *, {_OPTIONS}, ScalarType? out_dtype=None, int? alignment=None) -> Tensor"
_op = register(
    _SCHEMA,
    _kernel,
    lambda *operands, **options: scaled.grouped_gemm_scaled_wgrad(*operands, **options).empty(),
    no_derivative=ADVICE,
    autocast=autocast_nothing,
)
_op_out = register(
    f"{NAME}.out({_ARGS}, *, {_OPTIONS}, Tensor(a!) out) -> ()",
    _kernel_out,
    scaled.grouped_gemm_scaled_wgrad_out,
    no_derivative=ADVICE,
    autocast=autocast_nothing,
)
_ACCUMULATE_SCHEMA = (
    f"{ACCUMULATE}({_ARGS.replace('offs', 'offs, Tensor(a!) main_grad', 1)}, Tensor? slots=None, *, {_OPTIONS}, "
    "bool overwrite=False) -> ()"
)
_op_accumulate = register(
    _ACCUMULATE_SCHEMA,
    _kernel_accumulate,
    scaled.grouped_gemm_scaled_wgrad_accumulate_,
    no_derivative=ADVICE,
    autocast=autocast_nothing,
)
define_requested(_ACCUMULATE_SCHEMA, _op_accumulate, scaled.grouped_gemm_scaled_wgrad_accumulate_)


def _described(*, overwrite: bool = True, **keywords: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``_options``, and for implementations whether they accumulate."""
    for_check, made_with = _options(**keywords)
    return for_check, {**made_with, "accumulate": not overwrite}


backends.describe_op(
    NAME,
    describe(
        OpSignature.of(_SCHEMA),
        scaled.grouped_gemm_scaled_wgrad,
        _described,
        out=Out(scaled.grouped_gemm_scaled_wgrad_out),
    ),
)
backends.describe_op(
    ACCUMULATE,
    describe_in_place(
        _ACCUMULATE_SCHEMA,
        scaled.grouped_gemm_scaled_wgrad_accumulate_,
        "main_grad",
        ("slots",),
        lambda overwrite=False, **keywords: _described(overwrite=overwrite, **keywords),
    ),
)


def grouped_gemm_scaled_wgrad(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    *,
    format: str,
    scale_layout: str = "compact",
    out_dtype: torch.dtype | None = None,
    alignment: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return for every group the product of its quantised rows of ``a``, transposed, and of ``b``.

    ``out[g] = a[rows of g]^T @ b[rows of g]`` of the dequantised operands (see ``grouped_gemm_scaled``), accumulated
    in float32 and rounded once; exactly zero for an empty group. The operands are columnwise components of
    ``group_quantize``, whose blocks run along the tokens of a group; ``Tp`` is the padded number of tokens for G groups
    that start on multiples of 64 (NVFP4 data and scales), 32 (FP8 data) or 128 tokens (all other scales).

    Args:
        a: MXFP8 ``[T, M]``, FP8 ``[M, Tp]``, of float8_e4m3fn or float8_e5m2; NVFP4 ``[M, Tp/2]`` uint8.
        a_scale: scales of ``a``: MXFP8 ``[Tp/32, M]`` and NVFP4 ``[M, Tp/16]`` uint8, or blocked; FP8 tensor-wise
            ``[G]`` and FP8 blockwise ``[Tp/128, M]`` float32.
        b, b_scale: like ``a`` and ``a_scale``, with N features. The element type may differ from that of ``a``.
        offs: int32 ``[G]``: cumulative group ends.
        a_amax, b_amax: float32 ``[G]``, the columnwise amax of each group, only for NVFP4.
        format: ``"mxfp8"``, ``"nvfp4"``, ``"mxfp4"``, ``"fp8_tensor"`` or ``"fp8_block"``, of both operands.
        scale_layout: ``"compact"``, or ``"blocked"`` for scales laid out for tensor cores (MXFP8, NVFP4).
        out_dtype: bfloat16 (default), float16 or float32.
        alignment: bytes, a power of two: every slot ``[g]`` of the result starts on a multiple of it, padded as by
            ``allocate_wgrad``; default: contiguous. Not with ``out``.
        out: buffer ``[G, M, N]`` of such a dtype, row-major, 16-byte aligned; slots and rows may be padded.

    Returns:
        ``[G, M, N]``, contiguous without ``alignment``; ``out`` itself if given.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    operands = (a, a_scale, b, b_scale, offs, a_amax, b_amax)
    options: dict[str, Any] = {"format": format, "scale_layout": scale_layout}
    if out is None:
        return _op(*operands, **options, out_dtype=out_dtype, alignment=alignment)
    if alignment is not None:
        raise ValueError(f"tgl::{NAME}: `alignment` must be None when `out` is given, but got {alignment}")
    if not isinstance(out, Tensor):
        raise TypeError(f"tgl::{NAME}: `out` must be a tensor or None, but got a {type(out).__name__}")
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"tgl::{NAME}: `out_dtype` must be {out.dtype} like `out`, but got {out_dtype}")
    _op_out(*operands, **options, out=out)
    return out


def grouped_gemm_scaled_wgrad_accumulate_(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offs: Tensor,
    main_grad: Tensor,
    a_amax: Tensor | None = None,
    b_amax: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    format: str,
    scale_layout: str = "compact",
    overwrite: bool = False,
) -> None:
    """Add the weight gradient of every group to ``main_grad``, in place.

    The slot of an empty group keeps its bytes. See ``grouped_gemm_scaled_wgrad`` for the other arguments.

    Args:
        main_grad: ``[G, M, N]``, float32, bfloat16 or float16, row-major (slots and rows may be padded), 16-byte
            aligned, sharing no memory with an operand; the sum is formed in float32 and rounded once.
        slots: int32 ``[G]`` on the same device, as in ``grouped_gemm_wgrad_accumulate_``: group ``g`` adds to
            ``main_grad[slots[g]]``, and ``main_grad`` is ``[S, M, N]``.
        overwrite: replace the content of ``main_grad`` instead of adding; the slot of an empty group becomes zero.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    _op_accumulate(
        a,
        a_scale,
        b,
        b_scale,
        offs,
        main_grad,
        a_amax,
        b_amax,
        slots,
        format=format,
        scale_layout=scale_layout,
        overwrite=overwrite,
    )
