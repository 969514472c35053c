"""Experts of transformers with frozen FP8 or FP4 weights (``FP8Experts``), on the ops for quantised operands.

For FP8 the results are those of transformers' own kernels: tokens are quantised by ``activation_scheme``, products are
summed in float32, and the gradient of the input goes through the dequantised weights. Packed FP4 weights are multiplied
by unquantised tokens, unlike in transformers' kernels, which quantise them. Weights and scales get no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..meta.formats import E4M3, E8M0, ELEMENTS, FORMATS
from ..meta.placement import ceil_div
from ..meta.quantized import SOURCES
from ..nn._activation import activate
from ..nn._errors import fail
from ..nn.routing import combine, dispatch, route
from ..ops import (
    group_dequantize,
    group_quantize,
    grouped_gemm,
    grouped_gemm_packed,
    grouped_gemm_scaled,
    to_blocked_scale,
)
from ._transformers_gates import activation

_BLOCK, _MX_BLOCK = 128, 32  # elements of a block along K
_MAX = ELEMENTS[E4M3].max
_SMALLEST_SCALE = 1e-12  # of transformers' kernels, for rows of zeros
_FP4 = (torch.int8, torch.float4_e2m1fn_x2)  # two elements per byte, as checkpoints have them
_FP4_SCHEME = "dynamic"


class _Rows(NamedTuple):
    """Quantised rows ``[T, K]`` and their scales, in the layout of ``grouped_gemm_scaled``."""

    data: Tensor
    scale: Tensor


class _Weight(NamedTuple):
    """One projection of the experts.

    Attributes:
        name: name of the parameter.
        data: ``[G, N, K]`` E4M3.
        scale: the scale that multiplies the elements, as the module stores it.
        token_scale: float32 ``[G]``, the scale of every expert's tokens; None where each row has its own.
    """

    name: str
    data: Tensor
    scale: Tensor
    token_scale: Tensor | None


# --- how tokens are quantised -----------------------------------------------------------------------------------------


def _in_blocks(x: Tensor, offs: Tensor, _: Tensor | None) -> _Rows:
    made = group_quantize(x, offs, format="fp8_block", columnwise=False, power_of_two=False)
    return _Rows(made.data, made.scale)


def _in_mx_blocks(x: Tensor, offs: Tensor, _: Tensor | None) -> _Rows:
    made = group_quantize(x, offs, format="mxfp8", columnwise=False, scale_layout="blocked")
    return _Rows(made.data, made.scale)


def _by_row(x: Tensor, offs: Tensor, _: Tensor | None) -> _Rows:
    amax = x.float().abs().amax(1)
    # By a tensor: CUDA divides by a number as it multiplies by the inverse, an ulp away, and with it every element
    # halfway between two codes becomes the other one.
    most = torch.full_like(amax, _MAX, dtype=amax.dtype, device=amax.device)
    scale = (amax / most).clamp(min=_SMALLEST_SCALE)
    return _scaled_rows(x, scale)


def _by_expert(x: Tensor, offs: Tensor, token_scale: Tensor | None) -> _Rows:
    assert token_scale is not None
    rows = torch.arange(x.shape[0], device=x.device, dtype=offs.dtype)
    expert = torch.bucketize(rows, offs, right=True).clamp(max=offs.shape[0] - 1)
    return _scaled_rows(x, token_scale.float()[expert])


def _scaled_rows(x: Tensor, scale: Tensor) -> _Rows:
    """Return ``x / scale[:, None]`` in E4M3, saturating, with the scale of a row in each of its blocks."""
    data = (x.float() / scale[:, None]).clamp(-_MAX, _MAX).to(E4M3)
    blocks = ceil_div(x.shape[1], _BLOCK)
    return _Rows(data, scale.expand(blocks, -1).contiguous().t())


# --- how weights are stored -------------------------------------------------------------------------------------------


def _block_scale(weight: _Weight) -> Tensor:
    """Return the scales of blocks of 128 x 128: ``[G, ceil(N / 128), ceil(K / 128)]`` float32."""
    groups, width, depth = weight.data.shape
    _check_scale(weight, (E8M0, torch.float32), (groups, ceil_div(width, _BLOCK), ceil_div(depth, _BLOCK)))
    return weight.scale.float()


def _tensor_scale(weight: _Weight) -> Tensor:
    """Return one scale per matrix, or one for its gate and one for its linear half, expanded to blocks of 128 x 128."""
    groups, width, depth = weight.data.shape
    parts = weight.scale.shape[1] if weight.scale.dim() == 3 else 1
    _check_scale(weight, (E8M0, torch.float32), (groups, 2 if parts == 2 else 1, 1))
    if parts > 1 and width % (_BLOCK * parts):
        fail(
            f"`{weight.name}` must have a multiple of {_BLOCK * parts} rows for {parts} scales per expert, but has "
            f"{width}"
        )
    blocks = (ceil_div(width, _BLOCK) // parts, ceil_div(depth, _BLOCK))
    wide = weight.scale.float()[:, :, None].expand(-1, -1, *blocks)
    return wide.reshape(groups, parts * blocks[0], blocks[1]).contiguous()


def _mx_scale(weight: _Weight) -> Tensor:
    """Return the scales of blocks of 32 along K: ``[G, N, ceil(K / 32)]`` bytes."""
    groups, width, depth = weight.data.shape
    _check_scale(weight, (E8M0,), (groups, width, ceil_div(depth, _MX_BLOCK)))
    return weight.scale.view(torch.uint8)


class _Storage(NamedTuple):
    """The storage of experts' weights, and the functions that serve it.

    Attributes:
        format: format of the ops' operands.
        scale: returns the scale of a weight as ``group_dequantize`` takes it.
        rows: quantisers of tokens, by ``activation_scheme``.
    """

    format: str
    scale: Callable[[_Weight], Tensor]
    rows: dict[str, Callable[[Tensor, Tensor, Tensor | None], _Rows]]


# By ``weight_block_size``; None is one scale per tensor.
_STORAGE: dict[tuple[int, int] | None, _Storage] = {
    (128, 128): _Storage("fp8_block", _block_scale, {"dynamic": _in_blocks, "static": _by_expert}),
    (1, 32): _Storage("mxfp8", _mx_scale, {"dynamic": _in_mx_blocks}),
    None: _Storage("fp8_block", _tensor_scale, {"dynamic": _by_row, "static": _by_expert}),
}


def _check_scale(weight: _Weight, dtypes: tuple[torch.dtype, ...], shape: tuple[Any, ...]) -> None:
    scale, argument = weight.scale, f"{weight.name}_scale_inv"
    if scale.dtype not in dtypes:
        fail(f"`{argument}` must be {' or '.join(map(str, dtypes))}, but got {scale.dtype}", TypeError)
    if scale.shape != shape:
        fail(f"`{argument}` must have shape {shape}, but got {tuple(scale.shape)}")


# --- the product ------------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """The product of quantised rows and their expert's transposed weight, ``[T, N]``, as a function of rows ``x [T,
    K]``.

    ``weight [G, N, K]`` and its ``scale`` are as ``group_dequantize`` takes them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _Rows, weight: Tensor, scale: Tensor, offs: Tensor, format: str) -> Tensor:
        ctx.save_for_backward(weight, scale, offs)
        ctx.format = format
        layout = FORMATS[format].layouts[-1]  # that of the tensor cores, if there is one
        if layout == "blocked":
            scale = to_blocked_scale(scale, None, shape=weight.shape, format=format)
        return grouped_gemm_scaled(*rows, weight, scale, offs, format=format, scale_layout=layout, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, offs = ctx.saved_tensors
        square = FORMATS[ctx.format].square_scales
        values = group_dequantize(weight, scale, format=ctx.format, block_2d=square, out_dtype=dy.dtype)
        return grouped_gemm(dy, values, offs), None, None, None, None, None


def _projection(weight: _Weight, block_size: tuple[int, int] | None, scheme: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that multiplies grouped rows ``[T, K]``, with ends ``offs``, by ``weight``; raises if
    unsupported.
    """
    if weight.data.dtype in _FP4:
        if scheme != _FP4_SCHEME:
            fail(f"`activation_scheme` must be {_FP4_SCHEME!r} for packed FP4, but got {scheme!r}")
        groups, width, packed = weight.data.shape
        _check_scale(weight, (E8M0,), (groups, width, ceil_div(2 * packed, _MX_BLOCK)))
        data, scale = weight.data.view(torch.uint8), weight.scale.view(torch.uint8)
        return lambda x, offs: grouped_gemm_packed(x, data, scale, offs, format="mxfp4")
    storage = _storage(block_size, scheme)
    quantise, weight_scale = storage.rows[scheme], storage.scale(weight)

    def product(x: Tensor, offs: Tensor) -> Tensor:
        rows = quantise(x.detach(), offs, weight.token_scale)
        return _Product.apply(x, rows, weight.data, weight_scale, offs, storage.format)

    return product


# --- the experts ------------------------------------------------------------------------------------------------------


def is_quantized(experts: nn.Module) -> bool:
    """Return whether ``experts`` are ``FP8Experts`` with quantised weights; a checkpoint may leave them unquantised."""
    return hasattr(experts, "activation_scheme") and experts.down_proj.element_size() == 1  # type: ignore[union-attr,operator]


def forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, num_rows: int | None = None
) -> Tensor:
    """Run ``experts_forward`` for ``FP8Experts``; arguments and result are those of that function.

    Raises:
        TypeError: ``hidden_states`` are not float32, bfloat16 or float16; weights or scales are of no dtype that is
            served.
        ValueError: ``weight_block_size``, ``activation_scheme`` or shapes of scales are not served.
    """
    flags: Any = experts
    if hidden_states.dtype not in SOURCES:
        must = " or ".join(map(str, SOURCES))
        fail(f"`hidden_states` must be {must} for FP8 experts, but got {hidden_states.dtype}", TypeError)
    up_name = "gate_up_proj" if flags.has_gate else "up_proj"
    block_size = None if flags.block_size is None else tuple(flags.block_size)
    # The scale of tokens has this name without a gate too.
    scales = {up_name: "gate_up_proj_activation_scale", "down_proj": "down_proj_activation_scale"}
    weights = [_weight(flags, name, token_scale) for name, token_scale in scales.items()]
    up, down = (_projection(weight, block_size, flags.activation_scheme) for weight in weights)
    routing = route(top_k_index, flags.num_experts, num_rows, sentinels=True)
    rows = dispatch(hidden_states, routing)
    rows = up(rows, routing.offs)
    fused = activation(experts)
    if fused is not None:
        rows = activate(rows, routing.offs, None, **fused.parameters(experts))
    else:
        rows = flags._apply_gate(rows) if flags.has_gate else flags.act_fn(rows)
    rows = down(rows, routing.offs)
    # Not before the second projection: its scales are of the activation as it is.
    late = top_k_weights.masked_fill(top_k_index >= flags.num_experts, 0)
    return combine(rows, routing, late)


def _storage(block_size: tuple[int, int] | None, scheme: str) -> _Storage:
    found = _STORAGE.get(block_size)
    if found is None:
        fail(f"`weight_block_size` must be {', '.join(map(str, _STORAGE))} for FP8 experts, but got {block_size}")
    if scheme not in found.rows:
        must = " or ".join(map(repr, found.rows))
        fail(f"`activation_scheme` must be {must} for `weight_block_size` {block_size}, but got {scheme!r}")
    return found


def _weight(flags: Any, name: str, token_scale: str) -> _Weight:
    data = getattr(flags, name)
    if data.dtype not in (E4M3, *_FP4):
        must = " or ".join(map(str, (E4M3, *_FP4)))
        fail(f"`{name}` must be {must}, but got {data.dtype}", TypeError)
    static = flags.activation_scheme == "static"
    scale = getattr(flags, f"{name}_scale_inv").detach()
    return _Weight(name, data.detach(), scale, getattr(flags, token_scale).detach() if static else None)
