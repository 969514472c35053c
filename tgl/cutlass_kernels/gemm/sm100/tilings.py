"""The GEMM tilings of sm_100, and the choice for a problem; plain Python. The choice has not been measured yet."""

from __future__ import annotations

from ...config import VARLEN_M, WIDTHS, GemmConfig
from ..operand_formats import OperandFormat

SMEM_BYTES = 227 * 1024
TMEM_COLUMNS = 512


def reason(kind: str, tiling: GemmConfig, bits: int) -> str | None:
    """Return None if there is a kernel of ``tiling`` on elements of ``bits``, else the reason why not."""
    if tiling.stages:
        return "stages must be 0: the ring has as many as fit in shared memory"
    if tiling.tma:
        return "operands are always loaded by TMA here; tma must be False"
    if tiling.unit_scales:
        return "unit scales exist for mma.sync kernels only"
    if tiling.pingpong:
        return "ping-pong consumers exist on sm_90 only"
    if (tiling.cluster_m, tiling.cluster_n) != (1, 1):
        return "there is no multicast beyond the CTA pair on sm_100"
    rows = 256 if tiling.two_cta else 128
    if tiling.tile_m != rows:
        return f"tile_m must be {rows} with two_cta={tiling.two_cta}, not {tiling.tile_m}"
    if tiling.tile_n not in (64, 128, 256):
        return f"tile_n must be 64, 128 or 256, not {tiling.tile_n}"
    return None


def scaled_reason(kind: str, form: OperandFormat, tiling: GemmConfig) -> str | None:
    """Return what else rules a tiling out for operands of ``form``, or None."""
    if form.block and tiling.tile_n != form.block:
        return f"the warps that scale partial sums have registers for tile_n = {form.block}, not {tiling.tile_n}"
    if form.anywhere and tiling.two_cta:
        return "the warp that zeroes what lies around a group cannot reach the shared memory of the other CTA"
    return None


def gathering_reason(tiling: GemmConfig) -> str | None:
    """Return what else rules a tiling out for gathering kernels: nothing, since each CTA of a pair gathers its half."""
    return None


def sum_columns(tiling: GemmConfig) -> int:
    """Return how many columns a dactivation epilogue adds up to one partial sum of a row: those of a tile."""
    return tiling.tile_n


def choose(kind: str, columns: int, depth: int, rows: int, widths: tuple[int, ...] = WIDTHS) -> GemmConfig:
    """Return wide tiles, as they take the least bandwidth per MMA, but not where half of one would stay empty.

    A pair of CTAs takes 256 rows once a group fills them on average.
    """
    columns = max(columns, widths[0])
    tile_n = 256 if columns > 128 else 128 if columns > 64 else 64
    if rows >= 256:
        return GemmConfig(tile_m=256, tile_n=tile_n, two_cta=True)
    return GemmConfig(tile_m=128, tile_n=tile_n)


def choose_gathering(
    kind: str, columns: int, depth: int, rows: int, operand: str, halves: tuple[int, ...] | None = None
) -> GemmConfig:
    """Return the tiling of ``choose``: a TMA copy of four rows costs an MMA no more than its part of a tile's copy."""
    return choose(kind, columns, depth, rows, halves or WIDTHS)


def choose_gradient(columns: int, depth: int, rows: int) -> GemmConfig:
    """Return the tiling of a kernel with a dactivation epilogue: that of ``choose``, whose long epilogue is hidden."""
    return choose(VARLEN_M, columns, depth, rows)


def choose_scaled(kind: str, form: OperandFormat, columns: int, depth: int, rows: int) -> GemmConfig:
    """Return wide tiles for pairs of CTAs, and for long contractions.

    Pairs load two thirds of the bytes per MMA with them, and their epilogue overlaps the next tile's mainloop, but for
    the columns that two accumulators share: a short contraction may have them too. Each CTA of a pair loads half of B's
    columns besides: of 128 columns of bytes side by side that would be 64, half of a line of the L2, at the price of a
    whole one. A single CTA has room for fewer stages of them, and where groups are short, narrow tiles are more, so
    that more multiprocessors load weights. Where registers hold the sums, there are no wide ones.
    """
    pair = rows >= 256 and not form.anywhere
    wide = not form.block and columns > 128 and (pair or depth >= 16 * form.tile_k)
    return GemmConfig(tile_m=256 if pair else 128, tile_n=256 if wide else 128, tile_k=form.tile_k, two_cta=pair)
