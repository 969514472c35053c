"""``ExpertParallelMLP`` on two and four ranks against ``tgl.MoE`` on one rank with all experts and all tokens.

Bounds of a sum. A token's answers t_j, one for each of its k choices, have equal bits on both sides, and both sum them
in the accumulator's precision: one in the order of choices, the other by rank first. Either sum differs from the exact
one by at most (k - 1) u sum |t_j| to first order, u = eps / 2, so both differ by less than k eps sum |t_j|. In bfloat16
the partial sum of every rank is rounded, which adds u16 sum |t_j|, and both results are, which adds 2 u16 sum |t_j|.
Gradients of tokens are such sums too. Gradients of routing weights and of experts are not: their bits are equal.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tgl
from tgl.distributed import ExpertParallelMLP

E, H, I, TOP_K, MOST = 8, 32, 32, 3, 6  # rows of whole cache lines, by whose place a CPU chooses an order of sums

# --- problems ---------------------------------------------------------------------------------------------------------


def counts_of(case: str, ranks: int) -> list[int]:
    """Tokens of every rank."""
    return {
        "uneven": [(3 * r + 1) % (MOST + 1) for r in range(ranks)],
        "one rank has all": [MOST * (r == 1) for r in range(ranks)],
        "no tokens": [0] * ranks,
        "full": [MOST] * ranks,
    }.get(case, [5] * ranks)


def chosen(case: str, tokens: int) -> Tensor:
    index = torch.rand(tokens, E).topk(TOP_K).indices
    if case == "one rank takes all":
        index %= 2
    elif case == "one expert takes all":
        index.fill_(3)
    elif case == "empty experts":
        index = index // 2 * 2
    elif case == "sentinels":
        index[::2, 1], index[3], index[1, 0] = E, E + 7, -1
    elif case == "nothing is routed":
        index.fill_(E)
    return index


class Problem:
    """A layer of one rank, its results, and the share of rank ``me`` of a problem."""

    def __init__(self, case: str, dtype: torch.dtype, **options: Any) -> None:
        self.ranks, self.me = dist.get_world_size(), dist.get_rank()
        counts = counts_of(case, self.ranks)
        self.first, total = sum(counts[: self.me]), sum(counts)
        self.tokens = slice(self.first, self.first + counts[self.me])
        self.experts = slice(self.me * E // self.ranks, (self.me + 1) * E // self.ranks)
        self.options = {"bias": True, "params_dtype": dtype, "activation": "reglu", **options}
        self.whole = tgl.MoE(E, H, I, **self.options)
        self.x = torch.randn(total, H).to(dtype)
        self.index = chosen(case, total)
        self.weights = torch.rand(total, TOP_K).to(dtype)
        self.grad = torch.randn(total, H).to(dtype)

    def layer(self, **options: Any) -> ExpertParallelMLP:
        # Room for every choice of every token, of one expert too.
        room = {"max_tokens": MOST, "capacity_factor": float(self.ranks)}
        given = {"group": dist.group.WORLD, "top_k": TOP_K, **room}
        made = ExpertParallelMLP(E, H, I, **{**given, **self.options, **options})
        with torch.no_grad():
            for mine, theirs in zip(made.parameters(), self.whole.parameters(), strict=True):
                mine.copy_(theirs[self.experts])
        return made

    def results(self, layer: Any, rows: slice, choices: slice = slice(None)) -> dict[str, Tensor]:
        """The result and all gradients for some of the tokens, and some of their choices."""
        x, weights = self.x[rows].requires_grad_(), self.weights[rows, choices].requires_grad_()
        y = layer(x, self.index[rows, choices], weights)
        leaves = {"x": x, "weights": weights, **dict(layer.named_parameters())}
        return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, leaves.values(), self.grad[rows])))}

    @functools.cached_property
    def expected(self) -> dict[str, Tensor]:
        """This rank's share of what one rank computes."""
        return self.share(self.results(self.whole, slice(None)))

    def share(self, results: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: t[self.tokens] if name in ("y", "x", "weights") else t[self.experts] for name, t in results.items()
        }

    @functools.cached_property
    def magnitudes(self) -> dict[str, Tensor]:
        """sum |t_j| of the results that are sums of t_j."""
        parts = [self.share(self.results(self.whole, slice(None), slice(j, j + 1))) for j in range(TOP_K)]
        return {name: sum(part[name].double().abs() for part in parts) for name in ("y", "x")}


def bound(dtype: torch.dtype) -> float:
    """Over sum |t_j|."""
    if dtype == torch.bfloat16:
        return TOP_K * torch.finfo(torch.float32).eps + 1.5 * torch.finfo(dtype).eps
    return TOP_K * torch.finfo(dtype).eps


def check(case: str, dtype: torch.dtype) -> None:
    problem = Problem(case, dtype)
    by_rank = problem.results(problem.layer(), problem.tokens)
    by_choice = problem.results(problem.layer(invariant=True), problem.tokens)
    for name, expected in problem.expected.items():
        assert torch.equal(by_choice[name], expected), name
        if name in problem.magnitudes:
            difference = (by_rank[name].double() - expected.double()).abs()
            assert (difference <= bound(dtype) * problem.magnitudes[name]).all(), name
        else:
            assert torch.equal(by_rank[name], expected), name
    if dtype == torch.float64:
        for name, expected in problem.expected.items():
            torch.testing.assert_close(by_rank[name], expected, rtol=0, atol=1e-12)


CASES = [
    "even",
    "uneven",
    "full",
    "one rank has all",
    "no tokens",
    "one rank takes all",
    "one expert takes all",
    "empty experts",
    "sentinels",
    "nothing is routed",
]


def check_all(dtype: torch.dtype) -> None:
    for case in CASES:
        try:
            check(case, dtype)
        except AssertionError as error:
            raise AssertionError(case) from error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [2, 4])
def test_values_and_gradients(request, count, dtype):
    request.getfixturevalue({2: "ranks", 4: "four_ranks"}[count])(check_all, dtype)


# --- training ---------------------------------------------------------------------------------------------------------


class Stack(torch.nn.Module):
    """Layers with a residual and choices of their own; the second one is formed again in the backward."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            call = functools.partial(checkpoint, layer, use_reentrant=False) if i == 1 else layer
            x = x + call(x, index.roll(i, 0), weights)
        return x


def check_layers_in_flight() -> None:
    """Two microbatches, whose forwards both come before a backward."""
    problem = Problem("full", torch.float64)
    wholes, layers = [], []
    for _ in range(4):
        problem.whole = tgl.MoE(E, H, I, **problem.options)
        wholes.append(problem.whole)
        layers.append(problem.layer())
    one, several = Stack(wholes), Stack(layers)
    shares = [slice(r * MOST, (r + 1) * MOST) for r in range(problem.ranks)]
    batches = [(torch.randn_like(problem.x), chosen("even", len(problem.x))) for _ in range(2)]

    def loss(model: Stack, batch: tuple[Tensor, Tensor], rows: slice) -> Tensor:
        x, index = batch
        return model(x[rows], index[rows], problem.weights[rows]).square().sum()

    for mine in reversed([loss(several, batch, problem.tokens) for batch in batches]):
        mine.backward()
    for batch in batches:
        for rows in shares:
            loss(one, batch, rows).backward()
    for ours, theirs in zip(several.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad[problem.experts], rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [2, 4])
def test_layers_in_flight(request, count):
    request.getfixturevalue({2: "ranks", 4: "four_ranks"}[count])(check_layers_in_flight)
