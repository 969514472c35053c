"""Sample inputs of the GEMMs on quantised operands, made component by component.

Elements are values that every format has (0, 0.5, 1, ... 6, of either sign) and all factors are powers of two, so that
results are exact in float32 whatever the order of the sum. No quantiser is involved, and the tail holds bytes that are
NaN, or others, as requested.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..meta import placement
from ..meta.formats import E4M3, E8M0, E8M0_BIAS, FORMATS, Format
from ..meta.placement import ROW_UNIT
from ..meta.specs import Dim
from .quantized import SAMPLES
from .samples import NAN, ROUTINGS, GroupSizes, SampleInput, Signature, lay_out

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, in the order of its codes
_DIMENSIONS = {"K": 40, "M": 40, "N": 24}  # partial blocks in every format


@dataclass(frozen=True)
class QuantizedSignature(Signature):
    """A ``Signature`` whose operands ``a`` and ``b`` are components of quantised tensors.

    The dimensions in ``text`` are those of the tensors; ``QuantizedSample`` knows the components. ``:ends`` and the
    marks for optional and written arguments mean what they always do.
    """

    dimensions: dict[str, int] = field(default_factory=lambda: dict(_DIMENSIONS))
    differentiable: bool = False
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)

    @property
    def wgrad(self) -> bool:
        """Whether the operands are columnwise components of tokens."""
        return "b[T,N]" in self.text

    def samples(  # type: ignore[override]
        self,
        *,
        dtypes: Sequence[torch.dtype] | None = None,
        routings: Sequence[str | GroupSizes] | None = None,
        device: torch.device | str = "cpu",
        full: bool = False,
    ) -> Iterator[QuantizedSample]:
        """Yield sample inputs of the op, in every format and scale layout.

        Args:
            dtypes: output dtypes, default those of the signature.
            routings: names in ``ROUTINGS`` or ``GroupSizes`` of your own; default: all of ``ROUTINGS``.
            device: where the tensors live.
            full: the product of all axes instead of a selection.
        """
        chosen = [ROUTINGS[r] if isinstance(r, str) else r for r in routings or ROUTINGS]
        dtypes = self.dtypes if dtypes is None else dtypes
        most = max(self.presence(), key=len)
        for form in FORMATS.values():
            elements = SAMPLES[form.name].operands
            directions = ("rowwise",) if self.wgrad else ("rowwise", "columnwise")
            axes = itertools.product(chosen, elements, form.layouts, directions, self.presence(), dtypes)
            for routing, pair, layout, direction, given, dtype in axes:
                operands = pair != elements[0] or direction != "rowwise"
                varied = (routing is not chosen[0]) + operands + (given != most) + (dtype != dtypes[0])
                if varied > 1 and not full:
                    continue
                options: dict[str, Any] = {"format": form.name, "scale_layout": layout}
                if not self.wgrad:
                    options["b_direction"] = direction
                if not self.written:
                    options["out_dtype"] = dtype
                yield QuantizedSample(
                    self, routing, dtype, "row", given, options, device=device, a_dtype=pair[0], b_dtype=pair[1]
                )


@dataclass(frozen=True)
class QuantizedSample(SampleInput):
    """A recipe for one call on quantised operands.

    Attributes:
        dtype: output dtype.
        a_dtype, b_dtype: element types of the operands.
    """

    a_dtype: torch.dtype = E4M3
    b_dtype: torch.dtype = E4M3

    @property
    def name(self) -> str:
        """For test ids and messages."""
        elements = "-".join(str(t).removeprefix("torch.") for t in (self.a_dtype, self.b_dtype))
        return f"{super().name}-{elements}"

    @property
    def form(self) -> Format:
        """The format of the operands."""
        return FORMATS[self.options["format"]]

    def tensors(self, *, tail: float = NAN, layout: str | None = None) -> dict[str, Tensor | None]:
        """Return the arguments by name, in the order of the signature; omitted optional ones are None.

        Args:
            tail: NaN fills the tails of data and scales with bytes that are NaN, anything else with other bytes.
            layout: of written arguments: ``"row"``, or None for rows further apart than they are long.
        """
        columnwise = self.signature.wgrad  # type: ignore[attr-defined]
        direction = self.options.get("b_direction", "rowwise")
        sizes = self.signature.dimensions
        made: dict[str, Tensor | None] = {}
        for name, dtype, width in (("a", self.a_dtype, "M" if columnwise else "K"), ("b", self.b_dtype, "N")):
            if columnwise:
                parts = self._columns(name, dtype, sizes[width], tail)
            elif name == "a":
                parts = self._rows(name, dtype, sizes[width], tail)
            else:
                parts = self._matrices(name, dtype, sizes["N"], sizes["K"], direction)
            made |= dict(zip((name, f"{name}_scale", f"{name}_amax"), parts))
        for operand in self.signature.operands:
            if operand.name in made:
                continue
            if operand.role == "ends":
                made[operand.name] = self.routing.ends()
            elif operand.optional and operand.name not in self.given:
                made[operand.name] = None
            else:
                values = self._integers(operand.name, self.signature.shape(operand, self.routing)).to(self.dtype)
                if operand.by_row and not operand.written:
                    values[self.routing.routed :] = tail
                padded = operand.written and layout != "row"
                made[operand.name] = lay_out(values, "padded" if padded else "row")
        on_device = {o.name: made[o.name] for o in self.signature.operands}
        return {name: t.to(self.device) if t is not None else None for name, t in on_device.items()}

    # --- components ---------------------------------------------------------------------------------------------------

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(zlib.crc32(f"{name} {self.form.name} {self.routing.name}".encode()))

    def _codes(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return codes of E2M1, without the negative zero."""
        codes = torch.randint(0, 15, shape, generator=self._generator(name), dtype=torch.uint8, device="cpu")
        return codes + (codes >= 8).to(torch.uint8)

    @staticmethod
    def _encoded(codes: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype == torch.uint8:
            return codes[..., 0::2] | codes[..., 1::2] << 4
        values = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], dtype=torch.float32, device="cpu")
        return values[codes.long()].to(dtype)

    def _powers(self, name: str, shape: tuple[Dim, ...]) -> Tensor:
        """Return block scales that are powers of two from 1/4 to 4, as bytes or float32."""
        exponent = torch.randint(-2, 3, shape, generator=self._generator(name + " scale"), device="cpu")
        form = self.form
        if form.scale_type == E8M0:
            return (exponent + E8M0_BIAS).to(torch.uint8)
        return torch.exp2(exponent.float()).to(form.scale_type).view(form.scale_dtype)

    def _group_factors(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the scale or the amax of every group, whichever the values depend on."""
        groups = len(self.routing.sizes)
        generator = self._generator(name + " factor")
        exponent = torch.randint(-1, 2, (groups,), generator=generator, device="cpu").float()
        if self.form.decodes_with_amax:
            return None, SAMPLES[self.form.name].amax * torch.exp2(exponent)
        return torch.exp2(exponent) if self.form.block == 0 else None, None

    def _spoil(self, data: Tensor, scale: Tensor | None, tail: float) -> None:
        """Overwrite the rows past the last group."""
        routed = self.routing.routed
        data[routed:].view(torch.uint8).fill_(0x7F if math.isnan(tail) else 0x35)
        if scale is not None and scale.dtype == torch.uint8:
            scale[routed:] = self.form.scale_nan if math.isnan(tail) else 0x40
        elif scale is not None:
            scale[routed:] = tail

    def _rows(self, name: str, dtype: torch.dtype, width: int, tail: float) -> tuple[Tensor, Tensor, Tensor | None]:
        form, rows = self.form, self.routing.rows
        data = self._encoded(self._codes(name, (rows, width)), dtype)
        scale, amax = self._group_factors(name)
        if scale is None:
            scale = self._powers(name, (rows, placement.ceil_div(width, form.block)))
            if form.scale_by_columns:
                scale = scale.t().contiguous().t()
        self._spoil(data, scale if form.block else None, tail)
        if self.options["scale_layout"] == "blocked":
            offs = self.routing.ends()
            places = placement.padded_rows(rows, offs.shape[0], ROW_UNIT)
            at = placement.coordinate(offs, rows, ROW_UNIT)[: self.routing.routed]
            placed = torch.zeros(places, scale.shape[1], dtype=torch.uint8, device="cpu")
            placed[at] = scale[: self.routing.routed]
            scale = placement.to_blocked(placed)
        return data, scale, amax

    def _matrices(
        self, name: str, dtype: torch.dtype, width: int, depth: int, direction: str
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        form, groups = self.form, len(self.routing.sizes)
        codes = self._codes(name, (groups, width, depth))
        scale, amax = self._group_factors(name)
        if scale is None:
            count = placement.ceil_div(width, form.block) if form.square_scales else width
            scale = self._powers(name, (groups, count, placement.ceil_div(depth, form.block)))
        if self.options["scale_layout"] == "blocked":
            scale = placement.to_blocked(scale)
        if direction == "columnwise" and not form.transposed_columnwise:
            codes = codes.transpose(1, 2).contiguous()
            scale = scale.transpose(1, 2).contiguous() if scale.dim() == 3 else scale
        return self._encoded(codes, dtype), scale, amax

    def _columns(self, name: str, dtype: torch.dtype, width: int, tail: float) -> tuple[Tensor, Tensor, Tensor | None]:
        form, rows = self.form, self.routing.rows
        scale, amax = self._group_factors(name)
        if form.transposed_columnwise:
            run = form.block if form.fills_blocks else 1  # even where the group ends inside it
            used = self._used(form.unit_data, run)
            codes = self._codes(name, (width, used.shape[0]))
            data = self._encoded(torch.where(used, codes, 0), dtype)
        else:
            data = self._encoded(self._codes(name, (rows, width)), dtype)
            self._spoil(data, None, tail)
        if scale is None:
            used = self._used(form.unit_scale, form.block).view(-1, form.block)[:, 0]
            powers = self._powers(name, (width, used.shape[0]))
            scale = torch.where(used, powers, 0)
            if self.options["scale_layout"] == "blocked":
                scale = placement.to_blocked(scale)
            elif not form.transposed_scale:
                scale = scale.t().contiguous()
        return data, scale, amax

    def _used(self, unit: int, run: int) -> Tensor:
        """Return a mask of the places of tokens and of the runs of that many places that contain one, bool ``[Tp]``."""
        offs, rows = self.routing.ends(), self.routing.rows
        taken = placement.row_of(offs, rows, unit) >= 0
        return taken.view(-1, run).any(1, keepdim=True).expand(-1, run).reshape(-1)


def row_scaled_operands(sample: SampleInput, made: Mapping[str, Tensor | None], tail: float) -> dict[str, Tensor]:
    """FP8 operands with a power of two for each row, ``[T, K]`` and ``[G, N, K]``, or of results ``dw`` ``[M, T]`` and
    ``[N, T]`` with one for each row of each group."""
    sizes, routing = sample.signature.dimensions, sample.routing
    groups, rows, wgrad = len(routing.sizes), routing.rows, sample.signature.outputs[0].name == "dw"
    shapes = {"a": (rows, sizes["K"]), "b": (groups, sizes["N"], sizes["K"])}
    scales: dict[str, tuple[int, ...]] = {"a": (rows,), "b": (groups, sizes["N"])}
    if wgrad:
        shapes = {"a": (sizes["M"], rows), "b": (sizes["N"], rows)}
        scales["a"] = groups, sizes["M"]
    found = {}
    for name, dtype in (("a", torch.float8_e4m3fn), ("b", torch.float8_e5m2)):
        values, scale = sample._integers(name, shapes[name]).float(), sample._integers(name + " scale", scales[name])
        scale = torch.exp2(scale.float())
        if wgrad:
            values[:, routing.routed :] = tail
        elif name == "a":
            values[routing.routed :] = scale[routing.routed :] = tail
        if sample.layout == "expanded":
            values = values[..., :1].expand(values.shape).clone()
        found[name] = lay_out(values.to(dtype).to(sample.device), sample.layout)
        found[f"{name}_scale"] = lay_out(scale.to(sample.device), sample.layout)
    return found


ROW_SCALED: dict[str, Any] = {
    "dimensions": dict(_DIMENSIONS),
    "differentiable": False,
    "derive": row_scaled_operands,
    "dtypes": (torch.bfloat16,),
}
"""Signatures of the ops on row-scaled operands."""


def packed_matrices(sample: SampleInput, made: Mapping[str, Tensor | None], tail: float) -> dict[str, Tensor]:
    """Return the quantised operands of ``grouped_gemm_packed``: rowwise components of matrices ``[G, N, K]``."""
    form = FORMATS[sample.options["format"]]
    options = {"format": form.name, "scale_layout": "compact"}
    quantized = QuantizedSample(sample.signature, sample.routing, options=options, device=sample.device)
    sizes, dtype = sample.signature.dimensions, SAMPLES[form.name].operands[0][1]
    parts = zip(("b", "b_scale", "b_amax"), quantized._matrices("b", dtype, sizes["N"], sizes["K"], "rowwise"))
    return {name: t.to(sample.device) for name, t in parts if t is not None}


def packed_signatures(text: str, bias: str) -> tuple[Signature, ...]:
    """Return the signatures of ``grouped_gemm_packed``.

    Args:
        text: with places for the dimension of ``a``, that of the result, and whether ``b_amax`` is given.
        bias: the optional arguments, with a place for the dimension of the result.
    """
    made = []
    for form in sorted(FORMATS.values(), key=lambda form: form.scale_type != E8M0 or form.per_byte == 1):
        frozen = form.scale_type == E8M0 and form.per_byte == 2
        amax = ":derived" if form.decodes_with_amax else ":derived?"
        for over_rows, contracted, kept in ((False, "K", "N"), (True, "N", "K"))[: 1 + frozen]:
            options: dict[str, Any] = {"requires": {} if form.decodes_with_amax else {"b_amax": "nothing"}}
            if frozen:
                options["requires"] |= {"bias_scale": "bias"}
                options["wide"] = ("bias", "bias_scale")
            else:
                options["dtypes"] = (torch.bfloat16,)
            made.append(
                Signature(
                    text.format(contracted, kept, amax, bias.format(kept) if frozen else ""),
                    options={"format": (form.name,), "over_rows": (over_rows,)},
                    dimensions=dict(_DIMENSIONS),
                    differentiable=frozen,
                    derive=packed_matrices,
                    **options,
                )
            )
    return tuple(made)
