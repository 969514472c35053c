"""The specification of a router kernel, which the host needs too."""

from __future__ import annotations

from typing import NamedTuple

LANES = 32
THREADS = 128
CHUNK = 8  # adjacent experts of one lane
MOST_EXPERTS = 1024
MOST_CHOICES = 32
MOST_GROUPS = 32


class RouterSpec(NamedTuple):
    """Sizes, options and accesses of a router.

    Attributes:
        experts, top_k: E and k.
        score: name of the score function.
        renormalize, scale: options of the weights.
        num_groups, topk_groups, group_score: groups that are ranked first; 1 and 1 if all are kept.
        bias: whether there is one.
        sums: whether sums for losses are formed (in the backward: have gradients).
        vector: adjacent logits of one access, up to ``CHUNK``.
        masked: whether some tokens do not count in the sums.
        replayed: whether the experts are given instead of chosen.
    """

    experts: int
    top_k: int
    score: str
    renormalize: bool
    scale: float
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    bias: bool = False
    sums: bool = False
    vector: int = 1
    masked: bool = False
    replayed: bool = False

    @property
    def width(self) -> int:
        """Lanes of a token: a power of two, a whole warp where there are groups."""
        if self.grouped:
            return LANES
        chunks = -(-self.experts // CHUNK)
        return min(1 << (chunks - 1).bit_length(), LANES)

    @property
    def chunks(self) -> int:
        """Chunks of a lane."""
        return -(-self.experts // (CHUNK * self.width))

    @property
    def items(self) -> int:
        """Experts of a lane, including those past the last one."""
        return CHUNK * self.chunks

    @property
    def slots(self) -> int:
        """Top-k slots that a lane keeps."""
        return -(-self.top_k // self.width)

    @property
    def grouped(self) -> bool:
        """Whether some groups are left out."""
        return self.topk_groups < self.num_groups

    @property
    def tokens(self) -> int:
        """Tokens that a block processes at a time."""
        return THREADS // self.width
