"""Output specs of ``grouped_mlp`` and its backward.

Letters: T rows, G groups, H width of the input, N of FC1's result (2 I for gated activations, else I), O of the output.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import activations, checks
from .specs import Dim, RowsSpec, TensorSpec, accumulator

GRADIENTS = 6  # of x, w1, w2, probs, bias1 and bias2, in this order


def by_columns(w: Tensor) -> bool:
    """Whether the matrices of ``w`` are column-major; then so is their gradient, which adding it up need not copy."""
    return bool(w.stride(1) == 1 and w.stride(2) != 1)


def grouped_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    probs: Tensor | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    kind: str = "swiglu",
    recompute: bool = False,
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """``y [T, O]``, ``h [T, N]`` and the activation's result ``[T, I]``, or ``[0, I]`` to ``recompute``."""
    op = "grouped_mlp"
    rows, width, inter, columns = _operands(op, ("x", x), w1, w2, offs, probs, kind)
    groups, dtype, device = w1.shape[0], x.dtype, x.device
    for name, bias, size, letters in (("bias1", bias1, width, "[G, N]"), ("bias2", bias2, columns, "[G, O]")):
        if bias is not None:
            checks.shape(op, name, bias, (groups, size), letters)
            checks.either_dtype(op, name, bias, dtype, accumulator(dtype))
            checks.same_device(op, name, bias, "x", device)
    return (
        RowsSpec((rows, columns), dtype, device),
        RowsSpec((rows, width), dtype, device),
        TensorSpec((0, inter), dtype, device) if recompute else RowsSpec((rows, inter), dtype, device),
    )


def _operands(
    op: str,
    matrix: tuple[str, Tensor],
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    probs: Tensor | None,
    kind: str,
) -> tuple[Dim, Dim, Dim, Dim]:
    """T, N, I and O, where ``matrix`` is ``x`` or, without that, ``dy``, and its name."""
    name, x = matrix
    activation = activations.named(kind, op=op)
    checks.ndim(op, name, x, 2, "[T, H]" if name == "x" else "[T, O]")
    checks.floating(op, name, x)
    checks.dense_matrix(op, name, x)
    checks.ndim(op, "w1", w1, 3, "[G, H, N]")
    checks.ndim(op, "w2", w2, 3, "[G, I, O]")
    rows, (groups, _, width), columns = x.shape[0], w1.shape, w2.shape[2]
    dtype, device = x.dtype, x.device
    inter: Dim = width
    if activation.gated:
        checks.size_even(op, "w1", w1, 2, "[G, H, 2 I] with an even number of columns")
        inter = width // 2
    for weight, w in (("w1", w1), ("w2", w2)):
        checks.same_dtype(op, weight, w, name, dtype)
        checks.same_device(op, weight, w, name, device)
    if name == "x":
        checks.size(op, "w1", w1, 1, x.shape[1], lambda: f"[G, H, N] with H = {x.shape[1]} like `x`")
    checks.size(op, "w2", w2, 0, groups, lambda: f"[G, I, O] with G = {groups} like `w1`")
    checks.size(op, "w2", w2, 1, inter, lambda: f"[G, I, O] with I = {inter} for the `w1` given")
    checks.dense_matrix(op, "w1", w1)
    checks.dense_matrix(op, "w2", w2)
    checks.offsets(op, offs, groups, name, device)
    if probs is not None:
        checks.shape(op, "probs", probs, (rows,), "[T]")
        checks.either_dtype(op, "probs", probs, dtype, accumulator(dtype))
        checks.same_device(op, "probs", probs, name, device)
    return rows, width, inter, columns


def grouped_mlp_backward(
    dy: Tensor,
    x: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    h: Tensor,
    act: Tensor | None,
    probs: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    output_mask: Sequence[bool],
    kind: str = "swiglu",
) -> tuple[TensorSpec, ...]:
    """The six gradients, ``[0]`` where ``output_mask`` does not ask for one; without ``x`` there is none of ``w1``."""
    op = "grouped_mlp_backward"
    checks.ndim(op, "dy", dy, 2, "[T, O]")
    rows, width, inter, columns = _operands(op, ("dy", dy) if x is None else ("x", x), w1, w2, offs, probs, kind)
    groups, dtype, device = w1.shape[0], dy.dtype, dy.device
    for name, t, size, letters in (
        ("dy", dy, columns, "[T, O]"),
        ("h", h, width, "[T, N]"),
        ("act", act, inter, "[T, I]"),
    ):
        if t is not None:
            checks.shape(op, name, t, (rows, size), letters)
            checks.same_dtype(op, name, t, "w1", w1.dtype)
            checks.same_device(op, name, t, "w1", w1.device)
            checks.dense_matrix(op, name, t)
    if bias2 is not None:
        checks.shape(op, "bias2", bias2, (groups, columns), "[G, O]")
        checks.either_dtype(op, "bias2", bias2, dtype, accumulator(dtype))
        checks.same_device(op, "bias2", bias2, "dy", device)
    checks.require(len(output_mask) == GRADIENTS, op, "output_mask", f"{GRADIENTS} flags", len(output_mask))
    for i, name, given in ((1, "w1 without `x`", x), (3, "absent probs", probs)):
        checks.require(given is not None or not output_mask[i], op, "output_mask", f"False for {name}", "True")
    acc = accumulator(dtype)
    wanted = (
        RowsSpec((rows, w1.shape[1]), dtype, device),
        _weight_gradient(w1),
        _weight_gradient(w2),
        RowsSpec((rows,), dtype if probs is None else probs.dtype, device),
        TensorSpec((groups, width), acc, device),
        TensorSpec((groups, columns), acc, device),
    )
    return tuple(spec if want else TensorSpec((0,), spec.dtype, spec.device) for spec, want in zip(wanted, output_mask))


def _weight_gradient(w: Tensor) -> TensorSpec:
    groups, depth, columns = w.shape
    stride = (depth * columns, 1, depth) if by_columns(w) else None
    return TensorSpec((groups, depth, columns), w.dtype, w.device, stride)
