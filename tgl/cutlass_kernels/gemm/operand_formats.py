"""Properties of formats that kernels depend on: operands of a GEMM, and decoding of components; plain Python."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...meta.formats import E4M3, E8M0, FORMATS
from ...meta.table import OnePerName

ATOM_ROWS, ATOM_COLUMNS = 128, 4  # the tile of the blocked layout: 512 bytes


@dataclass(frozen=True)
class OperandFormat:
    """Format of both operands of a GEMM.

    Attributes:
        vector: elements along the contraction that share a scale in the blocked layout; 0 without such scales.
        scale: the scale's type, as the kernel language names it.
        unit: in columnwise data and scales, the tokens of a group begin on a multiple of this many; see
            ``tgl.meta.placement``.
        placed: whether columnwise data is itself placed in such units, transposed ``[features, Tp]``; else it is
            ``[T, features]``.
        alpha: the epilogue's factor per group; see ``EpilogueSpec``.
        tile_k: depth of a pipeline stage in elements: 128 bytes.
        block: elements along the contraction that share a float32 scale, by which their partial sum is multiplied;
            0 without such scales.
        archs: architectures that have kernels for it.
        anywhere: whether groups begin anywhere along the contraction in columnwise data, without a placement; see
            ``k_tail``.
    """

    vector: int
    scale: str
    unit: int
    placed: bool
    alpha: str | None
    tile_k: int
    block: int = 0
    archs: tuple[str, ...] = ()
    anywhere: bool = False

    def scale_bytes(self, rows: int) -> int:
        """Return the bytes of the scales of a stage of ``rows`` rows, rounded up to whole atoms."""
        if not self.vector:
            return 0
        return (rows + ATOM_ROWS - 1) // ATOM_ROWS * ATOM_ROWS * self.tile_k // self.vector


DENSE = OperandFormat(vector=0, scale="", unit=0, placed=False, alpha=None, tile_k=64)  # 16-bit operands
BLOCKS = ("sm_100", "sm_120", "sm_121")  # architectures with block-scaled MMAs
FP8 = ("sm_89", "sm_90", *BLOCKS)  # architectures whose tensor cores take FP8
_SCALE_TYPES = {E8M0: "Float8E8M0FNU", E4M3: "Float8E4M3FN"}
_STAGE = 128  # bytes along the contraction


def _operands(name: str, *archs: str) -> OperandFormat:
    """Return the operand format that follows from the table of formats."""
    f = FORMATS[name]
    blocked = f.scale_type in _SCALE_TYPES
    return OperandFormat(
        vector=f.block if blocked else 0,
        scale=_SCALE_TYPES.get(f.scale_type, ""),
        unit=f.unit_data or f.unit_scale,
        placed=f.transposed_columnwise,
        alpha="amax" if f.decodes_with_amax else None if f.block else "scale",
        tile_k=_STAGE * f.per_byte,
        block=0 if blocked else f.block,
        archs=archs,
    )


MXFP8 = _operands("mxfp8", *BLOCKS)
KERNELS: OnePerName[OperandFormat | str] = OnePerName(
    FORMATS,
    "KERNELS in tgl/cutlass_kernels/gemm/operand_formats.py",
    {
        "mxfp8": MXFP8,
        "nvfp4": _operands("nvfp4", *BLOCKS),
        "mxfp4": "has no kernel for two operands of mxfp4: grouped_gemm_packed multiplies bfloat16 by it",
        "fp8_tensor": _operands("fp8_tensor", *FP8),
        "fp8_block": _operands("fp8_block", *FP8),
    },
)
"""By format: the operands of its GEMMs, or the reason why there is no kernel."""

OPERANDS = {name: form for name, form in KERNELS.items() if isinstance(form, OperandFormat)}
NO_KERNEL = {name: reason for name, reason in KERNELS.items() if isinstance(reason, str)}

NO_EPILOGUE: OnePerName[str | None] = OnePerName(
    FORMATS,
    "NO_EPILOGUE in tgl/cutlass_kernels/gemm/operand_formats.py",
    {
        "mxfp8": None,
        "nvfp4": "the scales of nvfp4 follow from the amax of a whole group, which one tile does not know",
        "mxfp4": "no kernel multiplies two operands of mxfp4",
        "fp8_tensor": "the scale of fp8_tensor follows from the amax of a whole group, which one tile does not know",
        "fp8_block": "takes mxfp8, got fp8_block",
    },
)
"""By format: why no GEMM quantises its activation output to it; None for the format that a kernel writes."""

ROW_SCALED = OperandFormat(vector=0, scale="", unit=0, placed=True, alpha="lines", tile_k=_STAGE, archs=FP8)
"""FP8 operands with a float32 scale per row, along the whole contraction."""
ROW_SCALED_WGRAD = replace(ROW_SCALED, anywhere=True)
"""``ROW_SCALED`` for weight gradients, where groups begin anywhere along the contraction, as in torch."""

# --- dequantisation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoding:
    """Layout and meaning of a format's components, for the dequantising kernels.

    Attributes:
        scale: what the bytes of a scale mean, as ``torch`` names it: ``"float8_e8m0fnu"``, ``"float8_e4m3fn"`` or
            ``"float32"``.
        block: elements that share a scale; 0 if a whole group shares one.
        amax: whether scales are multiplied by a factor that follows from the amax of the group.
        unit: placement unit of transposed data, in elements.
    """

    scale: str
    block: int
    amax: bool
    unit: int


def _decoding(name: str) -> Decoding:
    f = FORMATS[name]
    if not f.transposed_columnwise and f.scale_type != E8M0:
        must = "have E8M0 scales, or transposed columnwise data"
        raise ValueError(f"tgl: {name} must {must}, for that is what the dequantising kernels read")
    return Decoding(str(f.scale_type).removeprefix("torch."), f.block, f.decodes_with_amax, f.unit_data)


DECODINGS: OnePerName[Decoding] = OnePerName(
    FORMATS,
    "DECODINGS in tgl/cutlass_kernels/gemm/operand_formats.py",
    {
        "mxfp8": _decoding("mxfp8"),
        "nvfp4": _decoding("nvfp4"),
        "mxfp4": _decoding("mxfp4"),
        "fp8_tensor": _decoding("fp8_tensor"),
        "fp8_block": _decoding("fp8_block"),
    },
)
