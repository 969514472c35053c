"""How a GEMM kernel is cut up, and which cut suits a problem; plain Python, nothing compiled and nothing imported."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

ARCHS = ("sm_90", "sm_100")
SMEM_BYTES = {"sm_90": 227 * 1024, "sm_100": 227 * 1024}
TMEM_COLUMNS = 512
LARGE_GRADIENT = 512 * 128 * 128  # elements of one group's

VARLEN_M = "varlen_m"  # [T, K] x [G, K, N] -> [T, N]
VARLEN_K = "varlen_k"  # [T, M]^T x [T, N] -> [G, M, N]


@dataclass(frozen=True)
class GemmConfig:
    """A tiling.

    Attributes:
        tile_m, tile_n: rows and columns of the tile one MMA covers; with ``two_cta`` a pair of CTAs shares it, half
            the rows each.
        tile_k: depth of one pipeline stage, in elements; 128 bytes, one swizzle span.
        two_cta: sm_100: two CTAs of a cluster issue one MMA and load half of B each.
        pingpong: sm_90: two consumer warpgroups work on alternate tiles instead of sharing one.
        cluster_m, cluster_n: CTAs per cluster beyond the pair, sharing tiles by multicast.
        band: tile rows per band of the tile order; see ``schedule.raster``.
        longest_first: varlen_k: groups are visited longest first, not as they come; see ``schedule.order``.
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    two_cta: bool = False
    pingpong: bool = False
    cluster_m: int = 1
    cluster_n: int = 1
    band: int = 8
    longest_first: bool = True

    def supports(self, arch: str, kind: str, bits: int = 16) -> str | None:
        """None if a kernel of this tiling exists for ``arch`` and ``kind`` on elements of ``bits``, else why not."""
        if arch not in ARCHS:
            return f"there are kernels for {', '.join(ARCHS)}, not for {arch}"
        if kind not in (VARLEN_M, VARLEN_K):
            return f"`kind` must be {VARLEN_M} or {VARLEN_K}, not {kind}"
        if self.tile_k * bits != 1024:
            return f"tile_k must be {1024 // bits}, 128 bytes, not {self.tile_k}"
        if self.band < 1:
            return f"band must be at least 1, not {self.band}"
        return self._sm100() if arch == "sm_100" else self._sm90(bits)

    def _sm100(self) -> str | None:
        if self.pingpong:
            return "ping-pong consumers exist on sm_90 only"
        if (self.cluster_m, self.cluster_n) != (1, 1):
            return "there is no multicast beyond the CTA pair on sm_100"
        rows = 256 if self.two_cta else 128
        if self.tile_m != rows:
            return f"tile_m must be {rows} with two_cta={self.two_cta}, not {self.tile_m}"
        if self.tile_n not in (64, 128, 256):
            return f"tile_n must be 64, 128 or 256, not {self.tile_n}"
        return None

    def _sm90(self, bits: int) -> str | None:
        if self.two_cta:
            return "MMAs of two CTAs exist on sm_100 only"
        if bits == 8 and (self.pingpong or self.tile_n > (128 if self.tile_m == 256 else 192)):
            return "sums of 8-bit products need registers of their own beside the accumulator: no such tile has room"
        if self.pingpong and (self.tile_m not in (64, 128) or self.tile_m * self.tile_n > 64 * 256):
            return f"a warpgroup alone takes 64 or 128 rows and 64 x 256 in all, not {self.tile_m} x {self.tile_n}"
        if self.cluster_m != 1 or self.cluster_n not in (1, 2):
            return f"clusters are 1 x 1 or 1 x 2 on sm_90, not {self.cluster_m} x {self.cluster_n}"
        if self.tile_m not in (64, 128, 256):
            return f"tile_m must be 64, 128 or 256, not {self.tile_m}"
        if self.tile_n not in (64, 128, 192, 256):
            return f"tile_n must be 64, 128, 192 or 256, not {self.tile_n}"
        if self.tile_m * self.tile_n > 128 * 256:
            return f"{self.tile_m} x {self.tile_n} accumulators do not fit the registers of two warpgroups"
        return None

    @property
    def holds_halves(self) -> bool:
        """Whether half of the columns are whole rows of 128 bytes, so that a tile can take gate and linear half."""
        return self.tile_n % 128 == 0

    @property
    def cta_m(self) -> int:
        """Rows of one CTA's part of the tile."""
        return self.tile_m // 2 if self.two_cta else self.tile_m

    @property
    def ctas(self) -> int:
        """CTAs in a cluster."""
        return self.cluster_m * self.cluster_n * (2 if self.two_cta else 1)


tuned: dict[tuple[str, str, int, int, int], GemmConfig] = {}
"""Tilings found by ``autotune``, by the arguments of ``choose``."""


def candidates(arch: str, kind: str) -> list[GemmConfig]:
    """Every tiling that a kernel exists for, with the usual order of tiles."""
    every = [
        GemmConfig(tile_m, tile_n, two_cta=two_cta, pingpong=pingpong, cluster_n=cluster_n)
        for tile_m, tile_n in itertools.product((64, 128, 256), (64, 128, 192, 256))
        for two_cta, pingpong, cluster_n in itertools.product((False, True), (False, True), (1, 2))
    ]
    return [tiling for tiling in every if tiling.supports(arch, kind) is None]


def choose(arch: str, kind: str, columns: int, depth: int, rows: int, halves: bool = False) -> GemmConfig:
    """The tiling for a problem of ``columns`` (N), ``depth`` (contraction) and ``rows`` per group, on average.

    Coarse on purpose: a problem that grows or shrinks a little keeps its kernel. Measured on sm_90. On sm_100, which no
    measurement backs yet: wide tiles, as they cost the least bandwidth per MMA, but not where half of one would stay
    empty, and a pair of CTAs for 256 rows once a group fills them on average. What ``autotune`` has found goes first.

    Args:
        halves: whether the epilogue takes the columns as gate and linear half, which not every tiling allows.
    """
    found = tuned.get((arch, kind, columns, depth, rows))
    if found is not None and (found.holds_halves or not halves):
        return found
    if halves:
        columns = max(columns, 128)
    if arch == "sm_90":
        return _choose_sm90(kind, columns, depth, rows)
    tile_n = 256 if columns > 128 else 128 if columns > 64 else 64
    if rows >= 256:
        return GemmConfig(tile_m=256, tile_n=tile_n, two_cta=True)
    return GemmConfig(tile_m=128, tile_n=tile_n)


def _choose_sm90(kind: str, columns: int, depth: int, rows: int) -> GemmConfig:
    """128 x 128 tiles of two warpgroups in turns, where rows and columns fill them.

    Measured on an H200 over 32 tilings: ahead of 128 x 256 by two cooperating warpgroups in 12 of 16 cases, by 5.5 %
    in the geometric mean and never more than 2.4 % behind: one warpgroup's epilogue hides behind the other's MMAs
    (``benchmarks/NOTES.md``). Where weight gradients are large, two CTAs that share A are 2 % faster still, and 1 %
    slower where they are small. Groups of at most 64 rows get one warpgroup, so that no MMA multiplies rows that no
    group has.
    """
    if rows <= 64:
        return GemmConfig(tile_m=64, tile_n=64 if columns <= 64 else 256 if columns > 128 else 128)
    if columns > 64:
        pair = kind == VARLEN_K and columns > 128 and rows * columns >= LARGE_GRADIENT
        return GemmConfig(tile_m=128, tile_n=128, pingpong=True, cluster_n=2 if pair else 1)
    return GemmConfig(tile_m=256 if rows >= 256 else 128, tile_n=64)
