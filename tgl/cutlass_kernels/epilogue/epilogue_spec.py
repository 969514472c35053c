"""The epilogue that a kernel is built with; a part of its key."""

from __future__ import annotations

from dataclasses import dataclass

from ..activation.activation_spec import ActivationSpec
from ..quantize.quantize_spec import MXFP8Spec


@dataclass(frozen=True)
class EpilogueSpec:
    """Epilogue ``out = alpha[g] * acc + bias[g] * bias_scale[t]`` or ``out += alpha[g] * acc``, in float32, rounded
    once.

    With factors of rows and columns ``out = a_factor[row] * b_factor[column] * acc``.

    Attributes:
        out: dtype of the output, as ``torch`` names it: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        bias: dtype of ``bias [G, N]``, or None.
        bias_scale: dtype of ``bias_scale [T]``, or None.
        accumulate: whether the output is added to.
        tail: whether rows past the last group are set to zero (``varlen_m``).
        alpha: kind of ``alpha[g]``: ``"scale"``: the product of both operands' factors of the group; ``"amax"``: the
            product of the decode scales that follow from their amax (NVFP4); ``"lines"``: no factor of a group, but one
            for each of its rows and one for each of its columns; None: 1.
        activation: a second output ``y = probs[t] * A(out)``, of the rounded ``out``, in its dtype; None: none.
        probs: dtype of ``probs [T]``, or None.
        keeps: whether ``out`` is stored; if not, only its activation is.
        quantized: how ``y`` is quantised, which is then stored as components only; None: not quantised.
    """

    out: str
    bias: str | None = None
    bias_scale: str | None = None
    accumulate: bool = False
    tail: bool = False
    alpha: str | None = None
    activation: ActivationSpec | None = None
    probs: str | None = None
    quantized: MXFP8Spec | None = None
    keeps: bool = True

    @property
    def vectors(self) -> bool:
        """Whether anything is read per row or column of a tile."""
        return self.bias is not None or self.probs is not None or self.line_factors

    @property
    def group_factor(self) -> bool:
        """Whether a group's sums have one factor."""
        return self.alpha in ("scale", "amax")

    @property
    def line_factors(self) -> bool:
        """Whether each row and each column of a group's sums has a factor."""
        return self.alpha == "lines"

    @property
    def gated(self) -> bool:
        """Whether a tile holds a block of gate columns and, behind it, as many of the linear half.

        With block scales of B, whose rows a tensor map cannot deinterleave, interleaved halves stay interleaved.
        """
        return self.activation is not None and self.activation.gated and not self.alternates

    @property
    def alternates(self) -> bool:
        """Whether the columns of a tile alternate between gate and linear half."""
        return self.quantized is not None and self.activation is not None and self.activation.interleaved

    @property
    def reduces(self) -> bool:
        """Whether to accumulate by an adding store: exact only if the output has the accumulator's precision."""
        return self.accumulate and self.out == "float32"

    @property
    def reads_output(self) -> bool:
        """Whether to accumulate by reading the output first, so that the sum is rounded once."""
        return self.accumulate and self.out != "float32"
