"""The GEMM tilings of an architecture, and the choice for a problem; plain Python that imports no compiler."""

from __future__ import annotations

import itertools
from dataclasses import replace

from ..meta.placement import ceil_div
from .archs import arch_of
from .config import KINDS, WIDTHS, GemmConfig
from .gemm.operand_formats import OperandFormat

MOST_STAGES = 5  # the largest number of stages that a tiling names
FEW_ROWS = 64  # per group: up to here B is most of the traffic
MULTIPROCESSORS = 120  # a little less than the 132 of an H200

tuned: dict[tuple, GemmConfig] = {}
"""Tilings found by ``autotune``, by the arguments of ``choose`` or ``choose_gathering``."""


def reason(arch: str, kind: str, tiling: GemmConfig, form: OperandFormat | None = None) -> str | None:
    """Return None if a kernel of ``tiling`` exists for 16-bit operands or ``form``, else the reason why not."""
    tilings = arch_of(arch).tilings
    if kind not in KINDS:
        return f"`kind` must be {' or '.join(KINDS)}, not {kind}"
    bits = 16 if form is None else 1024 // form.tile_k
    if tiling.tile_k * bits != 1024:
        return f"tile_k must be {1024 // bits}, 128 bytes, not {tiling.tile_k}"
    if tiling.band < 1:
        return f"band must be at least 1, not {tiling.band}"
    found = tilings.reason(kind, tiling, bits)
    return found if found is not None or form is None else tilings.scaled_reason(kind, form, tiling)


def gathering_reason(arch: str, kind: str, tiling: GemmConfig) -> str | None:
    """Return ``reason`` for a kernel that gathers rows of an operand."""
    found = reason(arch, kind, tiling)
    return arch_of(arch).tilings.gathering_reason(tiling) if found is None else found


def candidates(arch: str, kind: str, gathering: bool = False) -> list[GemmConfig]:
    """Return every tiling that has a kernel, with the default band; ``gathering``: a kernel that gathers rows."""
    every = [
        GemmConfig(*tile, two_cta=pair, pingpong=turns, cluster_m=m, cluster_n=n, stages=stages, tma=tma)
        for tile in itertools.product((64, 128, 192, 256), (64, 128, 192, 256))
        for pair, turns, m, n in itertools.product((False, True), (False, True), (1, 2), (1, 2))
        for stages, tma in itertools.product(range(MOST_STAGES + 1), (False, True))
    ]
    why_not = gathering_reason if gathering else reason
    return [tiling for tiling in every if why_not(arch, kind, tiling) is None]


def choose(
    arch: str,
    kind: str,
    columns: int,
    depth: int,
    rows: int,
    widths: tuple[int, ...] = WIDTHS,
    busy: int | None = None,
) -> GemmConfig:
    """Return the tiling for a problem of ``columns`` (N), ``depth`` (contraction) and ``rows`` per group, on average.

    Coarse on purpose: a problem that grows or shrinks a little keeps its kernel. A result of ``autotune`` takes
    precedence.

    Args:
        widths: allowed numbers of columns of a tile, ascending: see ``launchers.gemm_activation.widths_of``.
        busy: upper bound on the number of groups that have rows; None: enough of them.
    """
    found = tuned.get((arch, kind, columns, depth, rows))
    if found is not None and found.tile_n in widths:
        return found
    chosen = arch_of(arch).tilings.choose(kind, columns, depth, rows, widths)
    return _filling(arch, kind, chosen, columns, rows, widths, busy)


def _filling(
    arch: str, kind: str, tiling: GemmConfig, columns: int, rows: int, widths: tuple[int, ...], busy: int | None
) -> GemmConfig:
    """Return ``tiling``, narrowed where groups of few rows have too few tiles to keep all multiprocessors loading.

    Measured on an H200: two groups of 4096 columns over 14336 take 124 us in tiles of 256 columns, 101 in 128, 78 in
    64. Where there are enough tiles, wider is better, by up to 6 %: a tile reads its rows of A once.
    """
    while rows <= FEW_ROWS and busy is not None and busy * ceil_div(columns, tiling.tile_n) < MULTIPROCESSORS:
        narrower = replace(tiling, tile_n=tiling.tile_n // 2)
        if narrower.tile_n not in widths or reason(arch, kind, narrower) is not None:
            break
        tiling = narrower
    return tiling


def choose_gathering(
    arch: str, kind: str, columns: int, depth: int, rows: int, operand: str, halves: tuple[int, ...] | None = None
) -> GemmConfig:
    """Return ``choose`` for kernels that gather rows of ``operand``.

    Args:
        halves: the ``widths`` of ``choose`` for an activation; None: any.
    """
    found = tuned.get((arch, kind, columns, depth, rows, operand))
    if found is not None and found.tile_n in (halves or WIDTHS):
        return found
    return arch_of(arch).tilings.choose_gathering(kind, columns, depth, rows, operand, halves)


def choose_gradient(arch: str, columns: int, depth: int, rows: int) -> GemmConfig:
    """Return ``choose`` for kernels with a dactivation epilogue, gathered or not."""
    return arch_of(arch).tilings.choose_gradient(columns, depth, rows)


def choose_symmetric(arch: str, rows: int) -> GemmConfig:
    """Return the tiling of a symmetric product of ``rows`` rows and columns."""
    return arch_of(arch).tilings.choose_symmetric(rows)


def choose_scaled(arch: str, kind: str, form: OperandFormat, columns: int, depth: int, rows: int) -> GemmConfig:
    """Return ``choose`` for quantised operands."""
    return arch_of(arch).tilings.choose_scaled(kind, form, columns, depth, rows)
