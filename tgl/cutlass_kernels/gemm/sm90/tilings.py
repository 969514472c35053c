"""The GEMM tilings of sm_90, and the choice among them for a problem; plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ....meta.formats import FORMATS
from ....meta.placement import ceil_div
from ....meta.table import OnePerName
from ...config import VARLEN_K, VARLEN_M, WIDTHS, GemmConfig
from ..mma_sync.packed_tilings import WORD, PackedSpec
from ..operand_formats import OperandFormat

SMEM_BYTES = 227 * 1024
MMA_ROWS = 64  # of a warpgroup
SHARED = 2  # CTAs of a swap AB kernel that share a multiprocessor
MULTIPROCESSORS = 132  # of an H100 or H200 in a server
FEW_WIDTHS = (64, 96, 128, 192)
LARGE_GRADIENT = 512 * 128 * 128  # elements of one group's gradient
LONG = 4096  # contraction from which the epilogue is a small part of a tile's time
TURNS = GemmConfig(128, 128, pingpong=True)
WIDE_TURNS = GemmConfig(128, 192, pingpong=True)
HIGH_TURNS = GemmConfig(192, 128, pingpong=True)
WIDE = GemmConfig(128, 256)
HIGH = GemmConfig(256, 128)
PAIR = GemmConfig(128, 256, cluster_m=2)  # shares B

COSTS = {
    VARLEN_M: {WIDE_TURNS: 1.0, WIDE: 1.06, TURNS: 1.18},
    VARLEN_K: {PAIR: 0.99, WIDE: 1.0, HIGH: 1.01, WIDE_TURNS: 1.05, HIGH_TURNS: 1.06, TURNS: 1.25},
}
"""Relative cost per area of tiles, by problem kind, as a multiple of the least; the first one wins a tie.

Measured on an H100 at its power limit: the products of a layer's forward and backward, back to back under sustained
load, with the weights of Mixtral, Qwen3-30B, DeepSeek-V3, gpt-oss and of 128 experts 256 wide. With idle gaps before
every product the GPU runs at a higher clock, at which ping-pong tiles of 128 x 128 come within a few per cent of the
others; under sustained load they take 1.1 to 1.5 times as long, as they move the most bytes per MMA.
"""
SHORT_COSTS = {WIDE_TURNS: 1.0, HIGH_TURNS: 1.01, WIDE: 1.05, HIGH: 1.06, TURNS: 1.2}
"""``COSTS`` of gradients over at most ``SHORT`` rows, where an epilogue that nothing hides is a larger part.

``WIDE`` takes 1.05 over 512 rows of Qwen3's groups on an H100.
"""
SHORT = 512
SYMMETRIC_COSTS = {tiling: COSTS[VARLEN_K][tiling] for tiling in (PAIR, TURNS)}
"""``COSTS`` of symmetric products, whose tiles make squares; both kinds of tiles cost what they do in a gradient."""
GATHERING_COSTS = {"a": {WIDE: 1.0, WIDE_TURNS: 0.94}, "b": {HIGH: 1.0, HIGH_TURNS: 0.94}}
"""``COSTS`` of gradients that gather an operand, over fewer than ``LONG_GATHER`` rows.

Tiles are short along the gathered operand, so that an MMA needs the fewest pieces of it. Measured like ``COSTS``:
relative to the area 0.91 to 0.95 over 256, 1024 and 1536 rows, over 2048 rows 1.01 to 1.3.
"""
LONG_GATHER = 2048
LONG_GATHERING = {"a": WIDE, "b": HIGH}  # over at least ``LONG_GATHER`` rows


def reason(kind: str, tiling: GemmConfig, bits: int) -> str | None:
    """Return None if there is a kernel of ``tiling`` on elements of ``bits``, else the reason why not."""
    rows, columns = tiling.tile_m, tiling.tile_n
    if tiling.stages:
        return "stages must be 0: the ring has as many as fit in shared memory"
    if tiling.tma:
        return "operands are always loaded by TMA here; tma must be False"
    if tiling.unit_scales:
        return "unit scales exist for mma.sync kernels only"
    if tiling.two_cta:
        return "MMAs of two CTAs exist on sm_100 only"
    if bits == 8 and (tiling.pingpong or columns > (128 if rows == 256 else 192)):
        return "partial sums of 8-bit products need registers beside the accumulator, and such a tile has none left"
    if tiling.pingpong and (rows not in (64, 128, 192) or rows * columns > 128 * 192):
        return f"a ping-pong consumer takes 64, 128 or 192 rows and 128 x 192 elements at most, not {rows} x {columns}"
    if (tiling.cluster_m, tiling.cluster_n) not in ((1, 1), (1, 2), (2, 1)):
        return f"clusters are 1 x 1, 1 x 2 or 2 x 1 on sm_90, not {tiling.cluster_m} x {tiling.cluster_n}"
    if tiling.cluster_m > 1 and (kind == VARLEN_M or bits == 8):
        return "a group may end at any row, which leaves its last tile without another one in the cluster"
    if rows not in (64, 128, 256) and not tiling.pingpong:
        return f"tile_m must be 64, 128 or 256 where warpgroups share a tile, not {rows}"
    if tiling.few:
        if rows != 64 or columns not in FEW_WIDTHS or tiling.pingpong or tiling.ctas > 1 or bits != 16:
            return f"decode kernels have one warpgroup, tiles of 64 x {FEW_WIDTHS} and elements of 16 bits"
        return None
    if columns not in (64, 128, 192, 256):
        return f"tile_n must be 64, 128, 192 or 256, not {columns}"
    if rows * columns > 128 * 256:
        return f"{rows} x {columns} accumulators do not fit the registers of two warpgroups"
    return None


def scaled_reason(kind: str, form: OperandFormat, tiling: GemmConfig) -> str | None:
    """Return what else rules a tiling out for operands of ``form``, or None."""
    if form.block and kind == VARLEN_K and tiling.tile_n > form.block:
        return f"the scales of {tiling.tile_n} columns do not fit in registers beside the partial sums"
    return None


def gathering_reason(tiling: GemmConfig) -> str | None:
    """Return what else rules a tiling out for kernels that gather rows of an operand, or None."""
    return "each CTA gathers rows for itself, so there are no clusters" if tiling.ctas > 1 else None


def sum_columns(tiling: GemmConfig) -> int:
    """Return how many columns a dactivation epilogue adds up to one partial sum of a row: those of a tile."""
    return tiling.tile_n


def choose(kind: str, columns: int, depth: int, rows: int, widths: tuple[int, ...] = WIDTHS) -> GemmConfig:
    """Return the tiling that covers the result at the least cost; see ``COSTS``.

    Ping-pong 128 x 128 where a group has at most 128 rows, or a gradient is summed over at most as many; if that
    gradient is large, two CTAs that share A are 2 % faster still. Groups of at most 64 rows get one warpgroup, so that
    no MMA multiplies rows that no group has.
    """
    columns = max(columns, widths[0])
    if rows <= 64:
        return GemmConfig(tile_m=64, tile_n=64 if columns <= 64 else 256 if columns > 128 else 128)
    if columns <= 64:
        return GemmConfig(tile_m=256 if rows >= 256 else 128, tile_n=64)
    if (rows if kind == VARLEN_M else depth) <= 128:
        pair = kind == VARLEN_K and columns > 128 and rows * columns >= LARGE_GRADIENT
        return replace(TURNS, cluster_n=2 if pair else 1)
    costs = SHORT_COSTS if kind == VARLEN_K and depth <= SHORT else COSTS[kind]
    return _cheapest(costs, kind, columns, rows, widths)


def _cheapest(
    costs: Mapping[GemmConfig, float], kind: str, columns: int, rows: int, widths: tuple[int, ...]
) -> GemmConfig:
    """Return the tiling of the least cost among those with extents in ``widths``."""

    def cost(tiling: GemmConfig) -> float:
        high, wide = tiling.cluster_tile
        covered = costs[tiling] * _covered(columns, wide)
        return covered * _covered(rows, high) if kind == VARLEN_K else covered  # varlen_m tilings are all as high

    return min((tiling for tiling in costs if {tiling.tile_m, tiling.tile_n} <= set(widths)), key=cost)


def choose_symmetric(rows: int) -> GemmConfig:
    """Return the tiling that covers a triangle at the least cost, by ``SYMMETRIC_COSTS``."""

    def cost(tiling: GemmConfig) -> float:
        side = max(tiling.cluster_tile)
        squares = ceil_div(rows, side)
        return SYMMETRIC_COSTS[tiling] * side**2 * squares * (squares + 1) / 2

    return min(SYMMETRIC_COSTS, key=cost)


def choose_gathering(
    kind: str, columns: int, depth: int, rows: int, operand: str, halves: tuple[int, ...] | None = None
) -> GemmConfig:
    """Return the tiling of a kernel that gathers rows of ``operand``.

    Gradients: see ``GATHERING_COSTS``. With an activation, measured like ``COSTS``: ping-pong 128 x 192 is up to 8 %
    ahead of 128 x 256, and 5 to 12 % behind it where the contraction is long; where 192 columns leave much empty,
    ping-pong 128 x 128. Groups of at most 64 rows, on an H200: 64 x 128 takes 2 to 7 % less than 64 x 256.
    """
    if kind == VARLEN_K and (rows > 128 and columns > 64 if operand == "b" else rows > 64 and columns > 128):
        if depth >= LONG_GATHER:
            return LONG_GATHERING[operand]
        return _cheapest(GATHERING_COSTS[operand], kind, columns, rows, halves or WIDTHS)
    least = 0 if halves is None else halves[0]
    if kind == VARLEN_M and rows <= 64:
        return GemmConfig(64, 128 if columns > 64 or least == 128 else 64)
    if kind == VARLEN_M and columns > 128:
        if halves is None or (depth >= LONG and rows > 128):
            return WIDE
        return WIDE_TURNS if 192 in halves and rows > 128 and _empty(columns, 192) < 0.1 else TURNS
    usual = choose(kind, max(columns, least), depth, rows)
    return replace(usual, cluster_m=1, cluster_n=1)  # each CTA gathers for itself


def choose_gradient(columns: int, depth: int, rows: int) -> GemmConfig:
    """Return the tiling of a kernel with a dactivation epilogue, which takes as long as a contraction.

    Ping-pong hides it, with which 192 accumulators would leave it too few registers; 128 x 256 after a long
    contraction,
    measured like ``COSTS``: 14 and 23 % ahead over 4096 and 7168, 10 % behind over 2048. A row's sum is the sum of its
    tiles', so the width of tiles depends on the weights alone.
    """
    if depth >= LONG and columns > 128 and _empty(columns, 256) <= 0.125:
        return WIDE
    if rows <= 64 or columns <= 64:
        return GemmConfig(64 if rows <= 64 else 256 if rows >= 256 else 128, 64 if columns <= 64 else 128)
    return TURNS


def choose_few(columns: int, groups: int, step: int) -> GemmConfig:
    """Return the narrowest tile with at most one per multiprocessor; 128 columns if every width has more.

    Args:
        groups: how many groups have rows, at most.
        step: the width of a tile must be a multiple of it.
    """
    for width in FEW_WIDTHS:
        if width % step == 0 and groups * ceil_div(columns, width) <= MULTIPROCESSORS:
            return GemmConfig(64, width, few=True)
    return GemmConfig(64, 128, few=True)


def choose_decoding(rows: int, piece: int) -> GemmConfig:
    """Return the tiling of a kernel that decodes B into shared memory.

    Every tile decodes its columns, so high tiles pay off. On an H200, MXFP4 in the sizes of gpt-oss: 256 x 128 takes
    12 % less than 128 x 128 where groups have 128 rows, and 27 % less where they have 512; 64 x 256 takes 24 % less
    than 128 x 128 where they have 32, and 17 % less than 64 x 128. Next to two warpgroups of consumers there are
    registers for MMAs of 128 columns; next to one, for 256, unless the pieces that lanes copy ahead need them.

    Args:
        piece: elements that a lane decodes at a time.
    """
    if rows > 32:
        return GemmConfig(256 if rows > 64 else 128, 128)
    return GemmConfig(64, 256 if piece > 16 else 128)


class SwapAbTiling(NamedTuple):
    """Split of a tile's columns and contraction among the CTAs of a swap AB kernel."""

    groups: int  # warpgroups of consumers
    registers: int  # per lane of a consumer
    width: int  # bytes of codes per column in a stage
    part: int  # elements of a column that a lane decodes at a time


CUTS = {128: SwapAbTiling(2, 96, 64, 32), 192: SwapAbTiling(3, 72, 128, 64), 256: SwapAbTiling(2, 96, 64, 32)}
"""By columns of a tile. Per block of 64 columns a lane decodes 64 elements of one at a time, or 32 of one or two."""
PARTS: OnePerName[int] = OnePerName(
    FORMATS,
    "PARTS in tgl/cutlass_kernels/gemm/sm90/tilings.py",
    {"mxfp8": 32, "nvfp4": 32, "mxfp4": 64, "fp8_tensor": 32, "fp8_block": 32},
)
"""By format: ``part`` of tiles of 128 columns. On an H200 with 32 rows per group of MXFP4, 64 take 5 % less than 32."""
FEW_CUTS = {64: SwapAbTiling(1, 152, 128, 64), 128: SwapAbTiling(2, 96, 128, 64), 192: CUTS[192]}
"""``CUTS`` where a tile has a multiprocessor for itself, with as many stages as fit."""


def cut_of(tiling: GemmConfig, packed: PackedSpec) -> SwapAbTiling:
    """Return how the tiles of a swap AB kernel are split."""
    if tiling.few:
        return FEW_CUTS[tiling.tile_n]
    cut = CUTS[tiling.tile_n]
    return cut._replace(part=PARTS[packed.format]) if tiling.tile_n == 128 else cut


def shared_by(tiling: GemmConfig) -> int:
    """Return how many CTAs of a swap AB kernel share a multiprocessor."""
    return 1 if tiling.few else SHARED


COLUMNS: OnePerName[int] = OnePerName(
    FORMATS,
    "COLUMNS in tgl/cutlass_kernels/gemm/sm90/tilings.py",
    {"mxfp8": 256, "nvfp4": 256, "mxfp4": 192, "fp8_tensor": 256, "fp8_block": 256},
)
"""By format: columns of a swap AB tile of 8 or 16 rows.

On an H100, gpt-oss' matrices of 5760 x 2880: MXFP4 in three warpgroups of 64 columns takes 4 to 8 % less than in two of
128, with 0.5, 2 and 8 rows per group, as more warps decode while others wait. NVFP4 takes 2 % less with 0.5 rows and 4
to 5 % more with 2 and 8. If the number of columns is a multiple of 128 but not of 192, the last tile has 64 or 128
empty ones, which lanes decode but nothing loads.
"""


def swapped(tile_m: int, tile_n: int, packed: PackedSpec) -> GemmConfig:
    """Return the tiling of a swap AB kernel: the rows of its MMAs are ``tile_n`` columns, their columns ``tile_m``
    rows.

    Raises:
        ValueError: if the format is not decoded in tiles of so many columns.
    """
    if tile_n not in (128, 256, COLUMNS[packed.format]):
        raise ValueError(f"no decode tile has {tile_n} columns of {packed.format}")
    return GemmConfig(tile_m, tile_n, CUTS[tile_n].width * packed.per_byte)


FEWEST: OnePerName[int] = OnePerName(
    FORMATS,
    "FEWEST in tgl/cutlass_kernels/gemm/sm90/tilings.py",
    {"mxfp8": 64, "nvfp4": 16, "mxfp4": 8, "fp8_tensor": 64, "fp8_block": 64},
)
"""By format: the fewest rows of a swap AB tile.

On an H100, gpt-oss' matrices of 5760 x 2880: with FP8, 64 rows and 128 columns take 1 to 7 % less than fewer rows and
256 columns, with 0.5, 2 and 8 rows per group; decoding takes less time than the loads, and narrower tiles leave fewer
columns empty and share the multiprocessors more evenly. With FP4 they take 19 to 31 % more, as a lane decodes half as
much per wait. NVFP4 takes 14 % less with 16 than with 8.
"""


def choose_swapped(rows: int, packed: PackedSpec, groups: int, columns: int) -> GemmConfig:
    """Return the tiling of a swap AB kernel for groups of ``rows`` rows on average.

    The smallest height that is at least twice ``rows`` and ``FEWEST``: then most groups are one tile, which reads their
    matrix once; 64 rows leave registers for half the columns. Measured on an H100 with MXFP4: with 8 rows per group, 16
    take 12 % less than 32; with 2, 8 take 2 % less than 16, and with 32, 64 take 19 % less than 32.

    Args:
        rows: of a group on average.
        packed: how the matrices are packed.
        groups: how many groups have rows, at most.
        columns: of the product.
    """
    few = choose_few_swapped(groups, columns) if rows == 0 and ALONE[packed.format] else None
    if few is not None:
        return few
    least = max(2 * rows, FEWEST[packed.format])
    tile_m = next((m for m in (8, 16, 32) if m >= least), 64)
    return swapped(tile_m, COLUMNS[packed.format] if tile_m <= 16 else 256 if tile_m == 32 else 128, packed)


ALONE: OnePerName[bool] = OnePerName(
    FORMATS,
    "ALONE in tgl/cutlass_kernels/gemm/sm90/tilings.py",
    {"mxfp8": False, "nvfp4": False, "mxfp4": True, "fp8_tensor": False, "fp8_block": False},
)
"""By format: whether few tiles have multiprocessors for themselves, which was timed with MXFP4 alone."""


def choose_few_swapped(groups: int, columns: int) -> GemmConfig | None:
    """Return the tiling of a swap AB kernel for MXFP4 if CTAs should not share multiprocessors, else None.

    That is the narrowest tile with at most one per multiprocessor, or the widest if there are two to four. Launched as
    pairs, the CTAs of few tiles crowd together on half the multiprocessors. Measured on an H200 with matrices of 5760 x
    2880 and 2880 x 2880: 20 to 30 % less with up to one tile per multiprocessor, 14 % less with three, 3 % more with
    two, where pairs have one tile each.
    """
    for width in FEW_CUTS:
        if groups * ceil_div(columns, width) <= MULTIPROCESSORS:
            return few_swapped(width)
    tiles = groups * ceil_div(columns, 192)
    return few_swapped(192) if SHARED < tiles / MULTIPROCESSORS <= 2 * SHARED else None


def few_swapped(width: int) -> GemmConfig:
    """Return the tiling of a swap AB kernel for MXFP4 with tiles that have a multiprocessor for themselves."""
    return GemmConfig(8, width, FEW_CUTS[width].width * 2, few=True)


def scale_words(packed: PackedSpec, depth: int) -> int:
    """Return the words that hold the scales of ``depth`` elements of a column, at any alignment.

    0 where columns have no scales of their own.
    """
    block, size = packed.decoding.block, packed.scale_bytes
    if not block:
        return 0
    scales = max(depth // block, 1)
    return scales if size == WORD else -(-(scales * size + WORD - 1) // WORD)


def scale_pitch(packed: PackedSpec, depth: int) -> int:
    """Return the pitch of a column's words: a power of two, for aligned loads that spread over the banks."""
    words = scale_words(packed, depth)
    return 1 << (words - 1).bit_length() if words else 0


def swapped_stages(tiling: GemmConfig, packed: PackedSpec) -> int:
    """Return the stages of a swap AB kernel: 16-bit rows, codes and words of scales, with 2 KB left for the rest."""
    depth = tiling.tile_k
    stage = tiling.tile_m * depth * 2 + tiling.tile_n * (depth // packed.per_byte + scale_pitch(packed, depth) * WORD)
    return (SMEM_BYTES // shared_by(tiling) - 2048) // stage


def _covered(extent: int, tile: int) -> int:
    """Return the extent that tiles of ``tile`` cover."""
    return -(-extent // tile) * tile


def _empty(extent: int, tile: int) -> float:
    """Return the part of the tiles outside an extent, relative to the extent."""
    return _covered(extent, tile) / extent - 1


def choose_scaled(kind: str, form: OperandFormat, columns: int, depth: int, rows: int) -> GemmConfig:
    """Return high or wide tiles, which move the fewest bytes through L2 and shared memory per MMA.

    Measured on an H200. In weight gradients 256 x 128 by two CTAs that share A is 4 % ahead of 128 x 192 with one
    factor per group, and 1 % ahead of 128 x 128 with block scales. Where groups are rows, 128 x 192 is 2 to 4 % ahead
    of
    256 x 128 with block scales, since a warpgroup's MMAs of 192 columns are longer than the additions they overlap
    with,
    and equal with one factor per group; two CTAs that share A gain nothing. Where 192 columns would leave more than 4 %
    empty, 256 x 128 is 3 to 6 % ahead of 128 x 128 with block scales and long groups.
    """
    pair = kind == VARLEN_K and columns > 128
    fits = columns > 128 and ceil_div(columns, 192) * 192 <= 1.04 * ceil_div(columns, 128) * 128
    wide = fits and (not form.block or (kind == VARLEN_M and rows > 64))
    high = pair or (form.block > 0 and kind == VARLEN_M and columns > 64 and not wide)
    if rows >= 1024 and high:
        return GemmConfig(256, 128, form.tile_k, cluster_n=2 if pair else 1)
    return GemmConfig(
        tile_m=64 if rows <= 64 else 128,
        tile_n=192 if wide else 128 if columns > 64 else 64,
        tile_k=form.tile_k,
        cluster_n=2 if pair else 1,
    )
