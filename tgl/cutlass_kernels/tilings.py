"""Which tilings of a GEMM there are on an architecture, and which suits a problem; plain Python, nothing compiled."""

from __future__ import annotations

import itertools

from .archs import arch_of
from .config import KINDS, GemmConfig
from .gemm.scaling import OperandFormat

MOST_STAGES = 5  # that a tiling names

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
    return found if found is not None or form is None else tilings.scaled_reason(form, tiling)


def gathering_reason(arch: str, kind: str, tiling: GemmConfig) -> str | None:
    """``reason`` for a kernel that gathers rows of an operand."""
    found = reason(arch, kind, tiling)
    return arch_of(arch).tilings.gathering_reason(tiling) if found is None else found


def candidates(arch: str, kind: str, gathering: bool = False) -> list[GemmConfig]:
    """Every tiling that a kernel exists for, with the usual order of tiles; ``gathering``: one that gathers rows."""
    every = [
        GemmConfig(tile_m, tile_n, two_cta=two_cta, pingpong=pingpong, cluster_n=cluster_n, stages=stages)
        for tile_m, tile_n in itertools.product((64, 128, 256), (64, 128, 192, 256))
        for two_cta, pingpong, cluster_n in itertools.product((False, True), (False, True), (1, 2))
        for stages in range(MOST_STAGES + 1)
    ]
    why_not = gathering_reason if gathering else reason
    return [tiling for tiling in every if why_not(arch, kind, tiling) is None]


def choose(arch: str, kind: str, columns: int, depth: int, rows: int, halves: bool = False) -> GemmConfig:
    """The tiling for a problem of ``columns`` (N), ``depth`` (contraction) and ``rows`` per group, on average.

    Coarse on purpose: a problem that grows or shrinks a little keeps its kernel. What ``autotune`` has found goes
    first.

    Args:
        halves: whether the epilogue takes the columns as gate and linear half, which not every tiling allows.
    """
    found = tuned.get((arch, kind, columns, depth, rows))
    if found is not None and (found.holds_halves or not halves):
        return found
    return arch_of(arch).tilings.choose(kind, max(columns, 128) if halves else columns, depth, rows)


def choose_gathering(
    arch: str, kind: str, columns: int, depth: int, rows: int, operand: str, halves: bool = False
) -> GemmConfig:
    """``choose`` for kernels that gather rows of ``operand``."""
    found = tuned.get((arch, kind, columns, depth, rows, operand))
    if found is not None and (found.holds_halves or not halves):
        return found
    columns = max(columns, 128) if halves else columns
    return arch_of(arch).tilings.choose_gathering(kind, columns, depth, rows, operand)


def choose_scaled(
    arch: str, kind: str, form: OperandFormat, columns: int, depth: int, rows: int, by_columns: bool = False
) -> GemmConfig:
    """``choose`` for quantised operands.

    Args:
        by_columns: whether the columns of B lie side by side, rather than the elements of the contraction.
    """
    return arch_of(arch).tilings.choose_scaled(kind, form, columns, depth, rows, by_columns)
