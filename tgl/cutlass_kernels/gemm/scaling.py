"""Block scales of GEMM operands: what a kernel is built with, plain Python."""

from __future__ import annotations

from dataclasses import dataclass

ATOM_ROWS, ATOM_COLUMNS = 128, 4  # the tile of the blocked layout: 512 bytes


@dataclass(frozen=True)
class BlockScaling:
    """One scale per ``vector`` elements along the contraction, in both operands.

    Attributes:
        vector: elements that share a scale.
        scale: the scale's type, as the kernel language names it.
        unit: a group's scales and, where tokens are stored by place, its data begin on a multiple of this many tokens;
            see ``tgl.meta.placement``.
        per_group: whether a float32 factor per group goes with the scales of each operand (its ``amax``).
    """

    vector: int
    scale: str
    unit: int
    per_group: bool = False

    def bytes(self, rows: int, depth: int) -> int:
        """Bytes of the scales of ``rows x depth`` elements, rows rounded up to whole atoms."""
        return (rows + ATOM_ROWS - 1) // ATOM_ROWS * ATOM_ROWS * depth // self.vector


MXFP8 = BlockScaling(vector=32, scale="Float8E8M0FNU", unit=128)
NVFP4 = BlockScaling(vector=16, scale="Float8E4M3FN", unit=64, per_group=True)
