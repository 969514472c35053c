"""ATen's scaled grouped products as ops of ours: which recipe and form is which op.

``torch._scaled_grouped_mm`` tells recipes apart by the dtype of scales; ``torch._scaled_grouped_mm_v2``, which
``torch.nn.functional.scaled_grouped_mm`` calls, is given them. Two are served:

- row-wise: FP8 operands with a float32 scale for each row of the first and each column of the second, of every group;
- MXFP8: operands with an E8M0 scale for 32 elements of the contraction, in torch's layout, in which each group's are
  blocked by themselves. The ops read another one, and the scales are moved there on the device.

Others, and what the ops cannot take, are ATen's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad

from ..meta import row_scaled, scaled
from ..meta.placement import ROW_UNIT, TILE_COLUMNS, ceil_div
from ..meta.remembered import remembered
from ..meta.specs import Dim
from ..ops.scale_layout import from_torch_scale_layout, to_blocked_scale
from ._torch_products import Checks, OpCall, Product, ProductForm, ends_of, laid_out, no_rows

NAME, WGRAD = row_scaled.OP, row_scaled.WGRAD
OP, OP_V2 = "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2"
MX, BLOCK = "mxfp8", 32  # elements of ``ScalingType.BlockWise1x32``
CHECKS: Checks = {
    NAME: row_scaled.grouped_gemm_row_scaled,
    WGRAD: row_scaled.grouped_gemm_row_scaled_wgrad,
    "grouped_gemm_scaled": scaled.grouped_gemm_scaled,
    "grouped_gemm_scaled_wgrad": scaled.grouped_gemm_scaled_wgrad,
}
"""Checks of an op's operands, which also return the specs of its result."""
REMEMBERED: Checks = {
    NAME: remembered(row_scaled.grouped_gemm_row_scaled, {"a": "rows", "a_scale": "vector"}),
    WGRAD: remembered(row_scaled.grouped_gemm_row_scaled_wgrad, {"a": "transposed", "b": "transposed"}),
    "grouped_gemm_scaled": remembered(
        scaled.grouped_gemm_scaled,
        {"a": "contiguous rows", "a_scale": "tokens"},
        scaled.grouped_gemm_scaled_moves,
    ),
    "grouped_gemm_scaled_wgrad": scaled.grouped_gemm_scaled_wgrad,
}
"""The checks for real tensors, whose sizes are not symbolic."""
NAMES = ("mat_a", "mat_b", "scale_a", "scale_b", "offs", "out_dtype")
"""Names of the arguments of ``COMPOSITES``."""


class ScaledGroupedMMArguments(NamedTuple):
    """The arguments of ``aten::_scaled_grouped_mm``."""

    mat_a: Tensor
    mat_b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    offs: Tensor | None = None
    bias: Tensor | None = None
    scale_result: Tensor | None = None
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False


class ScaledGroupedMMV2Arguments(NamedTuple):
    """The arguments of ``aten::_scaled_grouped_mm_v2``."""

    mat_a: Tensor
    mat_b: Tensor
    scale_a: Sequence[Tensor]
    recipe_a: Sequence[int]
    swizzle_a: Sequence[int]
    scale_b: Sequence[Tensor]
    recipe_b: Sequence[int]
    swizzle_b: Sequence[int]
    offs: Tensor | None = None
    bias: Tensor | None = None
    out_dtype: torch.dtype | None = None
    contraction_dim: Sequence[int] = ()
    use_fast_accum: bool = False


# --- forms of row-wise scales -----------------------------------------------------------------------------------------


def _by_group(scale: Tensor, offs: Tensor) -> Tensor:
    """Return scales ``[G * rows]`` as ``[G, rows]``."""
    return scale.view(offs.shape[0], -1) if offs.shape[0] else scale.new_empty(0, 0)


ROW_WISE: dict[tuple[int, int], ProductForm] = {
    (2, 3): ProductForm(
        "row-wise [T, K] x [G, K, N] -> [T, N]",
        NAME,
        lambda mat_a, mat_b, scale_a, scale_b, offs: (mat_a, scale_a, mat_b.transpose(1, 2), scale_b, offs),
        lambda mat_a, mat_b, offs: (mat_a.shape[0], mat_b.shape[2]),
        offs=4,
    ),
    (3, 2): ProductForm(
        "row-wise [G, M, K] x [K, T] -> [M, T]",
        NAME,
        lambda mat_a, mat_b, scale_a, scale_b, offs: (mat_b.t(), scale_b, mat_a, scale_a, offs),
        lambda mat_a, mat_b, offs: (mat_a.shape[1], mat_b.shape[1]),
        transposed=True,
        offs=4,
    ),
    (2, 2): ProductForm(
        "row-wise [M, T] x [T, N] -> [G, M, N]",
        WGRAD,
        lambda mat_a, mat_b, scale_a, scale_b, offs: (
            mat_a,
            _by_group(scale_a, offs),
            mat_b.t(),
            _by_group(scale_b, offs),
            offs,
        ),
        lambda mat_a, mat_b, offs: (offs.shape[0], mat_a.shape[0], mat_b.shape[1]),  # type: ignore[union-attr]
        offs=4,
        tokens=1,
    ),
    (3, 3): ProductForm(
        "row-wise [G, M, K] x [G, K, N] -> [G, M, N]",
        NAME,
        lambda mat_a, mat_b, scale_a, scale_b, offs: (
            mat_a.flatten(0, 1),
            scale_a.flatten(),
            mat_b.transpose(1, 2),
            scale_b,
            ends_of(mat_a.shape[0], mat_a.shape[1], mat_a),
        ),
        lambda mat_a, mat_b, offs: (mat_a.shape[0], mat_a.shape[1], mat_b.shape[2]),
        no_rows,
        offs=4,
    ),
}

# --- forms of MXFP8 ---------------------------------------------------------------------------------------------------


def _bytes(scale: Tensor, *shape: Dim) -> Tensor:
    """Return ``scale`` as bytes of ``shape``; surplus bytes are padding, and missing ones are added as padding."""
    flat, count = scale.view(torch.uint8).flatten(), 1
    for size in shape:
        count = count * size  # type: ignore[assignment]
    have = flat.shape[0]
    if have != count:
        flat = flat[:count] if have > count else pad(flat, (0, count - have))
    return flat.view(shape)


def _mx_rows(scale: Tensor, rows: Dim, depth: Dim, offs: Tensor) -> Tensor:
    """Return the scales of ``[T, K]`` in the kernels' layout."""
    named: dict[str, Any] = {"shape": (rows, depth), "format": MX}
    columns = ceil_div(ceil_div(depth, BLOCK), TILE_COLUMNS) * TILE_COLUMNS
    given = _bytes(scale, rows + ROW_UNIT * offs.shape[0], columns)
    return to_blocked_scale(from_torch_scale_layout(given, offs, **named), offs, **named)


def _mx_columns(scale: Tensor, tokens: Dim, features: Dim, offs: Tensor) -> Tensor:
    """Return the scales of ``[F, T]``, whose columns lie in groups, in the kernels' layout."""
    named: dict[str, Any] = {"shape": (tokens, features), "format": MX, "columnwise": True}
    columns = ceil_div(tokens, BLOCK) + TILE_COLUMNS * offs.shape[0]
    given = _bytes(scale, ceil_div(features, ROW_UNIT) * ROW_UNIT, columns)
    return to_blocked_scale(from_torch_scale_layout(given, offs, **named), offs, **named)


MXFP8: dict[tuple[int, int], ProductForm] = {
    (2, 3): ProductForm(
        "MXFP8 [T, K] x [G, K, N] -> [T, N]",
        "grouped_gemm_scaled",
        lambda mat_a, mat_b, scale_a, scale_b, offs: (
            mat_a,
            _mx_rows(scale_a, mat_a.shape[0], mat_a.shape[1], offs),
            mat_b.transpose(1, 2),
            scale_b.view(torch.uint8),
            offs,
            *(None,) * 4,
        ),
        lambda mat_a, mat_b, offs: (mat_a.shape[0], mat_b.shape[2]),
        offs=4,
    ),
    (2, 2): ProductForm(
        "MXFP8 [M, T] x [T, N] -> [G, M, N]",
        "grouped_gemm_scaled_wgrad",
        lambda mat_a, mat_b, scale_a, scale_b, offs: (
            mat_a.t().contiguous(),
            _mx_columns(scale_a, mat_a.shape[1], mat_a.shape[0], offs),
            mat_b.contiguous(),
            _mx_columns(scale_b, mat_b.shape[0], mat_b.shape[1], offs),
            offs,
            None,
            None,
        ),
        lambda mat_a, mat_b, offs: (offs.shape[0], mat_a.shape[0], mat_b.shape[1]),  # type: ignore[union-attr]
        offs=4,
    ),
}
RECIPES = {"row-wise": ROW_WISE, "MXFP8": MXFP8}
OPTIONS: dict[str, dict[str, Any]] = {"row-wise": {}, "MXFP8": {"format": MX, "scale_layout": "blocked"}}
"""Keywords of the ops, by recipe."""

# --- which it is ------------------------------------------------------------------------------------------------------

_SCALES = {torch.float32: "row-wise", torch.float8_e8m0fnu: "MXFP8"}
_ROW_WISE, _BLOCKS = ScalingType.RowWise.value, ScalingType.BlockWise1x32.value
_PLAIN, _SWIZZLED = SwizzleType.NO_SWIZZLE.value, SwizzleType.SWIZZLE_32_4_4.value
_GIVEN: dict[tuple[tuple[int, ...], tuple[int, ...]], str] = {
    ((_ROW_WISE,), ()): "row-wise",
    ((_ROW_WISE,), (_PLAIN,)): "row-wise",
    ((_BLOCKS,), (_SWIZZLED,)): "MXFP8",
}
"""Recipes by their scaling types and swizzles."""


def _recipe(scale_a: Tensor, scale_b: Tensor) -> str | None:
    """Return the recipe for scales of these dtypes, or None."""
    return _SCALES.get(scale_a.dtype) if scale_a.dtype == scale_b.dtype else None


def call(*args: Any, checks: Checks = CHECKS, **named: Any) -> OpCall | str:
    """Return the call of one of our ops that computes the product, or the reason why there is none; reads no values.

    Sums are formed in float32 whether ``use_fast_accum`` is set or not.
    """
    mat_a, mat_b, scale_a, scale_b, offs, bias, scale_result, out_dtype, _ = ScaledGroupedMMArguments(*args, **named)
    recipe = _recipe(scale_a, scale_b)
    if recipe is None:
        must = "float32 (row-wise) or both float8_e8m0fnu (MXFP8)"
        return f"needs `scale_a` and `scale_b` both {must}, got {scale_a.dtype} and {scale_b.dtype}"
    for name, given in (("bias", bias), ("scale_result", scale_result)):
        if given is not None:
            return f"has no `{name}`"
    if mat_a.dtype == mat_b.dtype == torch.float4_e2m1fn_x2:
        return "takes operands of 8 bits, got torch.float4_e2m1fn_x2"
    form = RECIPES[recipe].get((mat_a.dim(), mat_b.dim()))
    if form is None:
        dims = ", ".join(f"{a}-D x {b}-D" for a, b in RECIPES[recipe])
        return f"takes operands of {recipe} scales that are {dims}, got {mat_a.dim()}-D x {mat_b.dim()}-D"
    grouped = mat_a.dim() == 2 or mat_b.dim() == 2
    if grouped != (offs is not None):
        return f"needs `offs` {'for a 2-D operand' if grouped else 'to be None for two 3-D operands'}"
    refused = form.reason(mat_a, mat_b) or _scales_reason(recipe, mat_a, mat_b, scale_a, scale_b, offs)
    if refused is not None:
        return f"{form.letters}: {refused}"
    options = OPTIONS[recipe]
    try:
        operands = form.operands(mat_a, mat_b, scale_a, scale_b, offs)
        spec = checks[form.op](*operands, **options, out_dtype=out_dtype)
    except (TypeError, ValueError) as error:
        return str(error)
    result = laid_out(form.shape(mat_a, mat_b, offs), spec.dtype, spec.device)
    return OpCall(form, operands, spec, result, options)


def _scales_reason(
    recipe: str, mat_a: Tensor, mat_b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None
) -> str | None:
    """Return why scales cannot be viewed in the op's layout, or None."""
    if offs is not None and (offs.dtype != torch.int32 or offs.dim() != 1):
        return f"needs `offs` int32 [G], got {offs.dtype} {tuple(offs.shape)}"
    both = ("scale_a", scale_a, mat_a, mat_a.shape[-2]), ("scale_b", scale_b, mat_b, mat_b.shape[-1])
    for name, scale, operand, lines in both:
        dims = 1 if recipe == "row-wise" and operand.dim() == 2 else 2
        if scale.dim() != dims or not scale.is_contiguous():
            return f"needs `{name}` contiguous and {dims}-D, got shape {tuple(scale.shape)}, strides {scale.stride()}"
        if recipe == "row-wise" and mat_a.dim() == mat_b.dim() == 2 and offs is not None:
            wanted = lines * offs.shape[0]
            if scale.shape[0] != wanted:
                return f"needs `{name}` of {wanted} scales, {lines} for each group, got {scale.shape[0]}"
    depth = mat_a.shape[1]
    if recipe == "MXFP8" and mat_b.dim() == 3 and depth % BLOCK:
        return f"needs K a multiple of {BLOCK}, got {depth}"
    return None


def call_v2(*args: Any, checks: Checks = CHECKS, **named: Any) -> OpCall | str:
    """Return what ``call`` does, for the arguments of ``aten::_scaled_grouped_mm_v2``."""
    given = ScaledGroupedMMV2Arguments(*args, **named)
    recipes = (given.recipe_a, given.swizzle_a), (given.recipe_b, given.swizzle_b)
    asked = [_GIVEN.get((tuple(recipe), tuple(swizzle))) for recipe, swizzle in recipes]
    if asked[0] is None or asked[0] != asked[1]:
        got = " and ".join(f"{list(recipe)} swizzled {list(swizzle)}" for recipe, swizzle in recipes)
        return f"takes row-wise scales, and MXFP8's swizzled by 32 x 4 x 4, of both operands; got recipes {got}"
    if len(given.scale_a) != 1 or len(given.scale_b) != 1:
        return f"needs one tensor of scales for each operand, got {len(given.scale_a)} and {len(given.scale_b)}"
    scale_a, scale_b = given.scale_a[0], given.scale_b[0]
    if asked[0] != _recipe(scale_a, scale_b):
        return f"needs {asked[0]} scales of another dtype than {scale_a.dtype} and {scale_b.dtype}"
    if tuple(given.contraction_dim) not in ((), (-1, -2)):
        return f"contracts dimensions -1 and -2, not {list(given.contraction_dim)}"
    ends, bias, dtype = given.offs, given.bias, given.out_dtype
    return call(given.mat_a, given.mat_b, scale_a, scale_b, ends, bias, out_dtype=dtype, checks=checks)


def seen(given: tuple) -> tuple:
    """Return arguments without values where the recipe's scales would be moved."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    scales = given[2] if isinstance(given[2], Tensor) else next(iter(given[2]), None)
    if scales is None or scales.dtype == torch.float32 or detect_fake_mode(given) is not None:
        return given
    mode = FakeTensorMode()
    return tree_map_only(Tensor, mode.from_tensor, tuple(given))


# --- in a graph -------------------------------------------------------------------------------------------------------


def composite(form: ProductForm, options: dict[str, Any]) -> Callable[..., Tensor]:
    """Return the product as steps that Dynamo traces: our op, and ATen's memory layout where the op has another."""

    def product(
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        offs: Tensor | None,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        op = getattr(torch.ops.tgl, form.op).default
        operands = form.operands(mat_a, mat_b, scale_a, scale_b, offs)
        return form.as_atens(op(*operands, **options, out_dtype=out_dtype), form.shape(mat_a, mat_b, offs))

    return product


COMPOSITES = {
    form.letters: composite(form, OPTIONS[recipe]) for recipe, forms in RECIPES.items() for form in forms.values()
}

PRODUCTS = tuple(
    Product(name, arguments, made, REMEMBERED, tuple(CHECKS), COMPOSITES, NAMES, seen)
    for name, arguments, made in ((OP, ScaledGroupedMMArguments, call), (OP_V2, ScaledGroupedMMV2Arguments, call_v2))
    if hasattr(torch.ops.aten, name.removeprefix("aten::"))
)
