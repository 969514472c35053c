"""Scales of rows in groups, in the layout of tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ... import backends
from ...meta.memory import address
from ...meta.scale_layout import Scales
from ..runtime import device
from ..runtime.launcher import Launcher, warm
from ..runtime.reach import Reach
from ..runtime.requirements import ALIGNMENT, MAX_ROWS, Need
from .dequantize import divisor

LAYOUT = "blocked"


class LayOutKey(NamedTuple):
    """Key of a compiled kernel; ``vector``: bytes of an access."""

    arch: str
    emulated: bool
    vector: int
    indexed: bool


class LayOutCall(NamedTuple):
    """Arguments of ``scale_to_layout``; with ``rows`` row t has the scales of row ``rows[t]``."""

    scale: Tensor
    offs: Tensor | None
    scales: Scales
    out: Tensor
    rows: Tensor | None = None

    @property
    def most_rows(self) -> int:
        """Return the larger of S and T."""
        return max(self.scale.shape[0], 0 if self.rows is None else self.rows.shape[0])


class ScaleLayoutLauncher(Launcher[LayOutCall]):
    """Writes the tiles of rowwise scales to ``out``."""

    op = "scale_to_layout"
    call = LayOutCall
    reach = Reach({"scale": Need("rows", pitch=1, address=1)}, indexed={"scale": "rows"}, gathers=lambda c: "scale")

    def reject_reason(self, c: LayOutCall) -> backends.Reason:
        """Return why the kernel does not take the layout or the sizes, or None."""
        reason = device.packages_reason()
        if reason is None and (c.offs is None or c.scales.columnwise or c.scales.layout != LAYOUT):
            reason = f'lays out rowwise scales of rows in groups, in layout "{LAYOUT}"'
        if reason is None and c.most_rows > MAX_ROWS:
            reason = f"takes up to {MAX_ROWS} rows, got {c.most_rows}"
        return reason

    def plan_key(self, c: LayOutCall) -> tuple | None:
        """Return the plan key, which does not depend on the numbers of rows."""
        scale = c.scale
        if self.is_empty(c) or not warm(c.most_rows, scale.data_ptr()):
            return None
        layout = c.scales.layout, c.scales.columnwise, c.offs is None
        return layout, scale.shape[1:], scale.stride(), c.rows is None

    def is_empty(self, c: LayOutCall) -> bool:
        """Return whether there are no bytes to write, or no scales for them."""
        return c.out.numel() == 0 or c.scale.numel() == 0 or (c.offs is not None and c.offs.shape[0] == 0)

    def zero_outputs(self, c: LayOutCall) -> None:
        """Write zeros, since there are no scales."""
        c.out.zero_()

    def key(self, c: LayOutCall, arch: str) -> LayOutKey:
        """Return the key of the kernel; the width of accesses follows from where the rows lie."""
        vector = divisor(c.scale.shape[1] | c.scale.stride(0) | address(c.scale), ALIGNMENT)
        return LayOutKey(arch, not c.scale.is_cuda, vector, c.rows is not None)

    def build(self, key: LayOutKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        from ..quantize.scale_swizzle import ScaleLayoutKernel
        from ..runtime.compiling import compiled, matrix, strided, vector

        return compiled(
            key.arch,
            ScaleLayoutKernel(key.vector),
            matrix("uint8", pitch=key.vector, columns=key.vector, align=key.vector),
            vector("int32"),
            strided("int32" if key.indexed else None),
            vector("uint8", ALIGNMENT),
        )

    def arguments(self, c: LayOutCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.scale, c.offs, c.rows, c.out


SCALE_TO_LAYOUT = ScaleLayoutLauncher()
