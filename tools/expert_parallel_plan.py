"""Memory and traffic of an expert parallel layer on paper, from 8 ranks to 512, in bfloat16.

    python -m tools.expert_parallel_plan [--models deepseek-v3 ...] [--tokens 4096] [--pair-factors 2] [--host 8]

Nothing is run: sizes are those that ``tgl.distributed.ExpertParallelMLP`` fixes when it is made, with
``capacity_factor=2``. Per rank and layer:

``rows a token``     ranks that a token goes to on average if every choice of k of the E experts is as likely,
                     ``W (1 - C(E - L, k) / C(E, k))`` with ``L = E / W``
``factor``           ``pair_capacity_factor``; ``worst`` is None
``P``                rows of a pair of ranks
``arrived``          MiB of ``[W P, H]``, which the gradient of FC1 reads again
``h``                MiB of ``[expert_rows, 2 I]``, held for the backward
``sent``             MiB that a rank sends in a forward: choices, tokens with their weights, answers
``used``             share of these places that tokens take on average
``off host``         MiB of ``sent`` that leave a host of ``--host`` ranks
``to a peer``        KiB of tokens in one message, of which an exchange sends W - 1
``messages``         that a rank sends to others in a forward and a backward, with collectives
``symmetric``        MiB of the memory that all layers of a group share with ``engine="symmetric_memory"``, for ranks of
                     one NVLink domain; such a forward and backward have 10 barriers and no messages
``8-bit arrived``    ``arrived`` and ``sent`` with ``wire="quantized"`` and ``MXFP8BlockScaling``: codes and scales
``8-bit sent``       of tokens, answers in bfloat16
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tgl.distributed._exchange import Sizes
from tgl.distributed._wire_format import WireFormat
from tgl.meta.symmetric_memory import MOST_RANKS
from tgl.recipes import MXFP8BlockScaling

MIB, KIB = 1 << 20, 1 << 10
BF16 = torch.bfloat16
QUANTIZED = WireFormat.of("quantized", None, MXFP8BlockScaling())
RANKS = (8, 16, 32, 64, 128, 256, 512)
EXCHANGES = 8  # counts, choices, tokens, weights, answers; gradients of answers, of tokens and of weights
HEAD = (
    *("W", "rows a token", "factor", "P", "arrived", "h", "sent", "used", "off host", "to a peer", "messages"),
    *("symmetric", "8-bit arrived", "8-bit sent"),
)


class Model(NamedTuple):
    """Width of tokens, width of an expert's activation, experts and choices."""

    hidden: int
    inner: int
    experts: int
    top_k: int


MODELS = {
    "qwen3-30b": Model(2048, 768, 128, 8),
    "deepseek-v3": Model(7168, 2048, 256, 8),
    "qwen3-next": Model(2048, 512, 512, 10),
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    made.add_argument("--tokens", type=int, default=4096, help="max_tokens of a rank")
    made.add_argument("--pair-factors", type=float, nargs="+", default=[1.25, 2.0], help="beside the worst case")
    made.add_argument("--host", type=int, default=8, help="ranks of a host")
    return made.parse_args(argv)


def ranks_of_a_token(model: Model, ranks: int) -> float:
    """Return how many of W ranks hold an expert among k that are drawn from E without repetition."""
    without = math.comb(model.experts - model.experts // ranks, model.top_k) / math.comb(model.experts, model.top_k)
    return ranks * (1 - without)


def off_host(sent: int, ranks: int, host: int) -> int:
    """Return the bytes for ranks of other hosts, of those that a rank sends evenly to all ranks."""
    return sent * (ranks - min(host, ranks)) // ranks


def row(model: Model, ranks: int, tokens: int, factor: float | None, host: int) -> tuple[str, ...]:
    """The figures of one layer."""
    sizes = Sizes(ranks, model.experts, model.top_k, tokens, 2.0, factor, invariant=False)
    places, goes = ranks * sizes.pair_rows, ranks_of_a_token(model, ranks)
    line = model.hidden * BF16.itemsize
    sent, _ = sizes.traffic(model.hidden, BF16)
    return (
        str(ranks),
        f"{goes:.1f}",
        "worst" if factor is None else f"{factor:g}",
        str(sizes.pair_rows),
        f"{places * line / MIB:.0f}",
        f"{sizes.expert_rows * 2 * model.inner * BF16.itemsize / MIB:.0f}",
        f"{sent / MIB:.0f}",
        f"{goes * tokens / places:.2f}",
        f"{off_host(sent, ranks, host) / MIB:.0f}",
        f"{sizes.pair_rows * line / KIB:.0f}",
        str(EXCHANGES * (ranks - 1)),
        f"{sizes.memory(model.hidden, BF16) / MIB:.0f}" if ranks <= MOST_RANKS else "none",
        f"{places * QUANTIZED.bytes_to(model.hidden, BF16) / MIB:.0f}",
        f"{sizes.traffic(model.hidden, BF16, QUANTIZED)[0] / MIB:.0f}",
    )


def table(model: Model, tokens: int, factors: Sequence[float | None], host: int) -> Iterator[str]:
    """Lines of a table, of as many ranks as share the experts evenly."""
    yield f"| {' | '.join(HEAD)} |"
    yield "|---" * len(HEAD) + "|"
    for ranks in RANKS:
        if not model.experts % ranks:
            for factor in factors:
                yield f"| {' | '.join(row(model, ranks, tokens, factor, host))} |"


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    for name in options.models:
        model = MODELS[name]
        sizes = f"H {model.hidden}, I {model.inner}, {model.experts} experts, {model.top_k} choices"
        print(f"{name} ({sizes}), {options.tokens} tokens a rank\n")
        print("\n".join(table(model, options.tokens, [None, *options.pair_factors], options.host)), end="\n\n")


if __name__ == "__main__":
    main()
