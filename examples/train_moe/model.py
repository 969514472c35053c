"""A byte-level transformer with Mixture-of-Experts layers, and the plain loop over experts it is measured against."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn import functional as F

import tgl
from tgl.distributed import ExpertParallelMLP
from tgl.meta.expert_parallel import ALL_TO_ALL

VOCABULARY = 256
HEAD = 32


@dataclass(frozen=True)
class Config:
    """The model: width (a multiple of 32), blocks, experts per block, experts per byte, longest window, and a recipe.

    ``recipe`` is how the experts' GEMMs are quantised; None for not at all. The ranks of ``group`` share the experts,
    and each brings up to ``tokens`` bytes to a layer, which ``engine`` moves; None for one rank.
    """

    dim: int
    layers: int
    experts: int
    top_k: int
    context: int
    recipe: tgl.recipes.Recipe | None = None
    group: dist.ProcessGroup | None = None
    tokens: int = 0
    engine: str = ALL_TO_ALL

    @property
    def expert_width(self) -> int:
        """Hidden units of an expert: all the experts of a byte together have twice the model's width."""
        return max(16, 2 * self.dim // self.top_k // 16 * 16)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        frequency = 1e4 ** -(torch.arange(HEAD // 2) / (HEAD // 2))
        angle = torch.outer(torch.arange(config.context), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MixtureOfExperts(nn.Module):
    """Every byte goes to the ``top_k`` experts its router prefers.

    Attributes:
        plain: run the experts one by one in a Python loop instead of as grouped GEMMs (same weights, same result).
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.top_k, self.plain, self.group = config.top_k, False, config.group
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        sizes = config.experts, config.dim, config.expert_width
        if config.group is None:
            self.experts = tgl.MoE(*sizes, recipe=config.recipe)
        else:
            shared = {
                "group": config.group,
                "top_k": config.top_k,
                "max_tokens": config.tokens,
                "engine": config.engine,
            }
            self.experts = ExpertParallelMLP(*sizes, recipe=config.recipe, **shared)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x [S, dim]`` to the output ``[S, dim]``, the load-balancing loss and int32 rows per expert ``[E]``."""
        scores = self.router(x)
        probs = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights, chosen = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.plain:
            rows = torch.bincount(chosen.flatten(), minlength=probs.shape[1]).int()
            return plain_loop(self.experts, x, chosen, weights), load_balance(probs, rows, self.top_k), rows
        routing = tgl.route(chosen, self.router.out_features)
        rows = torch.diff(routing.offs, prepend=routing.offs.new_zeros(1))
        if self.group is None:
            return self.experts(x, routing, weights), load_balance(probs, rows, self.top_k), rows
        rows = all_reduce(rows, "sum", self.group)
        return self.experts(x, chosen, weights), load_balance(probs, rows, self.top_k * self.group.size()), rows


def load_balance(probs: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """Experts times the sum over them of (share of rows) x (mean probability): 1 when the load is even, else more."""
    share = rows / (probs.shape[0] * top_k)
    return probs.shape[1] * (share * probs.mean(dim=0)).sum()


def plain_loop(experts: tgl.MoE, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The usual loop over experts: find the rows of each, run its two layers, add the answers up.

    ``unbind`` gives each expert its own view, as separate modules would have; indexing ``weight[e]`` in the loop would
    make the backward pass allocate the gradient of all experts once per expert.
    """
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert, (fc1, fc2) in enumerate(zip(experts.fc1.weight.unbind(), experts.fc2.weight.unbind(), strict=True)):
        token, choice = torch.where(chosen == expert)
        gate, linear = F.linear(x[token], fc1).chunk(2, dim=-1)
        answer = F.linear(F.silu(gate) * linear, fc2)
        out = out.index_add(0, token, answer.to(out.dtype) * weights[token, choice, None])
    return out.to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(config.dim), Attention(config)
        self.norm2, self.moe = nn.RMSNorm(config.dim), MixtureOfExperts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance, rows = self.moe(self.norm2(x).flatten(0, 1))
        return x + y.view_as(x), balance, rows


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() > 1:
                    # Layers that write to the residual stream start small, so that it does not grow with depth.
                    depth = 2 * config.layers if name.endswith(("attention.out.weight", "fc2.weight")) else 1
                    weight.normal_(0, (weight.shape[-1] * depth) ** -0.5)
            self.embedding.weight.normal_(0, 1)
            self.head.weight.normal_(0, 0.02)

    def use_plain_loop(self, plain: bool = True) -> Transformer:
        """Switch every block between the loop over experts and the grouped GEMMs."""
        for block in self.blocks:
            block.moe.plain = plain
        return self

    def without_recipe(self) -> Transformer:
        """A copy whose experts are not quantised."""
        copy = Transformer(replace(self.config, recipe=None)).to(self.embedding.weight)
        parameters = dict(self.named_parameters())
        copy.load_state_dict({name: parameters[name] for name in copy.state_dict()})
        return copy

    def parameter_counts(self) -> tuple[int, int]:
        """All parameters, and those a single byte meets."""
        total = sum(p.numel() for p in self.parameters())
        experts = sum(p.numel() for block in self.blocks for p in block.moe.experts.parameters())
        return total, total - experts + experts * self.config.top_k // self.config.experts

    def logits(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """int64 bytes ``[batch, length]`` to logits ``[batch, length, 256]``, balance and rows ``[layers, E]``."""
        hidden = self.embedding(x)
        balance, rows = [], []
        for block in self.blocks:
            hidden, block_balance, block_rows = block(hidden)
            balance.append(block_balance)
            rows.append(block_rows)
        return self.head(self.norm(hidden)), torch.stack(balance).mean(), torch.stack(rows)

    def forward(self, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """int64 windows ``[batch, length + 1]`` to the loss in nats per byte, balance and rows ``[layers, E]``."""
        logits, balance, rows = self.logits(windows[:, :-1])
        nats = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        return nats, balance, rows
