"""The GroupedTensor classes, one per format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..meta import checks
from ..meta.checks import OUT_ALIGNMENT
from ..meta.components import component_specs
from ..meta.formats import FORMATS
from ..meta.quantized import SOURCES, Options
from ..meta.quantized import group_quantize as check_quantize
from ..meta.specs import Dim, TensorSpec
from ..meta.table import OnePerName
from ..ops.group_dequantize import group_dequantize
from ..ops.group_quantize import group_quantize
from . import _structure
from .grouped_tensor import COMPONENTS, GroupedTensor


def has(options: Options, name: str) -> bool:
    """Return whether a tensor made with ``options`` has the component ``name``."""
    direction = options.columnwise if name.startswith("columnwise") else options.rowwise
    return direction and (options.description.has_amax or not name.endswith("amax"))


class DenseGroupedTensor(GroupedTensor):
    """Unquantised values: ``rowwise_data`` of the tensor's shape and dtype, zeros in the rows past ``offs[-1]``.

    Use it to run code for GroupedTensors without quantisation.
    """

    format = "dense"

    @classmethod
    def _component_specs(
        cls, options: Options, shape: tuple[Dim, ...], groups: Dim, dtype: torch.dtype, device: torch.device, rows: bool
    ) -> dict[str, TensorSpec]:
        return {"rowwise_data": TensorSpec(tuple(shape), dtype, device)}

    @property
    def _component_dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        return self.dtype, torch.float32, torch.float32

    def _cast(self, dtype: torch.dtype) -> GroupedTensor:
        assert self.rowwise_data is not None
        parts = {**self.parts(), "rowwise_data": self.rowwise_data.to(dtype)}
        return type(self)(self.shape, dtype, self.static, parts, self.shapes)

    def _read_matrix(self, dtype: torch.dtype, columnwise: bool | None) -> Tensor:
        assert self.rowwise_data is not None
        checks.require(not columnwise, "dequantize", "columnwise", "None or False for dense values", columnwise)
        return self.rowwise_data.to(dtype, copy=True)

    def _check_matrix(self, x: Tensor, **tensors: Tensor | None) -> None:
        op = "quantize_"
        for name, t in tensors.items():
            checks.require(t is None, op, name, "None for dense values", "a tensor")
        checks.require(x.dtype in SOURCES, op, "x", "float32, bfloat16 or float16", x.dtype, TypeError)

    def _write_matrix(self, x: Tensor, noop: Tensor | None, offs: Tensor | None, **tensors: Tensor | None) -> None:
        assert self.rowwise_data is not None
        self._check_matrix(x, **tensors)
        if noop is not None:
            checks.either_dtype("quantize_", "noop", noop, torch.float32, torch.bool)
            checks.require(noop.numel() == 1, "quantize_", "noop", "of one element", noop.shape)
        x = x.to(self.dtype) if offs is None else _structure.zero_tail(x.to(self.dtype), offs)
        self.rowwise_data.copy_(x if noop is None else torch.where(noop != 0, self.rowwise_data, x))


class QuantizedGroupedTensor(GroupedTensor):
    """Base of the quantised formats, which ``group_quantize`` writes and ``group_dequantize`` reads."""

    @classmethod
    def _component_specs(
        cls, options: Options, shape: tuple[Dim, ...], groups: Dim, dtype: torch.dtype, device: torch.device, rows: bool
    ) -> dict[str, TensorSpec]:
        specs = component_specs(options, shape, groups, device, grouped=rows)
        return {name: spec for name, spec in zip(COMPONENTS, specs) if has(options, name)}

    @property
    def scale_layout(self) -> str:
        """``"compact"`` or ``"blocked"``."""
        return self.options.scale_layout

    @property
    def element_dtype(self) -> torch.dtype:
        """dtype of the data components; uint8 holds two FP4 values."""
        dtype = self.options.dtype
        assert dtype is not None
        return dtype

    def _describe(self) -> list[str]:
        o, f = self.options, self.options.description
        words = [f"element={str(o.dtype).removeprefix('torch.')}"] if len(f.data_dtypes) > 1 else []
        words += [name for name in ("rowwise", "columnwise", "power_of_two", "block_2d", "rht") if getattr(o, name)]
        words += [f"scaling={o.scaling}"] if "scaling" in f.options else []
        return [*words, f"scale_layout={o.scale_layout}"] if len(f.layouts) > 1 else words

    @property
    def _component_dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        return self.element_dtype, self.options.description.scale_dtype, torch.float32

    def _stack_of_one(self, name: str, part: Tensor) -> Tensor:
        blocked = name.endswith("scale") and self.options.blocked
        return part.reshape(1, -1) if blocked else part[None]

    def _cast(self, dtype: torch.dtype) -> GroupedTensor:
        return type(self)(self.shape, dtype, self.static, self.parts(), self.shapes)

    def _read_matrix(self, dtype: torch.dtype, columnwise: bool | None) -> Tensor:
        o, c = self.options, self.components()
        columnwise = not o.rowwise if columnwise is None else columnwise
        direction = "columnwise" if columnwise else "rowwise"
        present = o.columnwise if columnwise else o.rowwise
        checks.require(present, "dequantize", "columnwise", f"{not columnwise}: no {direction} components", columnwise)
        data, scale, amax = c[3:6] if columnwise else c[:3]
        transposed = columnwise and o.description.transposed_columnwise
        anyhow = not columnwise and self.offs is not None and o.description.scale_by_columns
        values = group_dequantize(
            data.contiguous(),
            scale if anyhow else scale.contiguous(),
            self.offs,
            amax if o.description.decodes_with_amax else None,
            format=o.format,
            columnwise=columnwise,
            scale_layout=o.scale_layout,
            out_dtype=dtype,
            rows=self.shape[0] if transposed and self.offs is not None else None,
            block_2d=o.block_2d,
            rht=o.rht and columnwise,
        )
        return values[0, : self.shape[0]] if self._one else values

    def _check_matrix(self, x: Tensor, **tensors: Tensor | None) -> None:
        check_quantize(x[None], None, **tensors, options=self.options)

    def _write_matrix(self, x: Tensor, noop: Tensor | None, offs: Tensor | None, **tensors: Tensor | None) -> None:
        # A clone of a group's rows keeps the column-major layout of their scales, unlike that of a matrix.
        anyhow = "rowwise_scale" if self.options.description.scale_by_columns else None
        for name, part in self.parts().items():
            if not part.is_contiguous() and name != anyhow:
                must = "made of contiguous components (what split() gives of rows can only be read)"
                checks.require(False, "quantize_", "self", must, f"{name} with strides {part.stride()}")
        x = x[None] if self._one else x
        out = self.components()
        aside = {
            slot: part.clone(memory_format=torch.contiguous_format)
            for slot, part in zip(out._fields, out)
            if self._may_lie_anywhere(part) or (offs is None and not part.is_contiguous())
        }
        keywords: dict[str, Any] = {**tensors, **arguments(self.options)}
        group_quantize(x, offs, noop=noop, out=out._replace(**aside), **keywords)
        for slot, part in aside.items():
            getattr(out, slot).copy_(part)

    def _may_lie_anywhere(self, part: Tensor) -> bool:
        """Return whether a component of one matrix may start unaligned, so that kernels must write to a copy."""
        return self._one and part.numel() * part.itemsize % OUT_ALIGNMENT != 0


def arguments(options: Options) -> dict[str, Any]:
    """Return ``options`` as keyword arguments of ``group_quantize``."""
    return {name: getattr(options, name) for name in _structure.FIELDS}


class MXFP8GroupedTensor(QuantizedGroupedTensor):
    """E4M3 (or E5M2) elements, one power-of-two scale (E8M0) per 32 elements of a row, or of a column.

    Components of rows ``[T, K]``, with compact scales: ``rowwise_data [T, K]``, ``rowwise_scale [T, K/32]``,
    ``columnwise_data [T, K]`` (not transposed), ``columnwise_scale [Tp/32, K]``; see ``tgl.group_quantize``.
    """

    format = "mxfp8"


class NVFP4GroupedTensor(QuantizedGroupedTensor):
    """E2M1 elements, two per byte, one E4M3 scale per 16 of them and one float32 amax per group.

    Components of rows ``[T, K]``, with compact scales: ``rowwise_data [T, K/2]``, ``rowwise_scale [T, K/16]``,
    ``columnwise_data [K, Tp/2]`` (transposed), ``columnwise_scale [K, Tp/16]``; see ``tgl.group_quantize``.
    """

    format = "nvfp4"


class MXFP4GroupedTensor(QuantizedGroupedTensor):
    """E2M1 elements, two per byte, one power-of-two scale (E8M0) per 32 of them.

    Components of rows ``[T, K]``, with compact scales: ``rowwise_data [T, K/2]``, ``rowwise_scale [T, K/32]``,
    ``columnwise_data [K, Tp/2]`` (transposed), ``columnwise_scale [K, Tp/32]``; see ``tgl.group_quantize``.
    """

    format = "mxfp4"


class FP8TensorGroupedTensor(QuantizedGroupedTensor):
    """E4M3 (or E5M2) elements, one float32 scale per group: its own (current scaling) or a given one (delayed).

    Components of rows ``[T, K]``: ``rowwise_data [T, K]``, ``columnwise_data [K, Tp]`` (transposed), inverse scales and
    amaxes ``[G]``; see ``tgl.group_quantize``.
    """

    format = "fp8_tensor"


class FP8BlockGroupedTensor(QuantizedGroupedTensor):
    """E4M3 (or E5M2) elements, one float32 scale per 128 elements of a row, or of a column, or per 128 x 128 block.

    Components of rows ``[T, K]``: ``rowwise_data [T, K]``, ``rowwise_scale [T, K/128]``, ``columnwise_data [K, Tp]``
    (transposed), ``columnwise_scale [Tp/128, K]``; see ``tgl.group_quantize``.
    """

    format = "fp8_block"


_OF_EVERY_FORMAT = OnePerName(("dense", *FORMATS), "the classes in tgl/tensor/formats.py", _structure.CLASSES)
