"""Tile, cluster and pipeline of a GEMM kernel; plain Python that imports no compiler."""

from __future__ import annotations

from dataclasses import dataclass

VARLEN_M = "varlen_m"  # [T, K] x [G, K, N] -> [T, N]
VARLEN_K = "varlen_k"  # [T, M]^T x [T, N] -> [G, M, N]
KINDS = (VARLEN_M, VARLEN_K)
LINE = 64  # elements of 16 bits in 128 bytes, which is a row of a tile in shared memory
WIDTHS = (64, 128, 192, 256)  # columns that a tile may have


@dataclass(frozen=True)
class GemmConfig:
    """Tiling of a GEMM kernel; ``tilings`` says which exist.

    Attributes:
        tile_m, tile_n: rows and columns of the tile that one MMA covers; with ``two_cta`` a pair of CTAs shares it,
            half the rows each.
        tile_k: depth of one pipeline stage, in elements; 128 bytes, one swizzle span.
        two_cta: sm_100: two CTAs of a cluster issue one MMA and load half of B each.
        pingpong: sm_90: two consumer warpgroups work on alternate tiles instead of sharing one.
        cluster_m, cluster_n: CTAs per cluster beyond the pair, sharing tiles by multicast.
        tma: mma.sync: operands that are not gathered are loaded by TMA instead of cp.async; other kernels always do.
        unit_scales: mma.sync: FP8 without block scales runs on block-scaled MMAs with scales of one. Consumer GPUs are
            said to run those at twice the rate of MMAs without scales; this has not been timed.
        stages: mma.sync: buffers of the ring of k tiles; 0 elsewhere, where the ring takes the shared memory left over.
        band: tile rows per band of the tile order; see ``scheduler.swizzle``.
        longest_first: varlen_k: groups are visited longest first instead of in order; see ``scheduler.group_sort``.
        few: sm_90: decode (small M): one consumer warpgroup, and the launch overlaps the one before it; see
            ``gemm.sm90.decode_kernels``.
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    two_cta: bool = False
    pingpong: bool = False
    cluster_m: int = 1
    cluster_n: int = 1
    stages: int = 0
    tma: bool = False
    unit_scales: bool = False
    band: int = 8
    longest_first: bool = True
    few: bool = False

    @property
    def cta_m(self) -> int:
        """Return the rows of one CTA's part of the tile."""
        return self.tile_m // 2 if self.two_cta else self.tile_m

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Return rows and columns of the tiles of a cluster."""
        return self.tile_m * self.cluster_m, self.tile_n * self.cluster_n

    @property
    def ctas(self) -> int:
        """Return the number of CTAs in a cluster."""
        return self.cluster_m * self.cluster_n * (2 if self.two_cta else 1)

    @property
    def words(self) -> str:
        """Return rows by columns of a tile, and which CTAs share it, for ``tgl.explain``."""
        shared = self.cluster_m * self.cluster_n > 1
        parts = [
            f"{self.tile_m} x {self.tile_n}",
            "by pairs of CTAs" if self.two_cta else "",
            "ping-pong" if self.pingpong else "",
            f"in clusters of {self.cluster_m} x {self.cluster_n}" if shared else "",
        ]
        return " ".join(filter(None, parts))
