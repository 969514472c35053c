"""Recipes: how a layer quantises the operands of its three GEMMs.

A recipe is a frozen value, passed to the modules as ``recipe=``; a name of ``RECIPES`` is the recipe with its defaults.
Equal recipes are equal values, and nothing is global. Names and fields are TransformerEngine's where their meaning is
equal. Every recipe has one table, ``operands``, with the format of each of the three operands. ``GEMMS`` lists which
GEMM reads which operand in which direction; ``print(recipe)`` shows both.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .meta.checks import unknown
from .meta.components import Components
from .meta.formats import E4M3, E5M2, FORMATS, SCALE_LAYOUTS, SCALINGS
from .ops.group_quantize import group_quantize

__all__ = [
    "GEMMS",
    "RECIPES",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Operands",
    "QuantizeSpec",
    "Recipe",
    "named",
]

GEMMS: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "fprop": (("input", "rowwise"), ("weight", "rowwise")),
    "dgrad": (("grad", "rowwise"), ("weight", "columnwise")),
    "wgrad": (("grad", "columnwise"), ("input", "columnwise")),
}
"""The two operands of every GEMM, and the direction it reads them in: blocks lie along the contraction."""


class Format(enum.Enum):
    """8-bit element types for the forward (inputs and weights) and the backward (gradients)."""

    E4M3 = "E4M3"
    HYBRID = "HYBRID"

    @property
    def forward(self) -> torch.dtype:
        """Element type of inputs and weights."""
        return E4M3

    @property
    def backward(self) -> torch.dtype:
        """Element type of gradients: E5M2 for ``HYBRID``."""
        return E5M2 if self is Format.HYBRID else E4M3

    def __repr__(self) -> str:
        return f"Format.{self.name}"


@dataclass(frozen=True)
class QuantizeSpec:
    """The quantisation of one operand: the options of ``group_quantize``.

    Attributes:
        format: ``"mxfp8"``, ``"nvfp4"``, ``"mxfp4"``, ``"fp8_tensor"`` or ``"fp8_block"``.
        dtype: element type; None for the format's own.
        scaling, scale_layout, power_of_two, eps, block_2d: see ``group_quantize``.
        rht: whether columnwise components go through the random Hadamard transform.
        stochastic: whether rounding is stochastic, from a ``rng`` tensor.
        delayed: whether the scale is given, from a history of amaxes.
    """

    format: str
    dtype: torch.dtype | None = None
    scaling: str = "rceil"
    scale_layout: str = "compact"
    power_of_two: bool | None = None
    eps: float | None = None
    block_2d: bool = False
    rht: bool = False
    stochastic: bool = False
    delayed: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            got = unknown(self.format, FORMATS)
            raise ValueError(f"QuantizeSpec: `format` must be one of {', '.join(FORMATS)}, but got {got}")

    def quantize(
        self,
        x: Tensor,
        offs: Tensor | None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        scale: Tensor | None = None,
        row_scale: Tensor | None = None,
        rng: Tensor | None = None,
        noop: Tensor | None = None,
        slots: Tensor | None = None,
        rows: Tensor | None = None,
        dbias: bool = False,
        out: Components | None = None,
    ) -> Components:
        """Call ``group_quantize`` with these options.

        Args:
            scale: ``[G]``, required if ``delayed``.
            rng: ``[seed, offset]``, required if ``stochastic``.
            x, offs, rowwise, columnwise, row_scale, noop, slots, rows, dbias, out: see ``group_quantize``.
        """
        if self.delayed != (scale is not None):
            raise ValueError(f"`scale` must be {'given' if self.delayed else 'None'} for {self}")
        if self.stochastic != (rng is not None):
            raise ValueError(f"`rng` must be {'given' if self.stochastic else 'None'} for {self}")
        return group_quantize(
            x,
            offs,
            scale,
            row_scale,
            rng,
            noop,
            slots,
            rows,
            rowwise=rowwise,
            columnwise=columnwise,
            dbias=dbias,
            out=out,
            **self.options(columnwise),
        )

    def options(self, columnwise: bool = True) -> dict:
        """Return the keyword arguments of ``group_quantize`` and ``tgl.quantize`` that do not vary between calls."""
        made = {
            "format": self.format,
            "dtype": self.dtype,
            "scaling": self.scaling,
            "scale_layout": self.scale_layout,
            "power_of_two": self.power_of_two,
            "block_2d": self.block_2d,
            "rht": self.rht and columnwise,
        }
        return made if self.eps is None else {**made, "eps": self.eps}

    def describe(self, direction: str) -> str:
        """Return a table cell: element type, block shape and further steps in ``direction``."""
        f = FORMATS[self.format]
        if not f.block:
            blocks = "per group"
        elif self.block_2d:
            blocks = f"{f.block}x{f.block}"
        else:
            blocks = f"1x{f.block}" if direction == "rowwise" else f"{f.block}x1"
        extras = [
            "RHT" if self.rht and direction == "columnwise" else "",
            "stochastic" if self.stochastic else "",
            "delayed" if self.delayed else "",
        ]
        return " ".join([f.element_of(self.dtype), blocks, *filter(None, extras)])


class Operands(NamedTuple):
    """The quantisation of each operand of a recipe, for both directions that GEMMs read it in."""

    input: QuantizeSpec
    weight: QuantizeSpec
    grad: QuantizeSpec


@dataclass(frozen=True)
class Recipe:
    """Base class of the recipes; use one of the subclasses.

    Attributes:
        emulate: whether GEMMs may decode operands to bfloat16 on a GPU that has no kernel for the format, which is
            slower than no recipe. With False the layer's first call there raises ``NoImplementationError``. Keyword
            only, in every recipe.
        name: by which a layer takes the recipe, with its defaults.
    """

    name: ClassVar[str]
    emulate: bool = field(default=True, kw_only=True)

    @property
    def operands(self) -> Operands:
        """The table of operands."""
        raise NotImplementedError

    @property
    def format(self) -> str:
        """Name of the format that all operands share."""
        return self.operands.input.format

    def check_features(self, **features: int) -> None:
        """Raise ``ValueError`` for a layer width that the format cannot hold, naming it and what to do."""
        if FORMATS[self.format].per_byte == 2:
            for name, size in features.items():
                if size % 2:
                    raise ValueError(
                        f"`{name}` must be even for {type(self).__name__} (two elements share a byte): pad it to "
                        f"{size + 1}, but got {size}"
                    )

    def __str__(self) -> str:
        rows = [("", *GEMMS)]
        for operand, spec in zip(Operands._fields, self.operands):
            cells = []
            for gemm in GEMMS.values():
                direction = dict(gemm).get(operand)
                cells.append(f"{direction} {spec.describe(direction)}" if direction else "-")
            rows.append((operand, *cells))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([repr(self), *lines])

    def _require(self, field: str, condition: bool, must: str) -> None:
        if not condition:
            raise ValueError(f"{type(self).__name__}: `{field}` must be {must}, but got {getattr(self, field)!r}")

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if name == "fp8_format":
                self._require(name, isinstance(value, Format), "a tgl.recipes.Format")
            elif name == "scale_layout":
                self._require(name, value in SCALE_LAYOUTS, f"one of {', '.join(SCALE_LAYOUTS)}")
            elif name == "amax_epsilon":
                self._require(name, 0 <= value < float("inf"), "finite and not negative")
            elif name == "emulate":
                self._require(name, isinstance(value, bool), "True or False")


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: one power-of-two scale per 32 elements.

    Attributes:
        fp8_format: element types.
        scaling: how scales are rounded: ``"rceil"``, ``"floor"`` or ``"even"``; see ``group_quantize``.
        scale_layout: ``"blocked"``, as tensor cores read scales, or ``"compact"``.
    """

    name = "mxfp8"
    fp8_format: Format = Format.E4M3
    scaling: str = "rceil"
    scale_layout: str = "blocked"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("scaling", self.scaling in SCALINGS, f"one of {', '.join(SCALINGS)}")

    @property
    def operands(self) -> Operands:
        common: dict = {"scaling": self.scaling, "scale_layout": self.scale_layout}
        forward = QuantizeSpec("mxfp8", self.fp8_format.forward, **common)
        return Operands(
            input=forward,
            weight=forward,
            grad=QuantizeSpec("mxfp8", self.fp8_format.backward, **common),
        )


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: 4-bit elements, one E4M3 scale per 16 of them and one float32 scale per group.

    Attributes:
        disable_rht: leave out the random Hadamard transform of the operands of wgrad.
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: scale weights by 1 x 16 instead of 16 x 16, so that fprop and dgrad see two weights.
        scale_layout: ``"blocked"``, as tensor cores read scales, or ``"compact"``.
    """

    name = "nvfp4"
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    scale_layout: str = "blocked"

    @property
    def operands(self) -> Operands:
        layout = self.scale_layout
        rht = not self.disable_rht
        return Operands(
            input=QuantizeSpec("nvfp4", scale_layout=layout, rht=rht),
            weight=QuantizeSpec("nvfp4", scale_layout=layout, block_2d=not self.disable_2d_quantization),
            grad=QuantizeSpec("nvfp4", scale_layout=layout, rht=rht, stochastic=not self.disable_stochastic_rounding),
        )


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8, one scale per group, from the tensor itself.

    Attributes:
        fp8_format: element types.
        use_power_2_scales: round scales down to powers of two.
        amax_epsilon: smallest amax that a scale is made from.
    """

    name = "fp8_current"
    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0

    @property
    def operands(self) -> Operands:
        common: dict = {"power_of_two": self.use_power_2_scales, "eps": self.amax_epsilon or None}
        forward = QuantizeSpec("fp8_tensor", self.fp8_format.forward, **common)
        return Operands(
            input=forward,
            weight=forward,
            grad=QuantizeSpec("fp8_tensor", self.fp8_format.backward, **common),
        )


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8, one scale per group, from the amaxes of earlier calls.

    The histories and scales are buffers of the module that the recipe is given to, and part of its state dict.

    Attributes:
        margin: scales leave ``2 ** margin`` of headroom.
        fp8_format: element types.
        amax_history_len: number of calls in the history.
        amax_compute_algo: ``"max"`` over the history, or ``"most_recent"``.
    """

    name = "fp8_delayed"
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("amax_history_len", self.amax_history_len >= 1, "at least 1")
        self._require("amax_compute_algo", self.amax_compute_algo in ("max", "most_recent"), "'max' or 'most_recent'")

    @property
    def operands(self) -> Operands:
        forward = QuantizeSpec("fp8_tensor", self.fp8_format.forward, delayed=True)
        return Operands(
            input=forward,
            weight=forward,
            grad=QuantizeSpec("fp8_tensor", self.fp8_format.backward, delayed=True),
        )


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8, one scale per 128 elements of inputs and gradients, and per 128 x 128 of weights.

    Attributes:
        fp8_format: element types.
        use_f32_scales: any float32 scale instead of powers of two.
        amax_epsilon: smallest amax that a scale is made from.
    """

    name = "fp8_block"
    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False
    amax_epsilon: float = 0.0

    @property
    def operands(self) -> Operands:
        common: dict = {"power_of_two": not self.use_f32_scales, "eps": self.amax_epsilon or None}
        return Operands(
            input=QuantizeSpec("fp8_block", self.fp8_format.forward, **common),
            weight=QuantizeSpec("fp8_block", self.fp8_format.forward, block_2d=True, **common),
            grad=QuantizeSpec("fp8_block", self.fp8_format.backward, **common),
        )


RECIPES: dict[str, type[Recipe]] = {
    recipe.name: recipe
    for recipe in (MXFP8BlockScaling, NVFP4BlockScaling, Float8BlockScaling, Float8CurrentScaling, DelayedScaling)
}
"""The recipes by name: ``recipe="mxfp8"`` is ``recipe=MXFP8BlockScaling()``."""


def named(recipe: Recipe | str | None) -> Recipe | None:
    """Return the recipe of that name with its defaults; a recipe and None as they are.

    Raises:
        TypeError: ``recipe`` is something else.
        ValueError: there is no recipe of that name.
    """
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"`recipe` must be a recipe of tgl.recipes, the name of one or None, but got {recipe!r}")
    if recipe not in RECIPES:
        raise ValueError(f"`recipe` must be one of {', '.join(RECIPES)}, but got {unknown(recipe, RECIPES)}")
    return RECIPES[recipe]()


def brief(recipe: Recipe) -> str:
    """Return the name of ``recipe`` in quotes if it has the defaults, else its ``repr``."""
    for name, cls in RECIPES.items():
        if type(recipe) is cls and recipe == cls():
            return repr(name)
    return repr(recipe)
