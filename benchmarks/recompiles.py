"""Compilations of a Mixture-of-Experts layer by ``torch.compile`` over many routings and token counts.

The layer (choice of experts, dispatch, expert MLP, combine) is compiled with ``dynamic=True`` and ``fullgraph=True``,
then called forward and backward with 100 random routings of each of 10 token counts >= 2. One compilation must do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from harness.command import parser
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tgl

HIDDEN, FFN, EXPERTS, TOP_K = 16, 32, 8, 2
TOKENS = (2, 3, 5, 8, 31, 64, 100, 127, 128, 129)


def random_logits(tokens: int, index: int, generator: torch.Generator) -> Tensor:
    """Return router logits ``[S, G]``; the skew grows with ``index``, so that late routings leave experts empty."""
    noise = torch.randn(tokens, EXPERTS, generator=generator)
    return noise + torch.randn(EXPERTS, generator=generator) * index / 10


def count(routings: int, backend: str) -> int:
    """Compilations over ``routings`` routings of every token count."""
    experts = tgl.GroupedMLP(EXPERTS, HIDDEN, FFN, bias=True)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        weights, chosen = logits.softmax(1).topk(TOP_K)
        routing = tgl.route(chosen, EXPERTS)
        y = experts.forward_offsets(tgl.dispatch(x, routing), routing.offs)
        return tgl.combine(y, routing, weights)

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for tokens in TOKENS:
        for index in range(routings):
            x = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
            logits = random_logits(tokens, index, generator).requires_grad_()
            compiled(x, logits).sum().backward()
    return counter.frame_count


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--routings", type=int, default=100, help="routings of each token count")
    made.add_argument("--backend", default="inductor", help="backend of torch.compile")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    compilations = count(options.routings, options.backend)
    print(f"compilations over {options.routings} routings x {len(TOKENS)} token counts: {compilations}")


if __name__ == "__main__":
    main()
