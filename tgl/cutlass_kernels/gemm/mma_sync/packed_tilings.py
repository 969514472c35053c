"""The tilings of mma.sync GEMMs with packed B, and the choice among them for a problem.

Plain Python. The kernels run on every architecture, so tilings follow from its shared memory alone. They have not been
measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....meta.formats import FORMATS
from ...config import LINE, GemmConfig
from ...runtime.requirements import ALIGNMENT as PIECE
from ..operand_formats import DECODINGS, Decoding

WARPS = {(16, 128): (1, 4), (32, 128): (1, 4), (64, 128): (2, 2), (128, 128): (4, 2), (128, 64): (2, 2)}
"""By rows and columns of a tile: warps down and across. Few rows lie in one warp, with no more MMAs than they fill."""

RESERVED = 1024  # bytes: the alignment of the ring, and what the system takes of every CTA's shared memory
FEWEST, MOST = 3, 5  # stages: one is multiplied, one is decoded, the others are on their way
FEW_ROWS = 64  # of a tile: two CTAs of such share a multiprocessor where they fit, for more bytes on their way
WORD = 4  # bytes


@dataclass(frozen=True)
class PackedSpec:
    """Packing of B.

    Attributes:
        format: of ``tgl.meta.formats.FORMATS``.
        element: as ``torch`` names it; E2M1 is ``"float4_e2m1"``.
        over_rows: whether the contraction runs over the rows of the matrices, along which they are not packed.
    """

    format: str
    element: str
    over_rows: bool

    @property
    def decoding(self) -> Decoding:
        """Return the meaning of its scales."""
        return DECODINGS[self.format]

    @property
    def per_byte(self) -> int:
        """Elements in a byte."""
        return FORMATS[self.format].per_byte

    @property
    def elements(self) -> int:
        """Elements in 16 bytes, which a thread copies and decodes together."""
        return PIECE * self.per_byte

    @property
    def rows_of_scale(self) -> int:
        """Return the rows of a matrix that share a scale."""
        return self.decoding.block if FORMATS[self.format].square_scales else 1

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of one scale."""
        return FORMATS[self.format].scale_dtype.itemsize

    @property
    def words(self) -> int:
        """Words beside 16 bytes of elements: that of the scale, where in it the scale begins, the largest magnitude."""
        return 1 + (self.scale_bytes < WORD) + self.decoding.amax


def pieces(spec: PackedSpec, tiling: GemmConfig) -> int:
    """Pieces of 16 bytes that B has in a stage."""
    return tiling.tile_n * LINE // spec.elements


def stage_bytes(spec: PackedSpec, tiling: GemmConfig) -> int:
    """Return the shared memory of one stage of the ring: lines of A, pieces of B, and the words of each."""
    return tiling.tile_m * LINE * 2 + pieces(spec, tiling) * (PIECE + spec.words * WORD)


def decoded_bytes(tiling: GemmConfig) -> int:
    """Return the shared memory of B's decoded columns of one stage; there are two, one being filled."""
    return tiling.tile_n * LINE * 2


def stages(spec: PackedSpec, tiling: GemmConfig, smem_bytes: int) -> int:
    """Return the stages that so much shared memory holds, up to ``MOST``; 0 if it holds fewer than ``FEWEST``."""
    found = (smem_bytes - RESERVED - 2 * decoded_bytes(tiling)) // stage_bytes(spec, tiling)
    return 0 if found < FEWEST else min(found, MOST)


def sharing(spec: PackedSpec, tiling: GemmConfig, smem_bytes: int) -> int:
    """Return the number of CTAs that share a multiprocessor."""
    return 2 if tiling.tile_m <= FEW_ROWS and stages(spec, tiling, smem_bytes // 2) else 1


def choose(spec: PackedSpec, rows: int, smem_bytes: int) -> GemmConfig:
    """Return the tiling for groups of ``rows`` rows on average.

    The smallest height that is at least twice ``rows``: then most groups are one tile, which reads their matrix once.
    """
    for shape in sorted(WARPS, key=lambda shape: (shape[0], -shape[1])):
        tiling = GemmConfig(*shape)
        if shape[0] >= min(2 * rows, 128) and stages(spec, tiling, smem_bytes):
            return with_stages(spec, tiling, smem_bytes)
    raise ValueError(f"tgl: {smem_bytes} bytes of shared memory hold no tile of {spec.format}")


def with_stages(spec: PackedSpec, tiling: GemmConfig, smem_bytes: int) -> GemmConfig:
    """Return a tiling of this shape with as many stages as shared memory holds."""
    room = smem_bytes // sharing(spec, tiling, smem_bytes)
    return GemmConfig(tiling.tile_m, tiling.tile_n, stages=stages(spec, tiling, room))
