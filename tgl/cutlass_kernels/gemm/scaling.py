"""What the operands of a GEMM are, as a kernel is built for them; plain Python."""

from __future__ import annotations

from dataclasses import dataclass

ATOM_ROWS, ATOM_COLUMNS = 128, 4  # the tile of the blocked layout: 512 bytes


@dataclass(frozen=True)
class OperandFormat:
    """What both operands have in common.

    Attributes:
        vector: elements along the contraction that share a scale in the blocked layout; 0 without such scales.
        scale: the scale's type, as the kernel language names it.
        unit: tokens of a group begin on a multiple of this many in columnwise data and scales; see
            ``tgl.meta.placement``.
        placed: whether columnwise data lies so itself, transposed ``[features, Tp]``; else it is ``[T, features]``.
        alpha: the epilogue's factor per group; see ``EpilogueSpec``.
        tile_k: depth of a pipeline stage in elements: 128 bytes.
        block: elements along the contraction that share a float32 scale, which the sum over them is multiplied by; 0
            without such scales.
        archs: where there are kernels for it.
    """

    vector: int
    scale: str
    unit: int
    placed: bool
    alpha: str | None
    tile_k: int
    block: int = 0
    archs: tuple[str, ...] = ()

    def scale_bytes(self, rows: int) -> int:
        """Bytes of the scales of a stage of ``rows`` rows, rounded up to whole atoms."""
        if not self.vector:
            return 0
        return (rows + ATOM_ROWS - 1) // ATOM_ROWS * ATOM_ROWS * self.tile_k // self.vector


DENSE = OperandFormat(vector=0, scale="", unit=0, placed=False, alpha=None, tile_k=64)  # 16-bit operands
SM100, BOTH = ("sm_100",), ("sm_90", "sm_100")
MXFP8 = OperandFormat(32, "Float8E8M0FNU", unit=128, placed=False, alpha=None, tile_k=128, archs=SM100)
NVFP4 = OperandFormat(16, "Float8E4M3FN", unit=64, placed=True, alpha="amax", tile_k=256, archs=SM100)
FP8_TENSOR = OperandFormat(0, "", unit=32, placed=True, alpha="scale", tile_k=128, archs=BOTH)
FP8_BLOCK = OperandFormat(0, "", unit=32, placed=True, alpha=None, tile_k=128, block=128, archs=("sm_90",))
FORMATS = {"mxfp8": MXFP8, "nvfp4": NVFP4, "fp8_tensor": FP8_TENSOR, "fp8_block": FP8_BLOCK}
