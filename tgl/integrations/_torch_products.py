"""ATen's grouped products as calls of our ops: the op for each form, and the implementation for each call.

``torch.nn.functional.grouped_mm`` takes two operands of two or three dimensions. A two-dimensional one holds the groups
one after another, ended by ``offs``; a three-dimensional one holds a matrix for each group. Here G is the number of
groups and T the dimension that ``offs`` divides. Every form is one call of a dense op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, debug
from ..backends.portable.register import GROUPED_MM
from ..meta import specs
from ..meta.remembered import remembered
from ..meta.specs import Dim, TensorSpec
from ..ops._library import autocast_enabled

OP = "aten::_grouped_mm"
PITCH = 16  # bytes: ATen pads the rows of its results to a multiple of them

Checks = dict[str, Callable[..., TensorSpec]]
CHECKS: Checks = {"grouped_gemm": specs.grouped_gemm, "grouped_gemm_wgrad": specs.grouped_gemm_wgrad}
"""Checks of an op's operands, which also return the specs of its result."""
REMEMBERED: Checks = {
    "grouped_gemm": remembered(specs.grouped_gemm, {"a": "rows", "bias_scale": "vector"}),
    "grouped_gemm_wgrad": remembered(specs.grouped_gemm_wgrad, {"a": "rows", "b": "rows"}),
}
"""The checks for real tensors, whose sizes are not symbolic."""
OPTIONS: dict[str, dict[str, Any]] = {
    "grouped_gemm": {"zero_tail": True},
    "grouped_gemm_wgrad": {},
    "grouped_gemm_row_scaled": {},
    "grouped_gemm_row_scaled_wgrad": {},
    "grouped_gemm_scaled": {"b_direction": "rowwise", "zero_tail": True},
    "grouped_gemm_scaled_wgrad": {"accumulate": False},
}
"""Keywords of implementations, by op, besides the destination and the op's own keywords."""


class ProductForm(NamedTuple):
    """One form of the product.

    Attributes:
        letters: letters for the dimensions of operands and result.
        op: our op.
        operands: its positional arguments, from ``mat_a, mat_b, offs, bias`` of ATen's, or from
            ``mat_a, mat_b, scale_a, scale_b, offs`` of a scaled product.
        shape: shape of the result, from ``mat_a, mat_b, offs``.
        reason: returns why the op cannot take ``mat_a, mat_b``, or None.
        transposed: whether the op's result is the transposed of ATen's.
        bias: whether there can be one, ``[N]`` or ``[G, N]``.
        offs: index of the operand that holds the groups' ends.
        tokens: the dimension of the first operand that the groups divide.
    """

    letters: str
    op: str
    operands: Callable[..., tuple]
    shape: Callable[[Tensor, Tensor, Tensor | None], tuple[Dim, ...]]
    reason: Callable[[Tensor, Tensor], backends.Reason] = lambda mat_a, mat_b: None
    transposed: bool = False
    bias: bool = False
    offs: int = 2
    tokens: int = 0

    def as_atens(self, y: Tensor, shape: tuple[Dim, ...]) -> Tensor:
        """Return the op's result ``y`` in the shape and memory layout of ATen's."""
        y = y.t() if self.transposed else y.view(shape)
        result = laid_out(shape, y.dtype, y.device)
        if not self.transposed and result.stride[-2] == shape[-1]:  # type: ignore[index]
            return y
        return result.empty().copy_(y)


def _one_per_group(bias: Tensor | None, mat_b: Tensor) -> Tensor | None:
    return bias.expand(mat_b.shape[0], -1) if bias is not None and bias.dim() == 1 else bias


def ends_of(count: Dim, size: Dim, like: Tensor) -> Tensor:
    """Return the ends of that many groups of equal size, computed on the device."""
    numbers: Tensor = torch.arange(1, count + 1, dtype=torch.int32, device=like.device)  # type: ignore[arg-type]
    return numbers * size  # type: ignore[return-value]


def _in_rows(t: Tensor) -> bool:
    """Return whether the rows of all matrices of ``t`` have a common stride."""
    return bool(t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1))


def no_rows(mat_a: Tensor, mat_b: Tensor) -> backends.Reason:
    if _in_rows(mat_a):
        return None
    return f"needs `mat_a` with one stride for all rows, got shape {tuple(mat_a.shape)}, strides {mat_a.stride()}"


def _no_columns(mat_a: Tensor, mat_b: Tensor) -> backends.Reason:
    if _in_rows(mat_a.transpose(1, 2)) and _in_rows(mat_b):
        return None
    return (
        "needs one stride for all columns of `mat_a` and one for all rows of `mat_b`, got shapes "
        f"{tuple(mat_a.shape)}, {tuple(mat_b.shape)}, strides {mat_a.stride()}, {mat_b.stride()}"
    )


FORMS: dict[tuple[int, int], tuple[ProductForm, ...]] = {
    (2, 3): (
        ProductForm(
            "[T, K] x [G, K, N] -> [T, N]",
            "grouped_gemm",
            lambda mat_a, mat_b, offs, bias: (mat_a, mat_b, offs, _one_per_group(bias, mat_b), None),
            lambda mat_a, mat_b, offs: (mat_a.shape[0], mat_b.shape[2]),
            bias=True,
        ),
    ),
    (3, 2): (
        ProductForm(
            "[G, M, K] x [K, T] -> [M, T]",
            "grouped_gemm",
            lambda mat_a, mat_b, offs, bias: (mat_b.t(), mat_a.transpose(1, 2), offs, None, None),
            lambda mat_a, mat_b, offs: (mat_a.shape[1], mat_b.shape[1]),
            transposed=True,
        ),
    ),
    (2, 2): (
        ProductForm(
            "[M, T] x [T, N] -> [G, M, N]",
            "grouped_gemm_wgrad",
            lambda mat_a, mat_b, offs, bias: (mat_a.t(), mat_b, offs),
            lambda mat_a, mat_b, offs: (offs.shape[0], mat_a.shape[0], mat_b.shape[1]),  # type: ignore[union-attr]
        ),
    ),
    (3, 3): (
        ProductForm(
            "[G, M, K] x [G, K, N] -> [G, M, N] by rows",
            "grouped_gemm",
            lambda mat_a, mat_b, offs, bias: (
                mat_a.flatten(0, 1),
                mat_b,
                ends_of(mat_a.shape[0], mat_a.shape[1], mat_a),
                _one_per_group(bias, mat_b),
                None,
            ),
            lambda mat_a, mat_b, offs: (mat_a.shape[0], mat_a.shape[1], mat_b.shape[2]),
            no_rows,
            bias=True,
        ),
        ProductForm(
            "[G, M, K] x [G, K, N] -> [G, M, N] by columns and rows",
            "grouped_gemm_wgrad",
            lambda mat_a, mat_b, offs, bias: (
                mat_a.transpose(1, 2).flatten(0, 1),
                mat_b.flatten(0, 1),
                ends_of(mat_a.shape[0], mat_a.shape[2], mat_a),
            ),
            lambda mat_a, mat_b, offs: (mat_a.shape[0], mat_a.shape[1], mat_b.shape[2]),
            _no_columns,
        ),
    ),
}


class GroupedMMArguments(NamedTuple):
    """The arguments of ``aten::_grouped_mm``."""

    mat_a: Tensor
    mat_b: Tensor
    offs: Tensor | None = None
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None


class OpCall(NamedTuple):
    """A product as a call of one of our ops.

    Attributes:
        form: form of the product.
        operands: positional arguments of the op.
        spec: spec of the op's result.
        result: spec of ATen's result.
        options: keywords of the op.
    """

    form: ProductForm
    operands: tuple
    spec: TensorSpec
    result: TensorSpec
    options: Mapping[str, Any] = MappingProxyType({})

    def destination(self, out: Tensor) -> Tensor:
        """Return the op's destination for ATen's result ``out``: that tensor, or its transpose."""
        if self.form.transposed:
            return self.spec.empty()
        return out if self.spec.shape == self.result.shape else out.view(self.spec.shape)


def call(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    checks: Checks = CHECKS,
) -> OpCall | str:
    """Return the product as a call of one of our ops, or the reason why it is not; reads no values."""
    forms = FORMS.get((mat_a.dim(), mat_b.dim()), ())
    if not forms:
        return "needs operands of 2 or 3 dimensions"
    grouped = mat_a.dim() == 2 or mat_b.dim() == 2
    if grouped != (offs is not None):
        return f"needs `offs` {'for a 2-D operand' if grouped else 'to be None for two 3-D operands'}"
    reason = ""
    for form in forms:
        refused = "has no `bias`" if bias is not None and not form.bias else form.reason(mat_a, mat_b)
        if refused is not None:
            reason = reason or f"{form.letters}: {refused}"
            continue
        if mat_a.dim() == mat_b.dim() == 3 and mat_a.shape[0] != mat_b.shape[0]:
            return f"needs as many matrices in `mat_a` as in `mat_b`, got {mat_a.shape[0]} and {mat_b.shape[0]}"
        operands = form.operands(mat_a, mat_b, offs, bias)
        try:
            spec = checks[form.op](*operands, out_dtype=out_dtype)
        except (TypeError, ValueError) as error:
            return str(error)
        return OpCall(form, operands, spec, laid_out(form.shape(mat_a, mat_b, offs), spec.dtype, spec.device))
    return reason


def laid_out(shape: tuple[Dim, ...], dtype: torch.dtype, device: torch.device) -> TensorSpec:
    """Return the spec of ATen's result of that shape: row-major, rows padded to ``PITCH`` bytes."""
    step = PITCH // dtype.itemsize
    pitch = (shape[-1] + step - 1) // step * step
    return TensorSpec(shape, dtype, device, (*((shape[-2] * pitch,) if len(shape) == 3 else ()), pitch, 1))


class Product(NamedTuple):
    """One of ATen's grouped products.

    Attributes:
        name: the op's, with its library.
        arguments: the named tuple of the op's arguments, with their defaults.
        call: makes an ``OpCall`` from them and ``checks``, or returns the reason why there is none.
        remembered: the checks for real tensors.
        ops: names of our ops that serve it.
        composites: by a form's letters, the product as steps that Dynamo traces.
        traced: the arguments that ``composites`` take; the first of one that is a list.
        seen: returns arguments for inspection where a call of the op must compute nothing.
    """

    name: str
    arguments: type[Any]
    call: Callable[..., OpCall | str]
    remembered: Checks
    ops: tuple[str, ...]
    composites: Mapping[str, Callable[..., Tensor]]
    traced: tuple[str, ...]
    seen: Callable[[Any], Any] = lambda given: given

    def attempt(self, given: Any) -> Tensor | None:
        """Return the product by one of our implementations, or None if there is none; reads nothing on the host."""
        made = self.call(*given, checks=self.remembered)
        if isinstance(made, str):
            return None
        form, device = made.form, made.spec.device
        out = made.result.empty()
        destination = made.destination(out)
        options = {**OPTIONS[form.op], **made.options, "out": destination}
        if debug.active:
            tokens = made.operands[0].shape[form.tokens]
            debug.check_offs(form.op, made.operands[form.offs], tokens)
        with _given_dtypes(device.type):
            for implementation in backends.in_order(form.op, device):
                if implementation.name == GROUPED_MM or implementation.emulates:
                    if implementation.reason_against(device, made.operands, options) is None:
                        return None  # ATen's kernel has fewer steps
                elif implementation.serve(device, made.operands, options) is None:
                    if form.transposed:
                        out.copy_(destination.t())
                    return out
        return None

    def described(self, *args: Any, **kwargs: Any) -> tuple[torch.device, tuple, dict[str, Any]]:
        """Return the device, args and kwargs that implementations in the registry get."""
        given = self.arguments(*args, **kwargs)
        return given.mat_a.device, given, {}

    def reason_against(self, op: str, syncs: bool, *given: Any) -> backends.Reason:
        """Return why no implementation of ``op`` with this ``syncs`` serves a call, or None."""
        made = self.call(*self.seen(given))
        if isinstance(made, str):
            return made
        if made.form.op != op:
            return f"{made.form.letters} is tgl::{made.form.op}"
        found = _report(made)
        if found.chosen is None:
            return found.reason()
        if found.chosen.name == GROUPED_MM or found.emulates:
            return "no kernel of tgl takes the call: " + "; ".join(f"{i.name}: {reason}" for i, reason in found.refused)
        return None if found.syncs == syncs else f"served by {found.chosen.name}"

    def copies(self, *given: Any) -> dict[str, int]:
        """Return the names and bytes of tensors that are copied for a served call."""
        made = self.call(*self.seen(given))
        assert isinstance(made, OpCall)
        size = made.spec.meta()
        own = {"out": size.numel() * size.element_size()} if made.form.transposed else {}
        return {**dict(_report(made).copies), **own}

    def prepare(self, *given: Any) -> None:
        """Compile and load the kernels of a served call."""
        made = self.call(*given)
        assert isinstance(made, OpCall)
        backends.prepare(made.form.op, made.spec.device, *made.operands, **_options(made))


_NOTHING = nullcontext()


def _given_dtypes(device_type: str) -> AbstractContextManager:
    """Disable autocast: ATen's kernel keeps the given dtypes, while ATen steps inside our ops would cast."""
    return torch.autocast(device_type, enabled=False) if autocast_enabled(device_type) else _NOTHING


# --- for ``tgl.explain`` ----------------------------------------------------------------------------------------------


def _options(made: OpCall) -> dict[str, Any]:
    """Return the keywords of the op's implementations, with a stand-in for the destination."""
    out = made.spec.meta() if made.form.transposed else made.destination(made.result.meta())
    return {**OPTIONS[made.form.op], **made.options, "out": out}


def _report(made: OpCall) -> backends.Explanation:
    return backends.report(made.form.op, made.spec.device, *made.operands, **_options(made))


# --- in a graph -------------------------------------------------------------------------------------------------------


def composite(form: ProductForm) -> Callable[..., Tensor]:
    """Return the product as steps that Dynamo traces: our op, and ATen's memory layout where the op has another."""

    def product(
        mat_a: Tensor,
        mat_b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        op = getattr(torch.ops.tgl, form.op).default
        y: Tensor = op(*form.operands(mat_a, mat_b, offs, bias), out_dtype=out_dtype)
        return form.as_atens(y, form.shape(mat_a, mat_b, offs))

    return product


COMPOSITES = {form.letters: composite(form) for forms in FORMS.values() for form in forms}
PRODUCT = Product(OP, GroupedMMArguments, call, REMEMBERED, tuple(CHECKS), COMPOSITES, GroupedMMArguments._fields)
