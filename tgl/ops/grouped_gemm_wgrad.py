"""``tgl::grouped_gemm_wgrad`` and its accumulating form: one outer-product GEMM per group (weight gradient)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backends, debug
from ..meta import memory, specs
from ..meta.remembered import remembered
from ._define import Casts, describe_in_place
from ._library import Formula, register
from ._requested_gradients import define_requested
from ._rows import given, sum_by_index
from .allocate_wgrad import aligned

NAME = "grouped_gemm_wgrad"
ACCUMULATE = "grouped_gemm_wgrad_accumulate_"
_INDICES = "Tensor? a_rows=None, Tensor? b_rows=None"

# --- kernels ----------------------------------------------------------------------------------------------------------


_ROWS = {"a": "rows", "b": "rows"}
_INDEXED = {"a": "tokens", "b": "tokens", "a_rows": "tokens", "b_rows": "tokens"}
_spec = remembered(specs.grouped_gemm_wgrad, _ROWS)
_spec_indexed = remembered(specs.grouped_gemm_wgrad, _INDEXED)
_checked_out = remembered(specs.grouped_gemm_wgrad_out, _ROWS)
_checked_out_indexed = remembered(specs.grouped_gemm_wgrad_out, _INDEXED)
_checked_accumulate = remembered(specs.grouped_gemm_wgrad_accumulate_, _ROWS)
_checked_accumulate_indexed = remembered(specs.grouped_gemm_wgrad_accumulate_, _INDEXED)


def _kernel(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    a_rows: Tensor | None = None,
    b_rows: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    alignment: int | None = None,
) -> Tensor:
    if a_rows is not None or b_rows is not None:
        spec = _spec_indexed(a, b, offs, a_rows, b_rows, out_dtype=out_dtype, alignment=alignment)
        indices = given(a_rows=a_rows, b_rows=b_rows)
        _check_indices(NAME, a, b, offs, a_rows, b_rows)
    else:
        options: dict[str, Any] = {}
        if out_dtype is not None or alignment is not None:
            options = {"out_dtype": out_dtype, "alignment": alignment}
        spec = _spec(a, b, offs, **options)
        indices = {}
        if debug.active:
            debug.check_offs(NAME, offs, a.shape[0])
    if alignment is None:
        return backends.produce(NAME, a.device, spec, [a, b, offs], **indices)
    out = aligned(spec, alignment)
    backends.run(NAME, a.device, a, b, offs, out=out, **indices)
    return out


def _check_indices(op: str, a: Tensor, b: Tensor, offs: Tensor, a_rows: Tensor | None, b_rows: Tensor | None) -> None:
    """Check values if inside ``debug_checks()``."""
    debug.check_offs(op, offs, (a if a_rows is None else a_rows).shape[0])
    debug.check_rows(op, "a_rows", a_rows, offs, a)
    debug.check_rows(op, "b_rows", b_rows, offs, b)


def _kernel_out(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    slots: Tensor | None = None,
    a_rows: Tensor | None = None,
    b_rows: Tensor | None = None,
    *,
    out: Tensor,
) -> None:
    if slots is None and a_rows is None and b_rows is None:
        _checked_out(a, b, offs, out=out)
        memory.writable(NAME, "out", out, a=a, b=b, offs=offs)
        debug.check_offs(NAME, offs, a.shape[0])
        backends.run(NAME, a.device, a, b, offs, out=out)
        return
    checked = _checked_out if a_rows is None and b_rows is None else _checked_out_indexed
    checked(a, b, offs, slots, a_rows, b_rows, out=out)
    tables = given(slots=slots, a_rows=a_rows, b_rows=b_rows)
    memory.writable(NAME, "out", out, a=a, b=b, offs=offs, **tables)
    _check_indices(NAME, a, b, offs, a_rows, b_rows)
    debug.check_slots(NAME, slots, "out", out, written=True)
    backends.run(NAME, a.device, a, b, offs, out=out, **tables)


def _kernel_accumulate(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    main_grad: Tensor,
    slots: Tensor | None = None,
    a_rows: Tensor | None = None,
    b_rows: Tensor | None = None,
    *,
    overwrite: bool = False,
) -> None:
    op = NAME if overwrite else ACCUMULATE
    if slots is None and a_rows is None and b_rows is None:
        _checked_accumulate(a, b, offs, main_grad)
        memory.writable(ACCUMULATE, "main_grad", main_grad, a=a, b=b, offs=offs)
        debug.check_offs(ACCUMULATE, offs, a.shape[0])
        backends.run(op, a.device, a, b, offs, out=main_grad)
        return
    checked = _checked_accumulate if a_rows is None and b_rows is None else _checked_accumulate_indexed
    checked(a, b, offs, main_grad, slots, a_rows, b_rows)
    tables = given(slots=slots, a_rows=a_rows, b_rows=b_rows)
    memory.writable(ACCUMULATE, "main_grad", main_grad, a=a, b=b, offs=offs, **tables)
    _check_indices(ACCUMULATE, a, b, offs, a_rows, b_rows)
    debug.check_slots(ACCUMULATE, slots, "main_grad", main_grad, written=True)
    backends.run(op, a.device, a, b, offs, out=main_grad, **tables)


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save(ctx: Any, needs: tuple[bool, ...], *operands: Any, output: Tensor, **_: Any) -> None:
    a, b, offs, a_rows, b_rows = operands
    ctx.save_for_backward(a if needs[1] else None, b if needs[0] else None, offs, a_rows, b_rows)
    ctx.dtype, ctx.counts = a.dtype, (a.shape[0], b.shape[0])


def _backward(ctx: Any, needs: tuple[bool, ...], dw: Tensor) -> tuple[Tensor | None, ...]:
    """Return da[t] = b[t] dw[g]^T and db[t] = a[t] dw[g]; with an index, summed over all reads of a row."""
    a, b, offs, a_rows, b_rows = ctx.saved_tensors
    dw, (a_count, b_count) = dw.to(ctx.dtype), ctx.counts
    da = torch.ops.tgl.grouped_gemm(b, dw.transpose(1, 2), offs, **given(rows=b_rows)) if needs[0] else None
    db = torch.ops.tgl.grouped_gemm(a, dw, offs, **given(rows=a_rows)) if needs[1] else None
    if da is not None and a_rows is not None:
        da = sum_by_index(da, a_rows, a_count)
    if db is not None and b_rows is not None:
        db = sum_by_index(db, b_rows, b_count)
    return da, db, None, None, None


_autocast = Casts(("a", "b")).rule(("a", "b"))

# --- registration -----------------------------------------------------------------------------------------------------

_op = register(
    f"{NAME}(Tensor a, Tensor b, Tensor offs, {_INDICES}, *, ScalarType? out_dtype=None, int? alignment=None) "
    "-> Tensor",
    _kernel,
    lambda *args, **kwargs: specs.grouped_gemm_wgrad(*args, **kwargs).empty(),
    formula=Formula(_save, _backward),
    autocast=_autocast,
)
_op_out = register(
    f"{NAME}.out(Tensor a, Tensor b, Tensor offs, Tensor? slots=None, {_INDICES}, *, Tensor(a!) out) -> ()",
    _kernel_out,
    specs.grouped_gemm_wgrad_out,
)
_ACCUMULATE_SCHEMA = (
    f"{ACCUMULATE}(Tensor a, Tensor b, Tensor offs, Tensor(a!) main_grad, Tensor? slots=None, {_INDICES}, *, "
    "bool overwrite=False) -> ()"
)


def _fake_accumulate(*args: Any, overwrite: bool = False) -> None:
    specs.grouped_gemm_wgrad_accumulate_(*args)


_op_accumulate = register(_ACCUMULATE_SCHEMA, _kernel_accumulate, _fake_accumulate, autocast=_autocast)
define_requested(_ACCUMULATE_SCHEMA, _op_accumulate, _fake_accumulate)


def _call(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    slots: Tensor | None = None,
    a_rows: Tensor | None = None,
    b_rows: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    alignment: int | None = None,
    out: Tensor | None = None,
) -> tuple[torch.device, tuple, dict[str, Any]]:
    if out is not None:
        specs.grouped_gemm_wgrad_out(a, b, offs, slots, a_rows, b_rows, out=out)
    else:
        if slots is not None:  # the overload without ``out`` has no slots, so its indices come one position earlier
            slots, a_rows, b_rows = None, slots, b_rows if a_rows is None else a_rows
        out = specs.grouped_gemm_wgrad(a, b, offs, a_rows, b_rows, out_dtype=out_dtype, alignment=alignment).meta()
    return a.device, (a, b, offs), {"out": out, **given(slots=slots, a_rows=a_rows, b_rows=b_rows)}


backends.describe_op(NAME, _call)
backends.describe_op(
    ACCUMULATE,
    describe_in_place(
        _ACCUMULATE_SCHEMA,
        specs.grouped_gemm_wgrad_accumulate_,
        "main_grad",
        ("slots", "a_rows", "b_rows"),
        lambda overwrite=False: ({}, {}),
    ),
)


def grouped_gemm_wgrad(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    slots: Tensor | None = None,
    a_rows: Tensor | None = None,
    b_rows: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    alignment: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return for every group the product of its rows of ``a``, transposed, and its rows of ``b``.

    ``out[g] = a[rows of g]^T @ b[rows of g]``, accumulated in float32 (float64 for float64) and rounded once; exactly
    zero for an empty group. Rows past ``offs[-1]`` are never read. Differentiable in ``a`` and ``b``, twice; without
    ``out``. The gradient of an operand with an index takes a stable sort, see ``grouped_gemm``.

    Args:
        a: ``[T, M]``, float64, float32, bfloat16 or float16, at any strides.
        b: ``[T, N]`` of the same dtype.
        offs: int32 ``[G]`` on the same device: cumulative group ends.
        slots: only with ``out``: int32 ``[G]`` on the device of ``a``, as in ``grouped_gemm``: group ``g`` writes
            ``out[slots[g]]``, and ``out`` is ``[S, M, N]``. Slots in the table must not overlap; other slots are not
            written, and a group whose slot is not in ``[0, S)`` writes nothing.
        a_rows: int32 ``[T]`` on the device of ``a``, like ``rows`` in ``grouped_gemm``: row ``a_rows[t]`` of ``a`` is
            read instead of ``a[t]``, and ``a`` is ``[S, M]`` with any number of rows. Before the tail, an index out of
            range reads a row of zeros, and is an error inside ``tgl.debug_checks()``.
        b_rows: the same for ``b``, which is then ``[S, N]``, with its own S.
        out_dtype: dtype of the result; default that of ``a``. float64 does not mix with the others.
        alignment: bytes, a power of two: every slot ``[g]`` of the result starts on a multiple of it, padded as by
            ``allocate_wgrad``; default: contiguous. Not with ``out``.
        out: buffer ``[G, M, N]``, row-major, 16-byte aligned; slots and rows may be padded, as by ``allocate_wgrad``.

    Returns:
        ``[G, M, N]``, contiguous without ``alignment``; ``out`` itself if given.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: ``out`` is given and an argument requires grad, or a forward-mode derivative is requested.
    """
    if out is None:
        if slots is not None:
            raise ValueError(f"tgl::{NAME}: `slots` must be None when there is no `out`, but got a tensor")
        return _op(a, b, offs, a_rows, b_rows, out_dtype=out_dtype, alignment=alignment)
    if alignment is not None:
        raise ValueError(f"tgl::{NAME}: `alignment` must be None when `out` is given, but got {alignment}")
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(f"tgl::{NAME}: `out_dtype` must be {out.dtype} like `out`, but got {out_dtype}")
    _op_out(a, b, offs, slots, a_rows, b_rows, out=out)
    return out


def grouped_gemm_wgrad_accumulate_(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    main_grad: Tensor,
    slots: Tensor | None = None,
    a_rows: Tensor | None = None,
    b_rows: Tensor | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Add the weight gradient of every group to ``main_grad``, in place.

    ``main_grad[g] += a[rows of g]^T @ b[rows of g]``, computed in float32 (float64 for float64) and rounded once to the
    dtype of ``main_grad``; the slot of an empty group keeps its bytes. Rows past ``offs[-1]`` are never read. Not
    differentiable.

    Args:
        a: ``[T, M]``, float64, float32, bfloat16 or float16, at any strides.
        b: ``[T, N]`` of the same dtype.
        offs: int32 ``[G]`` on the same device: cumulative group ends.
        main_grad: ``[G, M, N]``, float32 or the dtype of ``a``, row-major (slots and rows may be padded), 16-byte
            aligned, sharing no memory with an operand and requiring no grad.
        slots: int32 ``[G]`` on the device of ``a``, as in ``grouped_gemm``: group ``g`` adds to
            ``main_grad[slots[g]]``, and ``main_grad`` is ``[S, M, N]``. Slots in the table must not overlap; other
            slots may, and are not written. A group whose slot is not in ``[0, S)`` adds nothing.
        a_rows, b_rows: int32 ``[T]``, as in ``grouped_gemm_wgrad``.
        overwrite: replace the content of ``main_grad`` instead of adding; the slot of an empty group becomes zero.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: an argument requires grad while grad mode is on.
    """
    _op_accumulate(a, b, offs, main_grad, slots, a_rows, b_rows, overwrite=overwrite)
