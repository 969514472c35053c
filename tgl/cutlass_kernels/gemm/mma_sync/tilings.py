"""The tilings of mma.sync GEMMs, and the choice for a problem; plain Python. They were timed on a Hopper only."""

from __future__ import annotations

from dataclasses import replace

from ...config import VARLEN_K, VARLEN_M, WIDTHS, GemmConfig
from ..operand_formats import ATOM_ROWS, OperandFormat

WARPS = {
    (64, 64): (2, 2),
    (64, 128): (2, 2),
    (128, 64): (2, 2),
    (128, 128): (4, 2),
    (128, 256): (2, 4),
    (256, 128): (4, 2),
}
"""By rows and columns of a tile: warps down and across. One has at most 64 x 64: half of its registers hold sums. From
128 columns on it has 64, so that it stores whole chunks of gate and linear half."""

ALIGNMENT = 1024  # bytes beside the ring: its alignment
RESERVED = 3 * 1024  # and at most what the order of tiles takes, which groups of rows have no need of
FEWEST, MOST = 2, 5  # stages
LINE, WORD = 128, 4  # bytes: of a row or column of a k tile, and of a factor


def stage_bytes(tiling: GemmConfig, kind: str | None = None, form: OperandFormat | None = None) -> int:
    """Return the shared memory of one stage of the ring: lines of 16-bit operands or of ``form``, and their scales."""
    lines = (tiling.tile_m + tiling.tile_n) * LINE
    if kind is None or form is None:
        return lines
    factors = factor_count(kind, tiling, form) * WORD
    return (
        lines + (factors + LINE - 1) // LINE * LINE + form.scale_bytes(tiling.tile_m) + form.scale_bytes(tiling.tile_n)
    )


def factor_count(kind: str, tiling: GemmConfig, form: OperandFormat) -> int:
    """Factors of blocks of a stage: of its rows, then of its columns, or one of the matrix."""
    if not form.block:
        return 0
    return tiling.tile_m + (tiling.tile_n if kind == VARLEN_K else 1)


def _beside_sums(what: str, tiling: GemmConfig) -> str | None:
    """Return why a thread has no registers for something, or None."""
    large = tiling.tile_m * tiling.tile_n > 128 * 128
    return f"{what} do not fit in registers beside the 64 x 64 accumulators of a warp" if large else None


def gathering_reason(tiling: GemmConfig) -> str | None:
    """Return what else rules a tiling out for kernels that gather rows of an operand, or None."""
    return _beside_sums("the rows that a thread gathers", tiling)


def gradient_reason(tiling: GemmConfig) -> str | None:
    """Return what else rules a tiling out for kernels with a dactivation epilogue, or None."""
    return _beside_sums("the pre-activations and gradients of a thread", tiling)


class Tilings:
    """The tilings of an architecture.

    Attributes:
        SMEM_BYTES: shared memory that a CTA may have.
        widths: bits of the elements that its MMAs take.
        scales_blocks: whether there are MMAs that scale blocks of what they multiply.
        tma: whether there is TMA, by which operands of 16 bits are loaded then unless a tiling says otherwise.
    """

    def __init__(
        self, smem_bytes: int, widths: tuple[int, ...] = (16,), scales_blocks: bool = False, tma: bool = False
    ) -> None:
        self.SMEM_BYTES, self.widths, self.scales_blocks, self.tma = smem_bytes, widths, scales_blocks, tma

    def stages(self, tiling: GemmConfig, kind: str | None = None, form: OperandFormat | None = None) -> int:
        """Return the stages that shared memory holds, up to ``MOST``; ``kind`` and ``form`` for quantised operands."""
        beside = ALIGNMENT if kind == VARLEN_M else RESERVED
        return min((self.SMEM_BYTES - beside) // stage_bytes(tiling, kind, form), MOST)

    def reason(self, kind: str, tiling: GemmConfig, bits: int) -> str | None:
        """Return None if there is a kernel of ``tiling`` on elements of ``bits``, else the reason why not."""
        shape = tiling.tile_m, tiling.tile_n
        if bits not in self.widths:
            taken = " and ".join(f"{width}-bit" for width in self.widths)
            return f"mma.sync kernels take {taken} elements here, not {bits}-bit ones"
        if tiling.two_cta or tiling.pingpong or tiling.ctas > 1:
            return "mma.sync kernels have neither CTA pairs, ping-pong consumers nor clusters"
        if tiling.tma and not self.tma:
            return "there is no TMA here: operands are loaded by cp.async"
        if tiling.unit_scales and bits != 8:
            return f"unit scales are for FP8, not for {bits}-bit elements"
        if shape not in WARPS:
            return f"tiles are {', '.join(f'{m} x {n}' for m, n in WARPS)}, not {shape[0]} x {shape[1]}"
        return self._stages_reason(tiling) if bits == 16 else None

    def _stages_reason(
        self, tiling: GemmConfig, kind: str | None = None, form: OperandFormat | None = None
    ) -> str | None:
        most = self.stages(tiling, kind, form)
        if FEWEST <= tiling.stages <= most:
            return None
        return f"stages must be {FEWEST} to {most}, as many as fit in shared memory, not {tiling.stages}"

    def scaled_reason(self, kind: str, form: OperandFormat, tiling: GemmConfig) -> str | None:
        """Return what else rules a tiling out for operands of ``form``, or None."""
        found = None if form.vector else _beside_sums("the partial sums of 8-bit products", tiling)
        if tiling.tma:
            found = "quantised operands are loaded by cp.async, not by TMA"
        elif (form.vector or tiling.unit_scales) and not self.scales_blocks:
            found = "there is no block-scaled mma.sync here"
        elif form.vector and tiling.unit_scales:
            found = "these operands have block scales instead of unit scales"
        elif form.vector and (tiling.tile_m % ATOM_ROWS or tiling.tile_n % ATOM_ROWS):
            found = f"tile_m and tile_n must be multiples of {ATOM_ROWS}, the rows of a block of scales"
        return self._stages_reason(tiling, kind, form) if found is None else found

    def sum_columns(self, tiling: GemmConfig) -> int:
        """Return how many columns a dactivation epilogue adds up to one partial sum of a row: those of a warp."""
        return tiling.tile_n // WARPS[tiling.tile_m, tiling.tile_n][1]

    def choose(self, kind: str, columns: int, depth: int, rows: int, widths: tuple[int, ...] = WIDTHS) -> GemmConfig:
        """Return 128 x 128 tiles if rows and columns fill them, 128 x 256 if shared memory holds 3 stages of those.

        A larger tile reads fewer bytes per MMA from shared memory and through L2; with fewer than 3 stages nothing
        would be on its way while a stage is multiplied.
        """
        tile_m, tile_n = 64 if rows <= 64 else 128, 64 if max(columns, widths[0]) <= 64 else 128
        if tile_m == 128 and columns > 128 and self.stages(GemmConfig(128, 256)) > FEWEST:
            tile_n = 256
        return self.deepest(tile_m, tile_n)

    def gathering_reason(self, tiling: GemmConfig) -> str | None:
        """Return the result of the function of this name."""
        return gathering_reason(tiling)

    def choose_gathering(
        self, kind: str, columns: int, depth: int, rows: int, operand: str, halves: tuple[int, ...] | None = None
    ) -> GemmConfig:
        """Return the tiling of ``choose``, or 128 x 128 where that is larger."""
        usual = self.choose(kind, columns, depth, rows, halves or WIDTHS)
        return usual if gathering_reason(usual) is None else self.deepest(128, 128)

    def choose_gradient(self, columns: int, depth: int, rows: int) -> GemmConfig:
        """Return the tiling of a kernel with a dactivation epilogue: that of ``choose``, if it can."""
        usual = self.choose(VARLEN_M, columns, depth, rows)
        return usual if gradient_reason(usual) is None else self.deepest(128, 128)

    def choose_scaled(self, kind: str, form: OperandFormat, columns: int, depth: int, rows: int) -> GemmConfig:
        """128 x 128 tiles where rows and columns fill them, the largest beside whose sums are those of a stage.

        With scales that MMAs take themselves there are no smaller ones, and of larger ones two stages do not fit.
        """
        if form.vector:
            return self.deepest(ATOM_ROWS, ATOM_ROWS, kind, form)
        return self.deepest(64 if rows <= 64 else 128, 64 if columns <= 64 else 128, kind, form)

    def deepest(
        self, tile_m: int, tile_n: int, kind: str | None = None, form: OperandFormat | None = None
    ) -> GemmConfig:
        """Return the tiling of a shape with all the stages there is room for, of operands of 16 bits or of ``form``."""
        if form is None:
            shape = GemmConfig(tile_m, tile_n, tma=self.tma)
        else:
            shape = GemmConfig(tile_m, tile_n, form.tile_k, unit_scales=self.scales_blocks and not form.vector)
        return replace(shape, stages=self.stages(shape, kind, form))
