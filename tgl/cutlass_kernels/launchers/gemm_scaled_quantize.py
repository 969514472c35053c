"""A GEMM on quantised operands with a quantised activation as its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ... import backends
from ...meta.components import Components
from ...meta.quantized import Options
from .. import tilings
from ..activation.activation_spec import spec_of
from ..archs import having
from ..config import VARLEN_M, GemmConfig
from ..epilogue import EpilogueSpec
from ..gemm.operand_formats import ATOM_ROWS, MXFP8, NO_EPILOGUE
from ..quantize.quantize_spec import MXFP8Spec
from ..runtime.launcher import power_of_two, rows_class, warm
from ..runtime.names import name
from ..runtime.operands import Operand, tensor
from ..runtime.requirements import ALIGNMENT, MATRIX, START
from .gemm import BIAS, OFFS
from .gemm_activation import PROBS
from .gemm_launcher import SIDE, SQUARE, PersistentGemmLauncher
from .gemm_scaled import scaled_reason, square

if TYPE_CHECKING:
    from ...ops.grouped_activation import Params


class ScaledQuantizeKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    a_element: str
    b_element: str
    b_rows_first: bool
    spec: EpilogueSpec
    config: GemmConfig


class ScaledQuantizeCall(NamedTuple):
    """Arguments of ``grouped_gemm_scaled_activation_quantize``."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    offs: Tensor
    a_amax: Tensor | None
    b_amax: Tensor | None
    bias: Tensor | None
    probs: Tensor | None
    scale: Tensor | None
    b_direction: str
    params: Params
    options: Options
    h: Tensor
    out: Components

    @property
    def format(self) -> str:
        """Return the format of the operands."""
        return self.options.format

    @property
    def scale_layout(self) -> str:
        """Return the layout of the operands' scales."""
        return self.options.scale_layout


ROW_SCALES = tensor("vector", "uint8", ALIGNMENT)


class ScaledGemmQuantizeLauncher(PersistentGemmLauncher[ScaledQuantizeCall]):
    """``h = a[t] @ b[g] + bias[g]``, and the components of its activation, in one launch."""

    op = "grouped_gemm_scaled_activation_quantize"
    call = ScaledQuantizeCall
    kernel_name = "QuantizingGroupedGemm"
    archs = having("QuantizingGroupedGemm")
    operands = (
        Operand("a", "TK", "a_element", MATRIX),
        Operand("a_scale", need=START, stand_in=ROW_SCALES),
        Operand("b", "GNK", "b_element", MATRIX),
        Operand("b_scale", need=START, stand_in=tensor("matrix", "uint8")),
        OFFS,
        Operand("h", "TN", "spec.out", MATRIX, output=True),
        BIAS,
        PROBS,
    )

    def reject_reason(self, c: ScaledQuantizeCall) -> backends.Reason:
        """Return why the kernel does not take the format (scales per group), the dtypes or the widths, or None."""
        if NO_EPILOGUE[c.format] is not None:
            return NO_EPILOGUE[c.format]
        reason = scaled_reason(c.format, c.a, c.h)
        if reason is not None:
            return reason
        if c.scale_layout != "blocked":
            return f'needs scale_layout="blocked", got "{c.scale_layout}"'
        if c.h.dtype == torch.float32:
            return f"writes bfloat16 or float16, not {c.h.dtype}"
        columns = c.h.shape[1] // 2 if c.params.gated else c.h.shape[1]
        if columns % ALIGNMENT:
            return f"needs I to be a multiple of {ALIGNMENT}, got {columns}"
        if c.params.gated and not c.params.interleaved and columns % ATOM_ROWS:
            return (
                f"needs I to be a multiple of {ATOM_ROWS} unless halves alternate, the block of scales, got {columns}"
            )
        return None

    def reason(self, c: ScaledQuantizeCall) -> backends.Reason:
        """Return ``reject_reason``, or why the kernel does not take the layout of an operand or component, or None."""
        found = self.reject_reason(c) or self.reach.reason(c)
        if found is not None:
            return found
        return next(filter(None, (START.reason(*item) for item in c.out._asdict().items())), None)

    def plan_key(self, c: ScaledQuantizeCall) -> tuple | None:
        """Return the plan key; the number of rows enters it as the class of rows per group."""
        a, a_scale, b, b_scale, _, _, _, bias, probs, _, *meant, h, out = c
        rows, shape = a.shape[0], b.shape
        addresses = a.data_ptr() | a_scale.data_ptr() | b.data_ptr() | b_scale.data_ptr() | h.data_ptr()
        for t in out:
            addresses |= t.data_ptr()  # 0 where nothing is written
        if not warm(rows, addresses):
            return None
        layouts = (a.stride(), b.stride(), h.stride(), shape)
        dtypes = (a.dtype, b.dtype, h.dtype, bias is None or bias.dtype, probs is None or probs.dtype)
        return layouts, dtypes, rows_class(rows, shape[0]), *meant

    def batch_invariant(self, c: ScaledQuantizeCall) -> bool:
        """Return whether the scales of the result depend on one row alone."""
        return c.options.scales_rows_alone(c.scale)

    def zero_outputs(self, c: ScaledQuantizeCall) -> None:
        """Zero the results: every row belongs to the tail."""
        super().zero_outputs(c)
        for t in c.out:
            t.zero_()

    def key(self, c: ScaledQuantizeCall, arch: str) -> ScaledQuantizeKey:
        """Return the key, tiled like ``grouped_gemm_scaled``; halves side by side need a whole atom of scales each."""
        rows = power_of_two(c.a.shape[0] // c.b.shape[0])
        first = c.b_direction == "rowwise"
        tiling = tilings.choose_scaled(arch, VARLEN_M, MXFP8, c.h.shape[1], c.a.shape[1], rows)
        if c.params.gated and not c.params.interleaved:
            tiling = replace(tiling, tile_n=2 * ATOM_ROWS)
        quantized = MXFP8Spec(
            source=name(c.h),
            element=name(c.options.dtype),
            rowwise=c.options.rowwise,
            columnwise=c.options.columnwise,
            scaling=c.options.scaling,
            blocked=True,
            grouped=True,
        )
        spec = EpilogueSpec(
            name(c.h),
            name(c.bias),
            tail=True,
            activation=spec_of(c.params),
            probs=name(c.probs),
            quantized=quantized,
        )
        return ScaledQuantizeKey(arch, not c.a.is_cuda, name(c.a), name(c.b), first, spec, tiling)

    def kernel(self, key: ScaledQuantizeKey) -> Callable:
        """Return the kernel of ``key``, to be compiled."""
        from ..runtime.elements import TYPES

        assert key.spec.quantized is not None
        types = (TYPES[element] for element in (key.a_element, key.b_element, key.spec.quantized.element))
        return self.kernel_class(key)(key.config, key.spec, *types, MXFP8, key.b_rows_first)

    def stand_ins(self, key: ScaledQuantizeKey) -> tuple:
        """Return what the compiler gets instead of ``arguments``."""
        from ..runtime.compiling import matrix

        quantized = key.spec.quantized
        assert quantized is not None

        def direction(present: bool) -> tuple:
            return (matrix(quantized.element), ROW_SCALES(key)) if present else (None, None)

        return *super().stand_ins(key), *direction(quantized.rowwise), *direction(quantized.columnwise)

    def arguments(self, c: ScaledQuantizeCall) -> tuple:
        """Return the arguments of the kernel: after those of the table data and scales of each direction."""
        out, options = c.out, c.options
        row = (out.data, out.scale) if options.rowwise else (None, None)
        column = (out.columnwise_data, out.columnwise_scale) if options.columnwise else (None, None)
        return *self.operand_arguments(c), *row, *column

    def warmup_sizes(self, c: ScaledQuantizeCall) -> dict[str, int]:
        """Return the sizes of the warm-up call."""
        return {**SQUARE, "N": 2 * SIDE if c.params.gated else SIDE}

    def warmup_call(self, c: ScaledQuantizeCall) -> ScaledQuantizeCall:
        """Return the warm-up call: one group without rows."""
        width, a = self.warmup_sizes(c)["N"], square(c, "a")
        codes = torch.zeros(SIDE, SIDE, dtype=c.options.dtype, device=c.a.device)
        blocks = a["a_scale"].new_zeros(4 * SIDE)
        return (
            super()
            .warmup_call(c)
            ._replace(
                **a,
                b=c.b.new_zeros((1, width, SIDE) if c.b_direction == "rowwise" else (1, SIDE, width)),
                b_scale=c.b_scale.new_zeros(1, 4 * width),
                out=c.out._replace(data=codes, scale=blocks, columnwise_data=codes, columnwise_scale=blocks),
            )
        )


GROUPED_GEMM_SCALED_ACTIVATION_QUANTIZE = ScaledGemmQuantizeLauncher()
LAUNCHERS = (GROUPED_GEMM_SCALED_ACTIVATION_QUANTIZE,)
