"""A call of every op for the report of ``tgl.doctor``: sizes that every kernel takes, and nothing optional.

``CALLS`` has an entry for each op of the registry, which a test compares; the report names an op that lacks one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from .meta.formats import FORMATS
from .ops import group_quantize

ROWS, WIDTH, GROUPS, TOP_K, EXPERTS = 256, 256, 2, 2, 8
TOKENS = ROWS // TOP_K
ROW_WISE, FP8 = "FP8 by rows", torch.float8_e4m3fn

Call = tuple[str, tuple, dict[str, Any]]
"""Dtype or format, and the arguments."""


class Operands:
    """Tensors on a device, which may be fake."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.offs = self.int32(GROUPS)
        self.places = self.int32(ROWS)
        self.rows, self.wide = self.made(ROWS, WIDTH), self.made(ROWS, 2 * WIDTH)
        self.matrices, self.wide_matrices = self.made(GROUPS, WIDTH, WIDTH), self.made(GROUPS, WIDTH, 2 * WIDTH)

    def made(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.where)

    def int32(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.where)


class Quantised(NamedTuple):
    """Operands of a format.

    Attributes:
        options: of the ops: the format, and the layout of scales that kernels read.
        rows: components of ``[T, K]``.
        matrices: those of ``[G, N, K]``, as GEMMs read weights.
        matrix_options: of ``matrices``.
        amax: that of rows and of matrices, where values depend on it.
        columnwise_amax: that of the columnwise components of rows, twice.
    """

    options: dict[str, Any]
    rows: Any
    matrices: Any
    matrix_options: dict[str, Any]
    amax: tuple[Tensor | None, ...]
    columnwise_amax: tuple[Tensor | None, ...]

    @property
    def columns(self) -> tuple[Tensor, Tensor]:
        return self.rows.columnwise_data, self.rows.columnwise_scale

    @property
    def product(self) -> tuple[Tensor, ...]:
        return self.rows.data, self.rows.scale, self.matrices.data, self.matrices.scale


def quantised(on: Operands, name: str, layout: str | None = None) -> Quantised:
    form = FORMATS[name]
    layout = layout or ("blocked" if _blocked(name) else "compact")
    options: dict[str, Any] = {"format": name, "scale_layout": layout}
    of_matrices = {**options, "block_2d": True} if form.square_scales else options
    rows = group_quantize(on.rows, on.offs, **options)
    matrices = group_quantize(on.matrices, None, **of_matrices)
    both = (rows.amax, matrices.amax) if form.decodes_with_amax else (None, None)
    columns = (rows.columnwise_amax,) * 2 if form.decodes_with_amax else (None, None)
    return Quantised(options, rows, matrices, of_matrices, both, columns)


def _dense(
    arguments: Callable[[Operands], tuple], dtype: str = "bfloat16", **options: Any
) -> Callable[[Operands], Iterator[Call]]:
    """A call in one dtype."""

    def calls(on: Operands) -> Iterator[Call]:
        yield dtype, arguments(on), options

    return calls


def _by_rows(arguments: Callable[[Operands], tuple]) -> Callable[[Operands], Iterator[Call]]:
    """A call on FP8 operands with a scale for each row."""

    def calls(on: Operands) -> Iterator[Call]:
        yield ROW_WISE, arguments(on), {"out_dtype": torch.bfloat16}

    return calls


def _formats(
    arguments: Callable[[Operands, Quantised], tuple[tuple, dict[str, Any]]],
    layout: str | None = None,
    only: Callable[[str], bool] = lambda name: True,
) -> Callable[[Operands], Iterator[Call]]:
    """A call in every format that ``only`` takes."""

    def calls(on: Operands) -> Iterator[Call]:
        for name in filter(only, FORMATS):
            yield name, *arguments(on, quantised(on, name, layout))

    return calls


def _atens(on: Operands) -> tuple[Tensor, ...]:
    return on.made(ROWS, WIDTH, dtype=FP8), on.made(GROUPS, WIDTH, WIDTH, dtype=FP8).transpose(1, 2)


def _scales(on: Operands) -> tuple[Tensor, Tensor]:
    return on.made(ROWS, dtype=torch.float32), on.made(GROUPS, WIDTH, dtype=torch.float32)


def _second_version(on: Operands) -> tuple:
    recipe = [ScalingType.RowWise.value], [0]
    a_scale, b_scale = _scales(on)
    return (*_atens(on), [a_scale], *recipe, [b_scale], *recipe, on.offs)


def _fp8_rows(on: Operands) -> tuple[Tensor, Tensor]:
    return on.made(ROWS, WIDTH, dtype=FP8), on.made(ROWS, dtype=torch.float32)


def _fp8_columns(on: Operands) -> tuple[Tensor, Tensor]:
    return on.made(WIDTH, ROWS, dtype=FP8), on.made(GROUPS, WIDTH, dtype=torch.float32)


def _of_scales(on: Operands, q: Quantised) -> tuple[tuple, dict[str, Any]]:
    options = {"shape": (ROWS, WIDTH), "layout": "blocked", "format": q.options["format"]}
    return (q.rows.scale, on.offs), options


def _blocked(name: str) -> bool:
    return "blocked" in FORMATS[name].layouts


CALLS: dict[str, Callable[[Operands], Iterator[Call]]] = {
    "topk_router": _dense(lambda on: (on.made(TOKENS, EXPERTS), TOP_K)),
    "topk_router_backward": _dense(
        lambda on: (on.made(TOKENS, TOP_K, dtype=torch.float32), on.made(TOKENS, EXPERTS), on.int32(TOKENS, TOP_K))
    ),
    "route": _dense(lambda on: (on.int32(TOKENS, TOP_K), EXPERTS), "int32"),
    "splits_to_offsets": _dense(lambda on: (on.int32(GROUPS),), "int32"),
    "dispatch": _dense(lambda on: (on.rows, on.places, on.places, 1)),
    "combine": _dense(lambda on: (on.rows, on.places, on.places, 1)),
    "combine_backward": _dense(
        lambda on: (on.rows, on.rows, on.places, on.places, 1, on.made(ROWS, 1, dtype=torch.float32))
    ),
    "grouped_gemm": _dense(lambda on: (on.rows, on.matrices, on.offs)),
    "grouped_gemm_low_rank": _dense(
        lambda on: (on.rows, on.matrices, on.made(ROWS, 16), on.made(GROUPS, 16, WIDTH), on.offs)
    ),
    "grouped_gemm_low_rank_activation": _dense(
        lambda on: (on.rows, on.wide_matrices, on.made(ROWS, 16), on.made(GROUPS, 16, 2 * WIDTH), on.offs)
    ),
    "grouped_gemm_activation": _dense(lambda on: (on.rows, on.wide_matrices, on.offs)),
    "grouped_gemm_dactivation": _dense(lambda on: (on.rows, on.matrices, on.wide, on.offs)),
    "grouped_gemm_wgrad": _dense(lambda on: (on.rows, on.rows, on.offs)),
    "grouped_gemm_wgrad_accumulate_": _dense(lambda on: (on.rows, on.rows, on.offs, on.matrices)),
    "grouped_activation": _dense(lambda on: (on.wide, on.offs)),
    "grouped_activation_backward": _dense(lambda on: (on.rows, on.wide, on.offs)),
    "grouped_dbias": _dense(lambda on: (on.rows, on.offs)),
    "grouped_dbias_dscales": _dense(
        lambda on: (on.rows, on.made(GROUPS, WIDTH), on.made(ROWS, dtype=torch.float32), on.offs)
    ),
    "batched_syrk": _dense(lambda on: (on.matrices,)),
    "grouped_mlp": _dense(lambda on: (on.rows, on.wide_matrices, on.matrices, on.offs)),
    "grouped_mlp_backward": _dense(
        lambda on: (on.rows, on.rows, on.wide_matrices, on.matrices, on.offs, on.wide, on.rows),
        output_mask=[True, True, True, False, False, False],
    ),
    "moe": _dense(
        lambda on: (on.rows, on.wide_matrices, on.matrices, on.places, on.places, on.places, on.offs), top_k=1
    ),
    "moe_backward_hidden": _dense(
        lambda on: (on.rows, on.matrices, on.places, on.places, on.places, on.offs, on.wide),
        top_k=1,
        output_mask=[True, True, False, False],
    ),
    "moe_backward_input": _dense(
        lambda on: (on.wide, on.rows, on.wide_matrices, on.places, on.places, on.offs),
        top_k=1,
        output_mask=[True, True, False],
    ),
    "grouped_gemm_row_scaled": _by_rows(
        lambda on: (*_fp8_rows(on), on.made(GROUPS, WIDTH, WIDTH, dtype=FP8), _scales(on)[1], on.offs)
    ),
    "grouped_gemm_row_scaled_wgrad": _by_rows(lambda on: (*_fp8_columns(on), *_fp8_columns(on), on.offs)),
    "group_quantize": _formats(lambda on, q: ((on.rows, on.offs), q.options)),
    "group_dequantize": _formats(lambda on, q: ((q.rows.data, q.rows.scale, on.offs, q.amax[0]), q.options)),
    "group_requantize": _formats(lambda on, q: ((q.rows.data, q.rows.scale, on.offs, q.amax[0]), q.options)),
    "grouped_activation_quantize": _formats(lambda on, q: ((on.wide, on.offs), q.options)),
    "grouped_gemm_packed": _formats(
        lambda on, q: (
            (on.rows, q.matrices.data, q.matrices.scale, on.offs, q.amax[1]),
            {"format": q.options["format"]},
        ),
        layout="compact",
    ),
    "grouped_gemm_scaled": _formats(lambda on, q: ((*q.product, on.offs, *q.amax), q.options)),
    "grouped_gemm_scaled_activation_quantize": _formats(lambda on, q: ((*q.product, on.offs, *q.amax), q.options)),
    "grouped_gemm_scaled_wgrad": _formats(
        lambda on, q: ((*q.columns, *q.columns, on.offs, *q.columnwise_amax), q.options)
    ),
    "grouped_gemm_scaled_wgrad_accumulate_": _formats(
        lambda on, q: (
            (*q.columns, *q.columns, on.offs, on.made(GROUPS, WIDTH, WIDTH, dtype=torch.float32), *q.columnwise_amax),
            q.options,
        )
    ),
    "fp8_scale_from_history": _dense(
        lambda on: (on.made(4, 1, dtype=torch.float32), on.made(1, dtype=torch.float32)), "float32"
    ),
    "fp8_update_history_": _dense(
        lambda on: (on.made(1, dtype=torch.float32), on.made(4, 1, dtype=torch.float32)), "float32"
    ),
    "scale_to_layout": _formats(_of_scales, "compact", _blocked),
    "scale_from_layout": _formats(_of_scales, "blocked", _blocked),
    "aten::_grouped_mm": _dense(lambda on: (on.rows, on.matrices, on.offs)),
    "aten::_scaled_grouped_mm": _by_rows(lambda on: (*_atens(on), *_scales(on), on.offs)),
    "aten::_scaled_grouped_mm_v2": _by_rows(_second_version),
}
"""By op, what the report asks of it."""

NEED = dict.fromkeys(("ep_route", "ep_dispatch", "ep_combine"), "a process group")
"""Ops of which nothing can be asked here, and what a call needs."""
