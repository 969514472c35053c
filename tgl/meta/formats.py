"""The quantised formats as frozen descriptions: element and scale dtypes, blocks, layouts, and options.

Scales of one byte (E8M0, E4M3) are ``uint8`` tensors, and so is FP4 data, two elements per byte with element 0 in the
low nibble: the bytes are what is specified, and ``torch.uint8`` is the one dtype every part of PyTorch can carry.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
SCALINGS = ("rceil", "floor", "even")
SCALE_LAYOUTS = ("compact", "blocked")

E8M0_NAN = 0xFF
E8M0_BIAS = 127
FP8_NAN = 0x7F  # of E4M3 and of E5M2
E4M3_NAN = 0x7F
FP32_INF = 0x7F800000


@dataclass(frozen=True)
class Element:
    """Properties of an element type for the scale arithmetic.

    Attributes:
        max: largest finite value.
        max_exponent: exponent of ``max``.
        inverse_max: ``float32(1 / max)``, the multiplier of ``"rceil"``.
        half_ulp: bits added to an amax by ``"even"``: half a unit in the last place of the element's mantissa.
    """

    max: float
    max_exponent: int
    inverse_max: float
    half_ulp: int


def _float32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


ELEMENTS: dict[torch.dtype, Element] = {
    E4M3: Element(448.0, 8, _float32(0x3B124925), 1 << 19),
    E5M2: Element(57344.0, 15, _float32(0x37924925), 1 << 20),
}
"""The 8-bit element types by dtype."""
E2M1 = Element(6.0, 2, _float32(0x3E2AAAAB), 1 << 21)


class ScaleMatrix(NamedTuple):
    """Layout of one group's scales in another library: row-major or tiled, each side padded to a multiple.

    Scales run *along* the tokens of a group (or the rows of a weight) and *across* the other dimension.

    Attributes:
        transposed: the rows run across, the columns along.
        pad_rows, pad_columns: multiples.
        tiled: in tiles of 128 x 4.
    """

    transposed: bool
    pad_rows: int
    pad_columns: int
    tiled: bool = False


class TEScales(NamedTuple):
    """Layouts of a format's scales in TransformerEngine; for square blocks only with ``Format.square_scales``."""

    rowwise: ScaleMatrix
    columnwise: ScaleMatrix
    square_rowwise: ScaleMatrix | None = None
    square_columnwise: ScaleMatrix | None = None

    def of(self, columnwise: bool, square: bool) -> ScaleMatrix:
        """Return the layout of one component."""
        found = self[columnwise + 2 * square]
        assert found is not None
        return found


@dataclass(frozen=True)
class Format:
    """Description of a quantised format; component shapes follow from it and from (T, K, G), see ``quantized``.

    It holds all properties of a format that code depends on: no other code compares a format's name.

    Attributes:
        name: name of the format in ops, recipes and tensors.
        data_dtypes: dtypes of the data, the default first.
        elements: names of the element types of ``data_dtypes``.
        scale_dtype: dtype in which scales are stored.
        scale_type: type of a scale's bytes: ``torch.float8_e8m0fnu``, ``torch.float8_e4m3fn``, or ``torch.float32``
            for float32 scales.
        block: elements that share a scale along the contraction dimension; 0 if a whole group shares one.
        transposed_columnwise: whether columnwise data is stored transposed, ``[K, Tp]``, rather than in x's order.
        transposed_scale: whether compact columnwise scales are ``[K, blocks]``, as those of the transposed matrix, or
            ``[blocks, K]``.
        scale_by_columns: whether rowwise scales of rows in groups are column-major, ``[T, blocks]`` with strides
            ``(1, T)``. The float32 scales of a tile of 128 rows are then 512 contiguous bytes, instead of four bytes in
            each of 128 rows.
        square_scales: whether a square block (``block_2d``) stores one scale, ``[ceil(N / block), ceil(K / block)]``,
            which is how the GEMMs then read weights; else one for each of its rows, as other blocks do.
        unit_data: unit of the placement (see ``placement``) of transposed columnwise data; 0 if it is not transposed.
        unit_scale: unit of the placement of columnwise scales; 0 if they are per group.
        layouts: scale layouts.
        te_scales: the scales as TransformerEngine pads them; None where there is no conversion.
        per_byte: elements in one item of the data.
        has_amax: whether a float32 amax per group is a component.
        decodes_with_amax: whether the values depend on that amax, so that GEMMs and ``group_dequantize`` read it.
        fused_with_gemm: whether a layer quantises an activation in the GEMM before it, by
            ``grouped_gemm_scaled_activation_quantize``: its scales follow from the elements of one tile.
        power_of_two: default of the option ``power_of_two``, where the format has it.
        options: arguments of ``group_quantize`` that mean something for this format alone or for few.
    """

    name: str
    data_dtypes: tuple[torch.dtype, ...]
    elements: tuple[str, ...]
    scale_dtype: torch.dtype
    scale_type: torch.dtype
    block: int
    transposed_columnwise: bool
    unit_data: int
    unit_scale: int
    layouts: tuple[str, ...]
    options: frozenset[str]
    per_byte: int = 1
    te_scales: TEScales | None = None
    transposed_scale: bool = False
    scale_by_columns: bool = False
    square_scales: bool = False
    has_amax: bool = False
    decodes_with_amax: bool = False
    fused_with_gemm: bool = False
    power_of_two: bool = False

    @property
    def row_alone(self) -> bool:
        """Whether rowwise components of a row depend only on that row, because no scale covers several rows."""
        return self.block > 0 and not self.has_amax

    @property
    def fills_blocks(self) -> bool:
        """Whether a group's last columnwise block is full, because a Hadamard transform mixes all its elements."""
        return "rht" in self.options

    @property
    def scales_sums(self) -> bool:
        """Whether a scale multiplies the sum over its block: float32 block scales."""
        return self.block > 0 and self.scale_type == torch.float32

    @property
    def scale_nan(self) -> int:
        """The byte of a one-byte scale that is NaN."""
        return {E8M0: E8M0_NAN, E4M3: E4M3_NAN}[self.scale_type]

    def element_of(self, dtype: torch.dtype | None) -> str:
        """Return the name of the elements of data of ``dtype``; None is the default dtype."""
        return self.elements[0 if dtype is None else self.data_dtypes.index(dtype)]


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            name="mxfp8",
            data_dtypes=(E4M3, E5M2),
            elements=("E4M3", "E5M2"),
            scale_dtype=torch.uint8,
            scale_type=E8M0,
            block=32,
            transposed_columnwise=False,
            unit_data=0,
            unit_scale=128,
            layouts=SCALE_LAYOUTS,
            te_scales=TEScales(ScaleMatrix(False, 128, 4), ScaleMatrix(False, 4, 128)),
            fused_with_gemm=True,
            options=frozenset({"scaling"}),
        ),
        Format(
            name="nvfp4",
            data_dtypes=(torch.uint8,),
            elements=("E2M1",),
            scale_dtype=torch.uint8,
            scale_type=E4M3,
            block=16,
            transposed_columnwise=True,
            transposed_scale=True,
            unit_data=64,
            unit_scale=64,
            layouts=SCALE_LAYOUTS,
            te_scales=TEScales(ScaleMatrix(False, 128, 4), ScaleMatrix(True, 128, 4)),
            per_byte=2,
            has_amax=True,
            decodes_with_amax=True,
            options=frozenset({"block_2d", "rht", "rng"}),
        ),
        Format(
            name="mxfp4",
            data_dtypes=(torch.uint8,),
            elements=("E2M1",),
            scale_dtype=torch.uint8,
            scale_type=E8M0,
            block=32,
            transposed_columnwise=True,
            transposed_scale=True,
            unit_data=128,
            unit_scale=128,
            layouts=SCALE_LAYOUTS,
            per_byte=2,
            options=frozenset({"scaling"}),
        ),
        Format(
            name="fp8_tensor",
            data_dtypes=(E4M3, E5M2),
            elements=("E4M3", "E5M2"),
            scale_dtype=torch.float32,
            scale_type=torch.float32,
            block=0,
            transposed_columnwise=True,
            unit_data=32,
            unit_scale=0,
            layouts=("compact",),
            has_amax=True,
            options=frozenset({"scale", "power_of_two", "eps"}),
        ),
        Format(
            name="fp8_block",
            data_dtypes=(E4M3, E5M2),
            elements=("E4M3", "E5M2"),
            scale_dtype=torch.float32,
            scale_type=torch.float32,
            block=128,
            transposed_columnwise=True,
            scale_by_columns=True,
            square_scales=True,
            unit_data=32,
            unit_scale=128,
            layouts=("compact",),
            te_scales=TEScales(
                ScaleMatrix(True, 1, 4),
                ScaleMatrix(False, 1, 4),
                square_rowwise=ScaleMatrix(False, 1, 4),
                square_columnwise=ScaleMatrix(True, 1, 4),
            ),
            power_of_two=True,
            options=frozenset({"power_of_two", "eps", "block_2d"}),
        ),
    )
}
"""Formats by name."""
