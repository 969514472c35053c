"""A block of experts in small integers: every number on the way fits 16 bits, so that all who compute it agree."""

from typing import NamedTuple

import torch
from torch import Tensor

import tgl
from tgl.meta.activations import TABLE

ROOM = 300
KINDS = tuple(a.name for a in TABLE.values() if a.exact)
BOUNDS = ("FIRST", "BACK", "FIRST_GRADIENT", "FEW_ROWS", "FEW_ROWS_OF_GRADIENT")
"""Of ``tgl.backends.composite.moe``: where all are 0, tokens are copied in order and no GEMM reads them by an index."""


class Sizes(NamedTuple):
    """Experts, tokens, top-k slots per token, columns of a token and of the activation's result."""

    experts: int
    tokens: int
    choices: int
    hidden: int
    inner: int


def block(sizes: Sizes, kind: str, biased: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Experts chosen by each token, some of them none, the operands by their names, and ``dy``.

    ``w1`` is transposed on its way in, and ``w2`` is not: so products forward and backward are of one kernel.
    """
    made = torch.Generator().manual_seed(3)
    experts, tokens, choices, hidden, inner = sizes

    def integers(terms: float, *shape: int) -> Tensor:
        """-1, 0 and 1, about ``terms`` of a column not 0."""
        signs = 2.0 * torch.randint(2, shape, generator=made) - 1
        return (signs * (torch.rand(shape, generator=made) < terms / shape[-1])).to(dtype)

    width = 2 * inner if TABLE[kind].gated else inner
    operands = {
        "chosen": torch.randint(-1, experts + 1, (tokens, choices), generator=made),
        "x": integers(8, tokens, hidden),
        "weights": torch.randint(1, 3, (tokens, choices), generator=made).float(),
        "w1": integers(16, experts, width, hidden),
        "w2": integers(8, experts, inner, hidden),
        "dy": integers(8, tokens, hidden),
    }
    if biased:
        operands |= {"bias1": integers(width / 4, experts, width), "bias2": integers(hidden / 4, experts, hidden)}
    return operands


def step(operands: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The output, and the gradients of all operands, by their names, with a capacity beyond the rows."""
    given = {name: t.detach() for name, t in operands.items()}
    chosen, dy = given.pop("chosen"), given.pop("dy")
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    x, weights, w1, w2, *biases = leaves.values()
    routing = tgl.route(chosen, len(w1), chosen.numel() + ROOM)
    y = tgl.moe(x, routing, weights, w1.transpose(1, 2), w2, *biases, kind=kind)
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))}


def expected(operands: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """``step`` by a CPU, which has rounded nothing."""
    found = step(operands, kind)
    wide = step({name: t.double() if t.is_floating_point() else t for name, t in operands.items()}, kind)
    for name, t in found.items():
        assert torch.equal(t.double(), wide[name]), name
        assert t.any(), name
    return found
