"""Output specs of the dense ops: every function checks its arguments and returns the spec of the op's result.

Letters: T rows (tokens), G groups, K contraction, M and N the other dimensions.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import activations, checks

_INT32_MAX = 2**31 - 1

Dim = int | torch.SymInt  # a size, which may be symbolic in a trace


def ceil_div(x: Dim, y: Dim) -> Dim:
    """Return ``x / y`` rounded up.

    Computed as a floor of negative numbers, because the symbolic solver simplifies nested floors: it then knows that
    ``ceil(ceil(x / 32) / 4)`` is ``ceil(x / 128)``. ``(x + y - 1) // y`` would leave an equation to guard on.
    """
    return -(-x // y)


class TensorSpec(NamedTuple):
    """Shape, dtype, device and (when not contiguous) strides of a tensor to be allocated."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[Dim, ...] | None = None

    @property
    def by_rows(self) -> TensorSpec:
        """The spec of the transposed, row-major matrices of column-major ones."""
        *outer, rows, columns = self.shape
        return TensorSpec((*outer, columns, rows), self.dtype, self.device)

    def empty(self) -> Tensor:
        """Allocate an uninitialised tensor."""
        shape, dtype, device, stride = self
        if stride is None:
            if len(shape) == 2 and type(shape[1]) is int:
                stride = shape[1] or 1, 1
            elif len(shape) == 1:
                stride = (1,)
            else:
                return torch.empty(*(shape or ((),)), dtype=dtype, device=device)
        # ``empty`` has two signatures, and torch tries the wrong one first, which costs as much as a whole call.
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def meta(self) -> Tensor:
        """Return a meta tensor of this spec."""
        return self._replace(device=torch.device("meta")).empty()

    def for_rows(self) -> Callable[[Dim], TensorSpec]:
        """Return a function from the number of rows T to the spec."""
        return lambda rows: self


new_spec: Callable[[tuple[Any, ...]], TensorSpec] = functools.partial(tuple.__new__, TensorSpec)
"""Return a ``TensorSpec`` of its fields, without the frame of a named tuple's constructor."""


class RowsSpec(TensorSpec):
    """Spec of a tensor whose first size is the number of rows T."""

    __slots__ = ()

    def for_rows(self) -> Callable[[Dim], TensorSpec]:
        (_, *rest), dtype, device, _ = self
        new = tuple.__new__  # saves a call
        return lambda rows: new(RowsSpec, ((rows, *rest), dtype, device, None))


class Unasked(TensorSpec):
    """Spec of an output that a call does not request: implementations skip it, and the op returns an empty tensor."""

    __slots__ = ()


def pair_for_rows(pair: tuple[RowsSpec, RowsSpec]) -> Callable[[Dim], tuple[RowsSpec, RowsSpec]]:
    """Return ``for_rows`` of two specs as one function, because a call for each would double the cost."""
    ((_, *rest), dtype, device, _), ((_, *other_rest), other_dtype, other_device, _) = pair
    new = tuple.__new__
    return lambda rows: (
        new(RowsSpec, ((rows, *rest), dtype, device, None)),
        new(RowsSpec, ((rows, *other_rest), other_dtype, other_device, None)),
    )


def empty_all(specs: Iterable[TensorSpec]) -> list[Tensor]:
    """Return ``spec.empty()`` of each, inline, because an op with many outputs would spend half its time on calls."""
    made = []
    for shape, dtype, device, stride in specs:
        if stride is not None:
            made.append(torch.empty_strided(shape, stride, dtype=dtype, device=device))
        else:
            made.append(torch.empty(*(shape or ((),)), dtype=dtype, device=device))
    return made


def row_major(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the strides of a contiguous tensor whose sizes are not symbolic."""
    if len(shape) == 1:
        return (1,)
    strides: list[Dim] = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(strides[::-1])


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float64 for float64 operands, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def splits_to_offsets(m_splits: Tensor) -> TensorSpec:
    """``[G]`` sizes of any integer dtype -> int32 ``[G]`` ends."""
    op = "splits_to_offsets"
    checks.ndim(op, "m_splits", m_splits, 1, "[G]")
    checks.require(m_splits.dtype in checks.INTEGERS, op, "m_splits", "an integer tensor", m_splits.dtype, TypeError)
    return TensorSpec((m_splits.shape[0],), torch.int32, m_splits.device)


def route(
    top_k_index: Tensor, num_experts: Dim, num_rows: Dim | None = None
) -> tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec]:
    """``[S, k]`` experts, any integer dtype -> int32 ``source [T]``, ``position [S k]``, ``token [T]``, ``offs [G]``.

    T is ``num_rows``, or a row for every top-k slot.
    """
    op = "route"
    checks.ndim(op, "top_k_index", top_k_index, 2, "[S, k]")
    dtype, device = top_k_index.dtype, top_k_index.device
    checks.require(dtype in checks.INTEGERS, op, "top_k_index", "an integer tensor", dtype, TypeError)
    tokens, top_k = top_k_index.shape
    if top_k < 1:
        checks.require(False, op, "top_k_index", "[S, k] with k of at least 1", top_k_index.shape)
    if num_experts < 0:
        checks.require(False, op, "num_experts", "at least 0", num_experts)
    pairs = tokens * top_k
    if (pairs > _INT32_MAX) is True:  # not asked of symbols: the real call has none
        checks.require(False, op, "top_k_index", "of fewer than 2^31 elements, which int32 counts", top_k_index.shape)
    position = TensorSpec((pairs,), torch.int32, device)
    rows = position if num_rows is None else TensorSpec((_rows(op, num_rows),), torch.int32, device)
    return rows, position, rows, TensorSpec((num_experts,), torch.int32, device)


def _rows(op: str, num_rows: Dim) -> Dim:
    """Check that the number of rows fits int32, and return it."""
    if (num_rows < 0) is True or (num_rows > _INT32_MAX) is True:
        checks.require(False, op, "num_rows", "from 0 to 2^31 - 1", num_rows)
    return num_rows


def with_out(rule: Callable[..., TensorSpec], letters: str, out_dtype: Callable[..., Any]) -> Callable[..., None]:
    """Return the check of an op's ``.out`` overload: the op's own, for its dtype and layout, and the buffer's.

    Args:
        rule: the shape rule of the op. Its options of the result, which a buffer has already, are left out.
        letters: the shape in words.
        out_dtype: checks the buffer's dtype; takes the op, the argument, the dtype of the op's first one and this one.
    """
    op = rule.__name__

    def check(*args: Any, out: Tensor, **options: Any) -> None:
        spec = rule(*args, **options)
        checks.out_buffer(op, "out", out, spec.shape, letters, spec.device)
        out_dtype(op, "out", args[0].dtype, out.dtype)

    taken = [p for p in inspect.signature(rule).parameters.values() if p.name not in ("out_dtype", "alignment", "op")]
    buffer = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, annotation="Tensor")
    check.__name__, check.__signature__ = f"{op}_out", inspect.Signature([*taken, buffer])  # type: ignore[attr-defined]
    return check


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    slots: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    op: str = "grouped_gemm",
) -> TensorSpec:
    """``[T, K] x [G, K, N] -> [T, N]``; with ``slots``, ``b`` is ``[S, K, N]``; with ``rows``, ``a`` is ``[S, K]``."""
    checks.ndim(op, "a", a, 2, "[T, K]" if rows is None else "[S, K]")
    checks.floating(op, "a", a)
    checks.ndim(op, "b", b, 3, "[G, K, N]")
    (count, depth), (groups, b_depth, columns) = a.shape, b.shape
    dtype, device = a.dtype, a.device
    if rows is not None:
        checks.row_index(op, "rows", rows, "a", device)
        count = rows.shape[0]
    checks.like(op, "b", b, "a", dtype, device)
    if (same := b_depth == depth) is not True:
        checks.require(same, op, "b", f"[G, K, N] with K = {depth} like `a`", b.shape)
    if slots is None:
        checks.offsets(op, offs, groups, "a", device)
    else:
        checks.offsets(op, offs, None, "a", device)
        groups = offs.shape[0]
        checks.slots(op, "b", b, slots, groups, "a", device)
    if bias is not None:
        checks.operand(op, "bias", bias, (groups, columns), "[G, N]", (dtype, accumulator(dtype)), ("a", device))
    if bias_scale is not None:
        checks.require(bias is not None, op, "bias_scale", "None when there is no `bias`", "a tensor")
        checks.operand(op, "bias_scale", bias_scale, (count,), "[T]", (dtype, accumulator(dtype)), ("a", device))
    return RowsSpec((count, columns), checks.out_dtype(op, "out_dtype", dtype, out_dtype), device)


grouped_gemm_out = with_out(grouped_gemm, "[T, N]", checks.out_dtype)


def _wgrad(
    op: str, a: Tensor, b: Tensor, offs: Tensor, a_rows: Tensor | None = None, b_rows: Tensor | None = None
) -> tuple[Dim, Dim, Dim]:
    checks.ndim(op, "a", a, 2, "[T, M]" if a_rows is None else "[S, M]")
    checks.floating(op, "a", a)
    checks.ndim(op, "b", b, 2, "[T, N]" if b_rows is None else "[S, N]")
    (count, a_columns), (b_count, b_columns), device = a.shape, b.shape, a.device
    checks.like(op, "b", b, "a", a.dtype, device)
    counted, reference = b, "a"
    if a_rows is not None:
        checks.row_index(op, "a_rows", a_rows, "a", device)
        count, reference = a_rows.shape[0], "a_rows"
    if b_rows is not None:
        checks.row_index(op, "b_rows", b_rows, "b", device)
        b_count, counted = b_rows.shape[0], b_rows
    if (same := b_count == count) is not True:
        argument, letters = ("b", "[T, N]") if b_rows is None else ("b_rows", "[T]")
        checks.require(same, op, argument, f"{letters} with T = {count} like `{reference}`", counted.shape)
    checks.offsets(op, offs, None, "a", device)
    return offs.shape[0], a_columns, b_columns


def grouped_gemm_wgrad(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    a_rows: Tensor | None = None,
    b_rows: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    alignment: int | None = None,
) -> TensorSpec:
    """``[T, M]^T x [T, N] -> [G, M, N]``; with an ``alignment``, packed as by ``allocate_wgrad``.

    With ``a_rows``, ``a`` is ``[S, M]``; with ``b_rows``, ``b`` is ``[S, N]``, possibly with another S.
    """
    op = "grouped_gemm_wgrad"
    shape = _wgrad(op, a, b, offs, a_rows, b_rows)
    dtype = checks.out_dtype(op, "out_dtype", a.dtype, out_dtype)
    if alignment is not None:
        return packed_slots(op, shape[0], shape[1:], dtype, a.device, alignment)
    return TensorSpec(shape, dtype, a.device)


def wgrad_buffer(op: str, argument: str, t: Tensor, expected: tuple, slots: Tensor | None, device: Any) -> None:
    """Check that ``t`` is ``[G, M, N]`` like ``expected`` or, with ``slots``, ``[S, M, N]``, and can be written."""
    if slots is None:
        checks.out_buffer(op, argument, t, expected, "[G, M, N]", device)
        return
    groups, *matrix = expected
    checks.ndim(op, argument, t, 3, "[S, M, N]")
    checks.out_buffer(op, argument, t, (t.shape[0], *matrix), "[S, M, N]", device, overlapping=True)
    checks.slots(op, argument, t, slots, groups, "a", device)


def grouped_gemm_wgrad_out(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    slots: Tensor | None = None,
    a_rows: Tensor | None = None,
    b_rows: Tensor | None = None,
    *,
    out: Tensor,
) -> None:
    """Check a call of ``grouped_gemm_wgrad.out``; the slots of ``out`` may be padded, as by ``allocate_wgrad``."""
    op = "grouped_gemm_wgrad"
    wgrad_buffer(op, "out", out, _wgrad(op, a, b, offs, a_rows, b_rows), slots, a.device)
    checks.out_dtype(op, "out", a.dtype, out.dtype)


def grouped_gemm_wgrad_accumulate_(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    main_grad: Tensor,
    slots: Tensor | None = None,
    a_rows: Tensor | None = None,
    b_rows: Tensor | None = None,
) -> None:
    """Check the accumulating wgrad: ``main_grad`` is ``[G, M, N]`` in the accumulator's or the operands' dtype."""
    op = "grouped_gemm_wgrad_accumulate_"
    wgrad_buffer(op, "main_grad", main_grad, _wgrad(op, a, b, offs, a_rows, b_rows), slots, a.device)
    checks.either_dtype(op, "main_grad", main_grad, accumulator(a.dtype), a.dtype)


def grouped_dbias(dy: Tensor, offs: Tensor) -> TensorSpec:
    """``[T, N] -> [G, N]`` in the accumulator's dtype."""
    op = "grouped_dbias"
    checks.ndim(op, "dy", dy, 2, "[T, N]")
    checks.floating(op, "dy", dy)
    checks.offsets(op, offs, None, "dy", dy.device)
    return TensorSpec((offs.shape[0], dy.shape[1]), accumulator(dy.dtype), dy.device)


def grouped_dbias_dscales(dy: Tensor, bias: Tensor, bias_scale: Tensor, offs: Tensor) -> tuple[TensorSpec, TensorSpec]:
    """``[T, N] -> dbias [G, N], dscales [T]`` in the accumulator's dtype."""
    op = "grouped_dbias_dscales"
    checks.ndim(op, "dy", dy, 2, "[T, N]")
    checks.floating(op, "dy", dy)
    checks.offsets(op, offs, None, "dy", dy.device)
    acc = accumulator(dy.dtype)
    checks.operand(op, "bias", bias, (offs.shape[0], dy.shape[1]), "[G, N]", (dy.dtype, acc), ("dy", dy.device))
    checks.operand(op, "bias_scale", bias_scale, (dy.shape[0],), "[T]", (dy.dtype, acc), ("dy", dy.device))
    return (
        TensorSpec((offs.shape[0], dy.shape[1]), acc, dy.device),
        RowsSpec((dy.shape[0],), acc, dy.device),
    )


def allocate_wgrad(
    num_groups: Dim, shape: Sequence[Dim], dtype: torch.dtype, device: torch.device, alignment: int = 256
) -> TensorSpec:
    """One packed ``[G, *shape]`` tensor whose slots are aligned to ``alignment`` bytes."""
    op = "allocate_wgrad"
    checks.require(num_groups >= 0, op, "num_groups", "at least 0", num_groups)
    checks.require(len(shape) >= 1, op, "shape", "the shape of one weight gradient", tuple(shape))
    for size in shape:
        checks.require(size >= 0, op, "shape", "free of negative sizes", tuple(shape))
    checks.require(dtype in checks.FLOATS, op, "dtype", "a floating dtype", dtype, TypeError)
    return packed_slots(op, num_groups, shape, dtype, device, alignment)


def packed_slots(
    op: str, num_groups: Dim, shape: Sequence[Dim], dtype: torch.dtype, device: torch.device, alignment: int
) -> TensorSpec:
    """``[num_groups, *shape]`` with the slot stride padded to a multiple of ``alignment`` bytes."""
    power_of_two = alignment > 0 and alignment & (alignment - 1) == 0
    checks.require(
        power_of_two and alignment >= dtype.itemsize, op, "alignment", "a power of two, at least one element", alignment
    )
    unit = alignment // dtype.itemsize
    slot = ceil_div(math.prod(shape), unit) * unit
    inner: list[Dim] = [1]
    for size in reversed(shape[1:]):
        inner.insert(0, inner[0] * size)
    return TensorSpec((num_groups, *shape), dtype, device, (slot, *inner))


def wgrad_stash_(sources: Sequence[Tensor], state: Tensor, buffers: Sequence[Tensor]) -> None:
    """Check the arguments of ``wgrad_stash_``: every source fits into one entry of its buffer."""
    op = "wgrad_stash_"
    checks.require(state.dtype == torch.int64, op, "state", "int64", state.dtype, TypeError)
    checks.shape(op, "state", state, (2,), "[2]")
    checks.apart(op, "state", state)
    checks.require(len(sources) > 0, op, "sources", "one tensor or more", 0)
    checks.require(len(sources) == len(buffers), op, "buffers", f"{len(sources)}, one per source", len(buffers))
    checks.same_device(op, "state", state, "sources[0]", sources[0].device)
    for i, (source, buffer) in enumerate(zip(sources, buffers)):
        name = f"buffers[{i}]"
        checks.like(op, name, buffer, f"sources[{i}]", source.dtype, source.device)
        checks.ndim(op, name, buffer, source.dim() + 1, "[M, *capacity]")
        checks.apart(op, name, buffer)
        checks.size(op, name, buffer, 0, buffers[0].shape[0], lambda: f"[{buffers[0].shape[0]}, *capacity]")
        must = f"at least {tuple(source.shape)} in each place"
        for have, need in zip(buffer.shape[1:], source.shape):
            checks.require(have >= need, op, name, must, buffer.shape)


def grouped_activation(x: Tensor, offs: Tensor, probs: Tensor | None = None, *, kind: str = "swiglu") -> TensorSpec:
    """``[T, 2 I] -> [T, I]`` for gated kinds, ``[T, I] -> [T, I]`` for the others."""
    op = "grouped_activation"
    activation = activations.named(kind, op=op)
    checks.ndim(op, "x", x, 2, "[T, 2 I] (gated) or [T, I]")
    checks.floating(op, "x", x)
    checks.offsets(op, offs, None, "x", x.device)
    rows, width = x.shape
    if activation.gated:
        checks.require(width % 2 == 0, op, "x", "[T, 2 I] with an even number of columns", x.shape)
        width = width // 2
    if probs is not None:
        checks.operand(op, "probs", probs, (rows,), "[T]", (x.dtype, accumulator(x.dtype)), ("x", x.device))
    return RowsSpec((rows, width), x.dtype, x.device)


def grouped_gemm_activation(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    kind: str = "swiglu",
    out_dtype: torch.dtype | None = None,
    op: str = "grouped_gemm_activation",
) -> tuple[TensorSpec, TensorSpec]:
    """``y [T, I]`` and ``h [T, 2 I]`` for gated kinds, ``[T, I]`` both for the others."""
    activation = activations.named(kind, op=op)
    h = grouped_gemm(a, b, offs, bias, None, None, rows, out_dtype=out_dtype, op=op)
    count, width = h.shape
    if activation.gated:
        checks.require(width % 2 == 0, op, "b", "[G, K, 2 I] with an even number of columns", b.shape)
        width = width // 2
    if probs is not None:
        checks.operand(op, "probs", probs, (count,), "[T]", (h.dtype, accumulator(h.dtype)), ("a", a.device))
    return h._replace(shape=(count, width)), h


def grouped_activation_backward(
    dy: Tensor, x: Tensor, offs: Tensor, probs: Tensor | None = None, *, kind: str = "swiglu"
) -> tuple[TensorSpec, TensorSpec]:
    """``dx`` like ``x``, and ``dprobs [T]`` in the accumulator's dtype (``[0]`` without ``probs``)."""
    op = "grouped_activation_backward"
    y = grouped_activation(x, offs, probs, kind=kind)
    checks.shape(op, "dy", dy, y.shape, "[T, I]")
    checks.like(op, "dy", dy, "x", x.dtype, x.device)
    return RowsSpec(tuple(x.shape), x.dtype, x.device), _one_per_row(probs, x)


def grouped_gemm_dactivation(
    dy: Tensor,
    b: Tensor,
    h: Tensor,
    offs: Tensor,
    probs: Tensor | None = None,
    rows: Tensor | None = None,
    *,
    kind: str = "swiglu",
) -> tuple[TensorSpec, TensorSpec]:
    """``[T, K] x [G, K, I]`` -> ``dh`` like ``h``, and ``dprobs [T]`` (``[0]`` without ``probs``).

    With ``rows``, ``dy`` is ``[S, K]``.
    """
    op = "grouped_gemm_dactivation"
    activation = activations.named(kind, op=op)
    checks.ndim(op, "dy", dy, 2, "[T, K]" if rows is None else "[S, K]")
    checks.floating(op, "dy", dy)
    checks.ndim(op, "b", b, 3, "[G, K, I]")
    (count, depth), (groups, b_depth, columns) = dy.shape, b.shape
    dtype, device, acc = dy.dtype, dy.device, accumulator(dy.dtype)
    if rows is not None:
        checks.row_index(op, "rows", rows, "dy", device)
        count = rows.shape[0]
    checks.like(op, "b", b, "dy", dtype, device)
    checks.require(b_depth == depth, op, "b", f"[G, K, I] with K = {depth} like `dy`", b.shape)
    checks.shape(op, "h", h, (count, activation.width(columns)), "[T, 2 I]" if activation.gated else "[T, I]")
    checks.like(op, "h", h, "dy", dtype, device)
    checks.offsets(op, offs, groups, "dy", device)
    if probs is not None:
        checks.operand(op, "probs", probs, (count,), "[T]", (dtype, acc), ("dy", device))
    return RowsSpec(tuple(h.shape), dtype, device), _one_per_row(probs, h)


def _one_per_row(probs: Tensor | None, x: Tensor) -> TensorSpec:
    """Return the spec of the gradient of ``probs`` for the rows of ``x``; ``[0]`` without ``probs``."""
    acc = accumulator(x.dtype)
    return TensorSpec((0,), acc, x.device) if probs is None else RowsSpec((x.shape[0],), acc, x.device)
