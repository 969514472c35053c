"""The layer of expert parallelism in all its arms, on tokens of one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import tgl
from tgl.distributed import ExpertParallelMLP, expert_parallel_host

BF16 = torch.bfloat16
OPS = torch.ops.tgl
BASELINE = "symmetric_memory"
ENGINES = ("all_to_all", BASELINE)
BLOCKS, DELAYED = tgl.recipes.Float8BlockScaling(), tgl.recipes.DelayedScaling()
LAYERS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "all_to_all": {"engine": "all_to_all"},
    "invariant": {"invariant": True},
    "float32 sums": {"wire_dtype": torch.float32},
    "capacity 1.1": {"capacity_factor": 1.1},
    "capacity worst": {"capacity_factor": None},
    "halves": {},
    "blocks": {"recipe": BLOCKS},
    "blocks, wire": {"recipe": BLOCKS, "wire": "quantized"},
    "delayed": {"recipe": DELAYED},
    "recompute dispatch": {"recompute_dispatch": True},
}
"""Options of the layer of an arm."""
KEPT = {
    "blocks, kept weights": "blocks",
    "blocks, wire, kept weights": "blocks, wire",
    "blocks, wire, kept weights, capacity 1.1": "blocks, wire",
    "delayed, kept weights": "delayed",
}
"""Arms whose calls are of a microbatch that is not the first, and those that quantise their weights in every call."""
LAYERS |= {arm: dict(LAYERS[of]) for arm, of in KEPT.items()}
LAYERS["blocks, wire, kept weights, capacity 1.1"] |= LAYERS["capacity 1.1"]
OF_BASELINE = ("compiled",)
"""Arms that call the layer of the baseline in another way."""
REPLAYED = ("recompute dispatch", *OF_BASELINE)
"""Arms whose graph has to pass the gates of the baseline's."""
EXACT = ("capacity 1.1", "capacity worst", *REPLAYED)
"""Arms with the bits of the baseline."""
CALLED = ("torch",)
"""Arms that no graph can hold."""
ARMS = (*LAYERS, *OF_BASELINE, "local", "torch")
COMPILED: dict[str, Any] = {"fullgraph": True, "dynamic": False}


class Shape(NamedTuple):
    """Tokens of a rank, width, width of the activation, experts of all ranks, top-k slots per token."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int

    @property
    def flops(self) -> float:
        """Return the FLOPs of a rank's forward: three products of the rows of its tokens."""
        return 6.0 * self.tokens * self.top_k * self.hidden * self.inner


SHAPES = {
    "qwen3-30b": Shape(8192, 2048, 768, 128, 8),
    "mixtral": Shape(8192, 4096, 14336, 8, 2),
    "deepseek-128": Shape(4096, 7168, 2048, 128, 8),  # half of its experts, which two ranks hold
    "deepseek-v3": Shape(4096, 7168, 2048, 256, 8),
    "few tokens": Shape(128, 7168, 2048, 256, 8),
}

ROUTINGS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "one rank takes all": lambda index, experts, ranks: index % (experts // ranks),
    "one expert takes all": lambda index, experts, ranks: torch.full_like(index, experts - 1),
    "empty experts": lambda index, experts, ranks: index // 4 * 4,
    "sentinels": lambda index, experts, ranks: index.masked_fill(index % 3 == 0, -1).masked_fill(index == 1, experts),
    "no expert takes any": lambda index, experts, ranks: torch.full_like(index, -1),
}
"""Choices that are made of random ones, a number of experts and of ranks."""

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Given = tuple[Tensor, Tensor, Tensor, Tensor]
Block = TypeVar("Block", bound=tgl.MoE)


class Problem:
    """A rank's layers, which share their experts, and its tokens.

    Args:
        shape: its sizes.
        groups: two of all ranks. The second is for the half of the tokens that runs beside the other one.
        arms: the requested ones.
        device: where all of it is.
    """

    def __init__(self, shape: Shape, groups: Sequence[Any], arms: Sequence[str], device: str = "cuda") -> None:
        self.shape, self.group, self.rank, self.device = shape, groups[0], groups[0].rank(), device
        self.common: dict[str, Any] = {"params_dtype": BF16, "device": device}
        torch.manual_seed(self.rank)
        self.layers: dict[str, ExpertParallelMLP] = {}
        wanted = {*ENGINES, *arms, *(KEPT[arm] for arm in arms if arm in KEPT)} - {"halves"}
        for arm, options in LAYERS.items():  # in one order on all ranks
            if arm in wanted:
                self.layers[arm] = self.layer(options)
        half = -(-shape.tokens // 2)
        self.halves = [self.layer(LAYERS["halves"], half, group) for group in groups if "halves" in arms]
        first = self.layers[BASELINE]
        self.parameters = list(first.parameters())
        self.local = self.sharing(tgl.MoE(shape.experts // groups[0].size(), shape.hidden, shape.inner, **self.common))
        torch.cuda.empty_cache()
        self.given = self.draw(0)
        for arm in self.layers:
            self.quantise_first(arm)

    def layer(self, options: dict[str, Any], tokens: int | None = None, group: Any = None) -> ExpertParallelMLP:
        shape = self.shape
        sizes: dict[str, Any] = {"top_k": shape.top_k, "max_tokens": tokens or shape.tokens}
        given = {"engine": BASELINE, "group": group or self.group, **sizes, **self.common, **options}
        return self.sharing(ExpertParallelMLP(shape.experts, shape.hidden, shape.inner, **given))

    def sharing(self, layer: Block) -> Block:
        """The layer with the experts of the first one: those of all do not fit into memory."""
        first = next(iter(self.layers.values()), None)
        if first is not None:
            for mine, theirs in ((layer.fc1, first.fc1), (layer.fc2, first.fc2)):
                own, mine.weight = mine.weight, theirs.weight
                own.data = own.data.new_empty(0)  # the layer still knows it
        return layer

    def quantise_first(self, arm: str) -> None:
        """Prepare the state of a recipe after a first step: kept weights, and the scales of delayed scaling.

        In the second of two steps all operands, the weights among them, have scales of their own amaxes, and any later
        step with these tokens leaves the scales as they are.
        """
        if "recipe" in LAYERS[arm]:
            call = functools.partial(self.layers[arm], is_first_microbatch=True if arm in KEPT else None)
            for _ in range(2):
                self.step_of(call, self.given)

    def draw(self, seed: int, tokens: int | None = None, routing: str | None = None) -> Given:
        """Tokens, choices, weights and a gradient, other ones on every rank; at random, or by one of ``ROUTINGS``."""
        made = torch.Generator(self.device).manual_seed(1000 * seed + self.rank)
        count, kwargs = self.shape.tokens if tokens is None else tokens, {"device": self.device, "generator": made}
        x, dy = torch.randn(2, count, self.shape.hidden, **kwargs).to(BF16)
        index = torch.rand(count, self.shape.experts, **kwargs).topk(self.shape.top_k).indices
        if routing is not None:
            index = ROUTINGS[routing](index, self.shape.experts, self.group.size())
        return x.requires_grad_(), index, torch.rand(count, self.shape.top_k, **kwargs).requires_grad_(), dy

    def call(self, arm: str) -> Call:
        """Return the function that computes the result of an arm for tokens, slots and weights."""
        if arm in KEPT:
            return functools.partial(self.layers[arm], is_first_microbatch=False)
        if arm in self.layers:
            return self.layers[arm]
        calls: dict[str, Call] = {
            "halves": self.by_halves,
            "compiled": lambda *given: self.compiled(*given),
            "local": lambda x, index, weights: self.local(x, index % self.local.num_gemms, weights),
            "torch": lambda *given: expert_parallel_host(self.experts, *given, self.shape.experts, self.group),
        }
        return calls[arm]

    @functools.cached_property
    def compiled(self) -> Call:
        """Compile to one graph, or raise."""
        torch._dynamo.reset()  # of other shapes
        call: Call = torch.compile(self.layers[BASELINE], **COMPILED)
        return call

    def by_halves(self, *given: Tensor) -> Tensor:
        """The second half on a stream of its own."""
        here, beside = torch.cuda.current_stream(), self.beside
        halves = list(zip(*(t.split(-(-len(t) // 2)) for t in given)))
        beside.wait_stream(here)
        with torch.cuda.stream(beside):
            second = self.halves[1](*halves[1])
        first = self.halves[0](*halves[0])
        here.wait_stream(beside)
        return torch.cat([first, second])

    @functools.cached_property
    def beside(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def experts(self, rows: Tensor, offs: Tensor) -> Tensor:
        """The experts of this rank by torch's own GEMMs."""
        w1, w2 = self.parameters
        gate, linear = torch._grouped_mm(rows, w1.transpose(1, 2), offs=offs).chunk(2, -1)
        return torch._grouped_mm(torch.nn.functional.silu(gate) * linear, w2.transpose(1, 2), offs=offs)

    def forward(self, arm: str, given: Given) -> Tensor:
        return self.call(arm)(*given[:3])

    def step(self, arm: str, given: Given) -> list[Tensor]:
        """Output and all gradients."""
        return self.step_of(self.call(arm), given)

    def step_of(self, call: Call, given: Given) -> list[Tensor]:
        """Return the result of a call and the gradients."""
        x, index, weights, dy = given
        y = call(x, index, weights)
        return [y.detach(), *torch.autograd.grad(y, [x, weights, *self.parameters], dy)]
