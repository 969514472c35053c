"""``GroupedPackedLinear``: a ``GroupedLinear`` whose frozen weight stays quantised."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..meta.formats import FORMATS
from ..meta.quantized import SOURCES, Options
from ..ops.grouped_gemm_packed import grouped_gemm_packed
from ..tensor import GroupedTensor
from ..tensor._structure import CLASSES, fields
from ._arguments import check_device
from ._errors import fail, shown
from ._gemms import DenseGemms, Destination, Operand, Operands
from .grouped_linear import GroupedLinear


class PackedGemms(DenseGemms):
    """GEMMs of dense rows and a packed weight, whose operand is the tuple of rowwise components."""

    def __init__(self, format: str) -> None:
        self.format, self.with_amax = format, FORMATS[format].decodes_with_amax

    def weight(
        self, w: Tensor, slots: Tensor | None = None, *, dgrad: bool, is_first_microbatch: bool | Tensor | None
    ) -> Operands:
        assert isinstance(w, GroupedTensor)
        data, scale, amax, *_ = w.components()
        operand = (data, scale, amax) if self.with_amax else (data, scale)
        return Operands(fprop=operand, dgrad=operand if dgrad else ())

    def fprop(
        self,
        x: Operand,
        w: Operand,
        offs: Tensor,
        bias: Tensor | None,
        bias_scale: Tensor | None,
        to: Destination,
    ) -> Tensor:
        assert to["out"] is None
        data, scale, amax = self._parts(w)
        options: dict[str, Any] = {"format": self.format, "out_dtype": to["out_dtype"]}
        return grouped_gemm_packed(x[0], data, scale, offs, amax, bias, bias_scale, **options)

    def dgrad(self, dy: Operand, w: Operand, offs: Tensor, to: Destination) -> Tensor:
        assert to["out"] is None
        data, scale, amax = self._parts(w)
        options: dict[str, Any] = {"format": self.format, "out_dtype": to["out_dtype"]}
        return grouped_gemm_packed(dy[0], data, scale, offs, amax, over_rows=True, **options)

    def _parts(self, w: Operand) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return data, scale, and amax if the format decodes with it."""
        return w[0], w[1], w[2] if self.with_amax else None


def options_of(format: str) -> Options:
    """Return the quantisation options of components that both GEMMs can read."""
    if not isinstance(format, str):
        raise TypeError(f"`format` must be the name of a format, but got {shown(format)}")
    form = FORMATS.get(format)
    square = form is not None and form.square_scales
    return Options(format, columnwise=False, block_2d=square).resolved("GroupedPackedLinear")


def weight_on(
    parts: dict[str, Tensor], shape: tuple[int, int, int], options: Options, dtype: torch.dtype
) -> nn.Parameter:
    """Return a frozen weight ``[G, N, K]`` that shares memory with ``parts``, which the caller has checked."""
    parts = {name: part.detach() for name, part in parts.items()}
    return nn.Parameter(CLASSES[options.format](shape, dtype, fields(options), parts), requires_grad=False)


class GroupedPackedLinear(GroupedLinear):
    """A ``GroupedLinear`` whose frozen weight stays quantised: forward and input gradient by ``grouped_gemm_packed``.

    Rows are not quantised; they are multiplied by the weight decoded to their dtype. Where matrices are decoded to
    memory, a GPU holds as many at a time as fit 256 MiB, at least one, and a CPU holds one: a weight within that limit
    is decoded as a whole on a GPU, while its product runs. Only the components are saved for the backward. The layer
    can be the base of a ``GroupedLoRALinear`` and replace a layer of ``GroupedMLP``, ``MoE`` or ``Sequential``::

        mlp.fc1 = tgl.GroupedLoRALinear(tgl.GroupedPackedLinear.from_gpt_oss(blocks, scales, bias), rank=16)

    Args:
        num_gemms, in_features, out_features, bias, device: see ``GroupedLinear``; parameters require no grad.
        format: the weight's format: ``"mxfp8"``, ``"nvfp4"``, ``"mxfp4"``, ``"fp8_tensor"`` or ``"fp8_block"``.
        params_dtype: dtype of the rows and of the bias: bfloat16 (default), float16 or float32.

    Attributes:
        weight: frozen parameter, a ``GroupedTensor [G, N, K]`` with rowwise components.
        bias: frozen parameter ``[G, N]``, or None.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """

    buffers_taken = frozenset()

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str = "mxfp4",
        params_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        options = options_of(format)
        if not isinstance(params_dtype, torch.dtype) or params_dtype not in SOURCES:
            raise TypeError(f"`params_dtype` must be bfloat16, float16 or float32, but got {params_dtype}")
        check_device("device", device)
        super().__init__(num_gemms, in_features, out_features, bias, params_dtype=params_dtype, device="meta")
        self.gemms = PackedGemms(format)
        shape = (num_gemms, out_features, in_features)
        packed = GroupedTensor.empty(shape, options, source_dtype=params_dtype, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        if bias:
            values = torch.empty(num_gemms, out_features, dtype=params_dtype, device=device)
            self.bias = nn.Parameter(values, requires_grad=False)
        if packed.device.type != "meta":
            self.reset_parameters()

    def _beyond_gemm(self) -> tuple[str, ...]:
        return ("has a weight that stays quantised",)

    @classmethod
    def from_components(
        cls,
        data: Tensor,
        scale: Tensor,
        amax: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        format: str,
        params_dtype: torch.dtype = torch.bfloat16,
    ) -> GroupedPackedLinear:
        """Return a layer that shares memory with rowwise components of ``group_quantize``, with compact scales.

        The components are those of a weight ``[G, N, K]``.

        Args:
            data, scale, amax: see ``tgl.grouped_gemm_packed``.
            bias: ``[G, N]`` of ``params_dtype``, or None.
            format, params_dtype: see the class.

        Raises:
            TypeError, ValueError: components that do not fit together.
        """
        options = options_of(format)
        per_byte = FORMATS[format].per_byte
        if data.dim() != 3:
            raise ValueError(f"`data` must be 3-D, [G, N, K] or [G, N, K/2] of E2M1, but got shape {tuple(data.shape)}")
        groups, rows, columns = data.shape[0], data.shape[1], data.shape[2] * per_byte
        layer = cls(groups, columns, rows, bias is not None, format=format, params_dtype=params_dtype, device="meta")
        given = {"rowwise_data": data, "rowwise_scale": scale, "rowwise_amax": amax}
        for name, must in layer.weight.parts().items():  # type: ignore[attr-defined]
            part = given[name]
            if part is None or part.shape != must.shape or part.dtype != must.dtype:
                have = None if part is None else f"{tuple(part.shape)} of {part.dtype}"
                raise ValueError(
                    f"`{name.removeprefix('rowwise_')}` must be {tuple(must.shape)} of {must.dtype}, but got {have}"
                )
        parts = {name: part for name, part in given.items() if part is not None}
        layer.weight = weight_on(parts, (groups, rows, columns), options, params_dtype)
        if bias is not None:
            if bias.shape != (groups, rows) or bias.dtype != params_dtype:
                must = f"{(groups, rows)} of {params_dtype}"
                raise ValueError(f"`bias` must be {must}, but got {tuple(bias.shape)} of {bias.dtype}")
            layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
        return layer

    @classmethod
    def from_gpt_oss(
        cls,
        blocks: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        *,
        params_dtype: torch.dtype = torch.bfloat16,
    ) -> GroupedPackedLinear:
        """Return a layer for tensors of a gpt-oss checkpoint: ``gate_up_proj_blocks``, ``_scales`` and ``_bias``."""
        from .layouts import mxfp4_from_gpt_oss

        data, scale = mxfp4_from_gpt_oss(blocks, scales)
        return cls.from_components(data, scale, None, bias, format="mxfp4", params_dtype=params_dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weight and bias like ``nn.Linear``, one matrix at a time."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for matrix in self.weight.unbind():
            values = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
            matrix.quantize_(values.uniform_(-bound, bound))  # type: ignore[attr-defined]
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)

    def _check_gradients(self, needs_wgrad: bool) -> None:
        if needs_wgrad:
            fail("`weight` must not require grad: a packed weight is frozen", RuntimeError)

    def _checked_buffers(
        self, inp: Tensor, out: Tensor | None, dgrad_out: Tensor | None, out_dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        name = "out" if out is not None else "dgrad_out"
        fail(f"`{name}` must be None for a packed weight, whose GEMMs make their results")

    def extra_repr(self) -> str:
        """Return the options of ``GroupedLinear`` and the format of the weight."""
        return f"{super().extra_repr()}, format={self.gemms.format!r}"  # type: ignore[attr-defined]
