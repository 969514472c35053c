"""The quantised formats as frozen descriptions: element and scale dtypes, blocks, layouts, and which options apply.

Scales of one byte (E8M0, E4M3) are ``uint8`` tensors, and so is FP4 data, two elements per byte with element 0 in the
low nibble: the bytes are what is specified, and ``torch.uint8`` is the one dtype every part of PyTorch can carry.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("rceil", "floor", "even")
SCALE_LAYOUTS = ("compact", "blocked")

E8M0_NAN = 0xFF
E8M0_BIAS = 127
FP8_NAN = 0x7F  # of E4M3 and of E5M2
FP4_NAN_PAIR = 0x77  # two E2M1 elements of a block that holds Inf or NaN (E2M1 has no NaN: its scale says it)
E4M3_NAN = 0x7F
FP32_NAN = 0x7FC00000
FP32_INF = 0x7F800000


@dataclass(frozen=True)
class Element:
    """An 8-bit element type, as the scale arithmetic needs it.

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


@dataclass(frozen=True)
class Format:
    """What a quantised operand is made of; component shapes follow from it and from (T, K, G), see ``quantized``.

    Attributes:
        name: ``"mxfp8"``, ``"nvfp4"``, ``"fp8_tensor"`` or ``"fp8_block"``.
        data_dtypes: dtypes of the data, the default first.
        scale_dtype: dtype of the scales.
        block: elements that share a scale along the contraction dimension; 0 if a whole group shares one.
        transposed_columnwise: whether columnwise data is stored transposed, ``[K, Tp]``, rather than in x's order.
        unit_data: unit of the placement (see ``placement``) of transposed columnwise data; 0 if it is not transposed.
        unit_scale: unit of the placement of columnwise scales; 0 if they are per group.
        layouts: scale layouts.
        per_byte: elements in one item of the data.
        has_amax: whether a float32 amax per group is a component.
        options: arguments of ``group_quantize`` that mean something for this format alone or for few.
    """

    name: str
    data_dtypes: tuple[torch.dtype, ...]
    scale_dtype: torch.dtype
    block: int
    transposed_columnwise: bool
    unit_data: int
    unit_scale: int
    layouts: tuple[str, ...]
    per_byte: int
    has_amax: bool
    options: frozenset[str]


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            name="mxfp8",
            data_dtypes=(E4M3, E5M2),
            scale_dtype=torch.uint8,
            block=32,
            transposed_columnwise=False,
            unit_data=0,
            unit_scale=128,
            layouts=SCALE_LAYOUTS,
            per_byte=1,
            has_amax=False,
            options=frozenset({"scaling"}),
        ),
        Format(
            name="nvfp4",
            data_dtypes=(torch.uint8,),
            scale_dtype=torch.uint8,
            block=16,
            transposed_columnwise=True,
            unit_data=64,
            unit_scale=64,
            layouts=SCALE_LAYOUTS,
            per_byte=2,
            has_amax=True,
            options=frozenset({"block_2d", "rht", "rng"}),
        ),
        Format(
            name="fp8_tensor",
            data_dtypes=(E4M3, E5M2),
            scale_dtype=torch.float32,
            block=0,
            transposed_columnwise=True,
            unit_data=32,
            unit_scale=0,
            layouts=("compact",),
            per_byte=1,
            has_amax=True,
            options=frozenset({"scale", "power_of_two", "eps"}),
        ),
        Format(
            name="fp8_block",
            data_dtypes=(E4M3, E5M2),
            scale_dtype=torch.float32,
            block=128,
            transposed_columnwise=True,
            unit_data=32,
            unit_scale=128,
            layouts=("compact",),
            per_byte=1,
            has_amax=False,
            options=frozenset({"power_of_two", "eps", "block_2d"}),
        ),
    )
}
"""Formats by name."""
