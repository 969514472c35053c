"""The kernels that are mutated: written by others and known to run right on hardware, but for the last three.

Each runs on two problems, one with more k tiles than pipeline stages, so that every stage is used again, and one with a
single k tile, so that the warps run as far ahead of each other as they can; both with several output tiles per CTA.
The last are the tests' own, for what the others lack: CTAs that synchronise by a word of global memory, and ranks that
do by words of each other's memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Subject:
    """``module``: in ``tests``; ``build``: its function that compiles ``case`` with one of the ``problems``."""

    module: str
    build: str
    arch: str
    case: dict[str, Any] = field(hash=False)
    problems: list[dict[str, Any]] = field(hash=False)

    def prepare(self) -> list[tuple[Callable, Any, Any]]:
        """(call, output, expected output) of each problem; to be called inside ``emulate``."""
        module = __import__(f"tests.{self.module}", fromlist=[self.build])
        module.MAX_CLUSTERS = 1
        build = getattr(module, self.build)
        return [build(arch=self.arch, **self.case, **problem) for problem in self.problems]


_OPS, _QUACK = "third_party.cutlass_operators", "third_party.quack_gemm"
_NVFP4 = {"a_fmt": "e2m1", "b_fmt": "e2m1", "scale": "ue4m3", "vec": 16, "out": "f32"}
_BF16 = {"ab": "bf16", "acc": "f32", "out": "f32"}
_GROUPED = {"ab": "bf16", "out": "f32", "two_cta": True}

SUBJECTS = {
    "sm90 dense": Subject(
        _OPS,
        "sm90_dense",
        "sm_90a",
        {**_BF16, "tile": (64, 64), "cluster": (2, 1)},
        [{"m": 128, "n": 136, "k": 1088}, {"m": 128, "n": 264, "k": 64}],
    ),
    "sm90 grouped": Subject(
        _QUACK,
        "varlen_m",
        "sm_90a",
        {"tile": (128, 64), "cluster": (1, 1)},
        [{"sizes": (0, 70, 1), "n": 72, "k": 648}, {"sizes": (0, 70, 1, 130), "n": 136, "k": 64}],
    ),
    "sm100 dense": Subject(
        _OPS,
        "sm100_dense",
        "sm_100a",
        {**_BF16, "two_cta": True, "tile": (256, 64), "cluster": (2, 1)},
        [{"m": 200, "n": 200, "k": 712}, {"m": 300, "n": 200, "k": 64}],
    ),
    "sm100 grouped": Subject(
        _OPS,
        "sm100_grouped",
        "sm_100a",
        {**_GROUPED, "tile": (256, 64), "cluster": (2, 1)},
        [{"sizes": (0, 70, 1), "n": 136, "k": 712}, {"sizes": (0, 70, 1, 300), "n": 136, "k": 64}],
    ),
    "sm100 block-scaled": Subject(
        _OPS,
        "sm100_block_scaled",
        "sm_100a",
        {**_NVFP4, "tile": (256, 128), "cluster": (2, 1)},
        [{"m": 256, "n": 384, "k": 2304}, {"m": 512, "n": 384, "k": 256}],
    ),
    "sm90 published": Subject("kernels_flags", "publish", "sm_90a", {}, [{}]),
    "sm90 one-shot": Subject("kernels_ranks", "one_shot", "sm_90a", {"count": 3}, [{}]),
    "sm90 two-shot": Subject("kernels_ranks", "two_shot", "sm_90a", {}, [{}]),
}
