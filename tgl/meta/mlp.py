"""Output specs of ``grouped_mlp`` and its backward.

Letters: T rows, G groups, H width of the input, N of FC1's result (2 I for gated activations, else I), O of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from . import activations, checks
from .specs import Dim, RowsSpec, TensorSpec, Unasked, accumulator

GRADIENTS = 6  # the gradients of x, w1, w2, probs, bias1 and bias2, in this order


def by_columns(w: Tensor) -> bool:
    """Return whether the matrices of ``w`` are column-major; so is then their gradient, to avoid a copy."""
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
    compute_h: bool = True,
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """``y [T, O]``, ``h [T, N]`` and the activation ``[T, I]``, or ``[0, I]`` with ``recompute``.

    Without ``compute_h`` both ``h`` and the activation have no rows.
    """
    op = "grouped_mlp"
    width, inter, columns = operands(op, Matrix("x", x, "[T, H]"), w1, w2, offs, kind)
    rows, dtype, device = x.shape[0], x.dtype, x.device
    _probs(op, probs, "x", x)
    bias(op, "bias1", bias1, "[G, N]", (w1.shape[0], width), Matrix("x", x))
    bias(op, "bias2", bias2, "[G, O]", (w1.shape[0], columns), Matrix("x", x))
    return (
        RowsSpec((rows, columns), dtype, device),
        RowsSpec((rows, width), dtype, device) if compute_h else Unasked((0, width), dtype, device),
        RowsSpec((rows, inter), dtype, device) if compute_h and not recompute else Unasked((0, inter), dtype, device),
    )


class Matrix(NamedTuple):
    """The argument that the others are checked against: its name, and the letters of its two dimensions."""

    name: str
    t: Tensor
    letters: str = ""


def operands(op: str, matrix: Matrix, w1: Tensor, w2: Tensor, offs: Tensor, kind: str) -> tuple[Dim, Dim, Dim]:
    """Check the operands and return N, I and O; ``matrix`` is ``x`` or, without it, ``dy``."""
    name, x, letters = matrix
    activation = activations.named(kind, op=op)
    checks.ndim(op, name, x, 2, letters)
    checks.floating(op, name, x)
    checks.ndim(op, "w1", w1, 3, "[G, H, N]")
    checks.ndim(op, "w2", w2, 3, "[G, I, O]")
    (groups, _, width), columns = w1.shape, w2.shape[2]
    dtype, device = x.dtype, x.device
    inter: Dim = width
    if activation.gated:
        checks.size_even(op, "w1", w1, 2, "[G, H, 2 I] with an even number of columns")
        inter = width // 2
    for weight, w in (("w1", w1), ("w2", w2)):
        checks.like(op, weight, w, name, dtype, device)
    if name == "x":
        checks.size(op, "w1", w1, 1, x.shape[1], lambda: f"[G, H, N] with H = {x.shape[1]} like `x`")
    checks.size(op, "w2", w2, 0, groups, lambda: f"[G, I, O] with G = {groups} like `w1`")
    checks.size(op, "w2", w2, 1, inter, lambda: f"[G, I, O] with I = {inter} for the `w1` given")
    checks.offsets(op, offs, groups, name, device)
    return width, inter, columns


def _probs(op: str, probs: Tensor | None, name: str, x: Tensor) -> None:
    if probs is not None:
        checks.operand(op, "probs", probs, (x.shape[0],), "[T]", (x.dtype, accumulator(x.dtype)), (name, x.device))


def bias(op: str, name: str, t: Tensor | None, letters: str, shape: tuple[Dim, ...], matrix: Matrix) -> None:
    """Check the bias ``t``, if given: its shape, and dtype and device against ``matrix``."""
    if t is not None:
        checks.shape(op, name, t, shape, letters)
        checks.either_dtype(op, name, t, matrix.t.dtype, accumulator(matrix.t.dtype))
        checks.same_device(op, name, t, matrix.name, matrix.t.device)


def of_weight(
    op: str, name: str, t: Tensor | None, letters: str, shape: tuple[Dim, ...], weight: str, w: Tensor
) -> None:
    """Check that ``t``, if given, has this shape, and the dtype and device of ``w``, named ``weight``."""
    if t is not None:
        checks.shape(op, name, t, shape, letters)
        checks.like(op, name, t, weight, w.dtype, w.device)


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
    """The six gradients, ``[0]`` where ``output_mask`` is False; without ``x``, ``w1`` has none."""
    op = "grouped_mlp_backward"
    checks.ndim(op, "dy", dy, 2, "[T, O]")
    matrix = Matrix("dy", dy, "[T, O]") if x is None else Matrix("x", x, "[T, H]")
    width, inter, columns = operands(op, matrix, w1, w2, offs, kind)
    rows, dtype, device = matrix.t.shape[0], dy.dtype, dy.device
    _probs(op, probs, matrix.name, matrix.t)
    of_weight(op, "dy", dy, "[T, O]", (rows, columns), "w1", w1)
    of_weight(op, "h", h, "[T, N]", (rows, width), "w1", w1)
    of_weight(op, "act", act, "[T, I]", (rows, inter), "w1", w1)
    bias(op, "bias2", bias2, "[G, O]", (w1.shape[0], columns), Matrix("dy", dy))
    check_mask(op, output_mask, GRADIENTS, {1: ("w1 without `x`", x), 3: ("absent probs", probs)})
    dx = RowsSpec((rows, w1.shape[1]), dtype, device)
    dprobs = RowsSpec((rows,), dtype if probs is None else probs.dtype, device)
    acc = accumulator(dtype)
    dbias1, dbias2 = (TensorSpec((w.shape[0], w.shape[2]), acc, device) for w in (w1, w2))
    return masked((dx, weight_gradient(w1), weight_gradient(w2), dprobs, dbias1, dbias2), output_mask)


def check_mask(op: str, output_mask: Sequence[bool], count: int, without: dict[int, tuple[str, Tensor | None]]) -> None:
    """Check that ``output_mask`` has a flag per gradient, and none set that needs a missing tensor of ``without``."""
    checks.require(len(output_mask) == count, op, "output_mask", f"{count} flags", len(output_mask))
    for i, (name, given) in without.items():
        checks.require(given is not None or not output_mask[i], op, "output_mask", f"False for {name}", "True")


def masked(made: Sequence[TensorSpec], output_mask: Sequence[bool]) -> tuple[TensorSpec, ...]:
    """Return the gradients' specs, ``[0]`` where ``output_mask`` is False."""
    return tuple(spec if want else Unasked((0,), spec.dtype, spec.device) for spec, want in zip(made, output_mask))


def weight_gradient(w: Tensor) -> TensorSpec:
    """Return the spec of the gradient of ``w``, in the memory order of its matrices."""
    groups, depth, columns = w.shape
    stride = (depth * columns, 1, depth) if by_columns(w) else None
    return TensorSpec((groups, depth, columns), w.dtype, w.device, stride)
