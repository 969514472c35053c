"""Which tilings of a GEMM there are on an architecture, and which suits a problem; plain Python, nothing compiled."""

from __future__ import annotations

import itertools
from dataclasses import replace

from ..meta.placement import ceil_div
from .archs import arch_of
from .config import KINDS, WIDTHS, GemmConfig
from .gemm.operand_formats import OperandFormat

MOST_STAGES = 5  # that a tiling names
FEW_ROWS = 64  # of a group: B is most of what is read
MULTIPROCESSORS = 120  # about; of an H200 132

tuned: dict[tuple, GemmConfig] = {}
"""Tilings found by ``autotune``, by the arguments of ``choose`` or ``choose_gathering``."""


def reason(arch: str, kind: str, tiling: GemmConfig, form: OperandFormat | None = None) -> str | None:
    """None if a kernel of ``tiling`` exists for ``arch`` and ``kind`` on 16-bit operands or ``form``, else why not."""
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
    """``reason`` for a kernel that gathers rows of an operand."""
    found = reason(arch, kind, tiling)
    return arch_of(arch).tilings.gathering_reason(tiling) if found is None else found


def candidates(arch: str, kind: str, gathering: bool = False) -> list[GemmConfig]:
    """Every tiling that a kernel exists for, with the usual order of tiles; ``gathering``: one that gathers rows."""
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
    """The tiling for a problem of ``columns`` (N), ``depth`` (contraction) and ``rows`` per group, on average.

    Coarse on purpose: a problem that grows or shrinks a little keeps its kernel. What ``autotune`` has found goes
    first.

    Args:
        widths: how many columns a tile may have, the smallest first: see ``launchers.gemm_activation.widths_of``.
        busy: how many groups have rows, at most; None: enough of them.
    """
    found = tuned.get((arch, kind, columns, depth, rows))
    if found is not None and found.tile_n in widths:
        return found
    chosen = arch_of(arch).tilings.choose(kind, columns, depth, rows, widths)
    return _filling(arch, kind, chosen, columns, rows, widths, busy)


def _filling(
    arch: str, kind: str, tiling: GemmConfig, columns: int, rows: int, widths: tuple[int, ...], busy: int | None
) -> GemmConfig:
    """Narrower tiles where groups of few rows have too few of them for all multiprocessors to load.

    Measured on an H200: two groups of 4096 columns over 14336 take 124 us in tiles of 256 columns, 101 in 128, 78 in
    64. Where there are enough, the wider the better, by up to 6 %: a tile reads its rows of A once.
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
    """``choose`` for kernels that gather rows of ``operand``.

    Args:
        halves: the ``widths`` of ``choose``, of which an activation's halves make some; None: any.
    """
    found = tuned.get((arch, kind, columns, depth, rows, operand))
    if found is not None and found.tile_n in (halves or WIDTHS):
        return found
    return arch_of(arch).tilings.choose_gathering(kind, columns, depth, rows, operand, halves)


def choose_gradient(arch: str, columns: int, depth: int, rows: int) -> GemmConfig:
    """``choose`` for kernels that go back through the activation, whose rows are in order or found by an index."""
    return arch_of(arch).tilings.choose_gradient(columns, depth, rows)


def choose_symmetric(arch: str, rows: int) -> GemmConfig:
    """The tiling of a symmetric product of ``rows`` rows and columns."""
    return arch_of(arch).tilings.choose_symmetric(rows)


def choose_scaled(arch: str, kind: str, form: OperandFormat, columns: int, depth: int, rows: int) -> GemmConfig:
    """``choose`` for quantised operands."""
    return arch_of(arch).tilings.choose_scaled(kind, form, columns, depth, rows)
