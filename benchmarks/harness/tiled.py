"""Kernels in a tiling of one's choice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.config import GemmConfig
from tgl.cutlass_kernels.runtime import launcher


def named(tiling: GemmConfig) -> str:
    """A tiling as options take it: tile_m x tile_n, pp for turns, 2x before or x2 behind for pairs along m or n."""
    above, beside = tiling.cluster_m == 2, tiling.two_cta or tiling.cluster_n == 2
    return "2x" * above + f"{tiling.tile_m}x{tiling.tile_n}" + "x2" * beside + "pp" * tiling.pingpong


def parsed(name: str, arch: str, band: int) -> GemmConfig:
    """The tiling of a name; on sm_100 a cluster of two is a pair of CTAs with one MMA."""
    above = name.startswith("2x")
    tile_m, tile_n, *two = map(int, name.removeprefix("2x").removesuffix("pp").split("x"))
    pair = bool(two) and arch != "sm_90"
    cluster_n = 2 if two and not pair else 1
    pingpong = name.endswith("pp")
    clusters = {"cluster_m": 1 + above, "cluster_n": cluster_n}
    return GemmConfig(tile_m, tile_n, **clusters, two_cta=pair, pingpong=pingpong, band=band)


@contextlib.contextmanager
def used(tiling: GemmConfig | None, chooser: str = "choose") -> Iterator[None]:
    """Make tgl use one tiling, or its own choice for None.

    Args:
        tiling: for every call inside.
        chooser: the function of ``tgl.cutlass_kernels.tilings`` that is asked.
    """
    before = getattr(tilings, chooser)
    if tiling is not None:
        setattr(tilings, chooser, lambda *_: tiling)
    launcher.forget()
    try:
        yield
    finally:
        setattr(tilings, chooser, before)
        launcher.forget()
