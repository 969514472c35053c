"""The quantisation that a kernel is built for; a part of its key."""

from __future__ import annotations

from dataclasses import dataclass

from ..activation.activation_spec import ActivationSpec
from ..gemm.operand_formats import DECODINGS, Decoding


@dataclass(frozen=True)
class MXFP8Spec:
    """One MXFP8 quantisation; see ``tgl.group_quantize``.

    Attributes:
        source: dtype of x, as ``torch`` names it.
        element: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
        rowwise, columnwise: the requested directions.
        scaling: ``"rceil"``, ``"floor"`` or ``"even"``.
        blocked: whether scales are swizzled for tensor cores.
        grouped: whether x is rows in groups rather than matrices.
        slots: whether a table maps each group to a matrix of x.
        rows: whether rows of the groups are read from x by an index.
        row_scale: dtype of the factor per row, or None; with an activation of the probabilities.
        noop: dtype of the flag that disables all writes, or None.
        activation: the activation that is applied to x first, or None.
        elementwise: whether x, in any layout, and data are accessed element by element; see ``LaneValues``.
        codes: how x is decoded, if it is rowwise codes with their scales as factors; None if x is not quantised.
    """

    source: str
    element: str
    rowwise: bool
    columnwise: bool
    scaling: str
    blocked: bool
    grouped: bool
    row_scale: str | None = None
    noop: str | None = None
    activation: ActivationSpec | None = None
    elementwise: bool = False
    slots: bool = False
    rows: bool = False
    codes: DequantizeSpec | None = None


@dataclass(frozen=True)
class FP8Spec:
    """One FP8 quantisation with float32 scales; see ``tgl.group_quantize``.

    Attributes:
        source: dtype of x, as ``torch`` names it.
        element: ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
        rowwise, columnwise: the requested directions.
        blocks: ``"1d"`` for 128 values of a row or column, ``"2d"`` for 128 x 128, None for one scale per group.
        power_of_two: whether scales are powers of two.
        eps: bits of the least largest magnitude.
        grouped: whether x is rows in groups rather than matrices.
        slots: whether a table maps each group to a matrix of x.
        rows: whether rows of the groups are read from x by an index.
        given: whether the scales of the groups are given.
        row_scale: dtype of the factor per row, or None; with an activation of the probabilities.
        noop: dtype of the flag that disables all writes, or None.
        activation: the activation that is applied to x first, or None; not where scales follow from whole groups.
        elementwise: whether x, in any layout, and data are accessed element by element; see ``LaneValues``.
        codes: how x is decoded, if it is rowwise codes with their scales as factors; None if x is not quantised.
    """

    source: str
    element: str
    rowwise: bool
    columnwise: bool
    blocks: str | None
    power_of_two: bool
    eps: int
    grouped: bool
    given: bool = False
    row_scale: str | None = None
    noop: str | None = None
    activation: ActivationSpec | None = None
    elementwise: bool = False
    slots: bool = False
    rows: bool = False
    codes: DequantizeSpec | None = None


@dataclass(frozen=True)
class NVFP4Spec:
    """One NVFP4 quantisation; see ``tgl.group_quantize``.

    Attributes:
        source: dtype of x, as ``torch`` names it.
        rowwise, columnwise: the requested directions.
        blocks_2d: whether a square of 16 x 16 shares a scale.
        blocked: whether scales are swizzled for tensor cores.
        grouped: whether x is rows in groups rather than matrices.
        slots: whether a table maps each group to a matrix of x.
        rows: whether rows of the groups are read from x by an index.
        rht: whether columnwise data is made from the Hadamard transform.
        stochastic: whether elements are rounded stochastically.
        converts: whether the architecture has an instruction that rounds to E2M1.
        row_scale: dtype of the factor per row, or None.
        noop: dtype of the flag that disables all writes, or None.
        elementwise: whether x, in any layout, and data are accessed element by element; see ``LaneValues``.
        chip: the one whose instruction rounds stochastically, and for which alone the kernel is compiled; None where
            integers do that.
    """

    source: str
    rowwise: bool
    columnwise: bool
    blocks_2d: bool
    blocked: bool
    grouped: bool
    rht: bool
    stochastic: bool
    converts: bool
    row_scale: str | None = None
    noop: str | None = None
    elementwise: bool = False
    slots: bool = False
    rows: bool = False
    chip: str | None = None


@dataclass(frozen=True)
class DequantizeSpec:
    """One dequantisation; see ``tgl.group_dequantize``.

    Attributes:
        format: the op's name of the format.
        element: ``"float8_e4m3fn"``, ``"float8_e5m2"`` or ``"float4_e2m1"``.
        out: dtype of the result, as ``torch`` names it.
        columnwise: whether the components are the columnwise ones.
        blocked: whether scales are swizzled for tensor cores.
        square: whether blocks are 128 x 128.
        rht: whether the data was transformed.
        grouped: whether the result is rows in groups rather than matrices.
        vector: elements of a row that are stored at once.
        run: bytes of transposed data that are loaded at once; 0 of data in the order of the result.
    """

    format: str
    element: str
    out: str
    columnwise: bool
    blocked: bool
    square: bool
    rht: bool
    grouped: bool
    vector: int
    run: int

    @property
    def decoding(self) -> Decoding:
        """The decoding of the format."""
        return DECODINGS[self.format]
