"""``ExpertParallelMLP(recompute_dispatch=True)``: the bits of the layer without it, and no row that arrived is held."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

import tgl
from tgl.distributed import ExpertParallelMLP
from tgl.nn import _expert_path

from .test_expert_parallel_mlp import MOST, TOP_K, E, Problem, Stack, chosen
from .test_expert_parallel_overflow import Unweighted, all_nan

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
MXFP8 = tgl.recipes.MXFP8BlockScaling()
FORMS: dict[str, dict[str, Any]] = {
    "float64": {"params_dtype": F64},
    "rows that are no whole pieces": {"params_dtype": BF16, "width": 36},
    "by choice": {"params_dtype": F32, "invariant": True},
    "float32 sums": {"params_dtype": BF16, "wire_dtype": F32},
    "quantized": {"params_dtype": BF16, "wire": "quantized", "recipe": MXFP8},
    "quantized, float32 sums": {"params_dtype": BF16, "wire": "quantized", "wire_dtype": F32, "recipe": MXFP8},
    "mxfp8": {"params_dtype": BF16, "recipe": MXFP8},
    "mxfp8, float32 sums": {"params_dtype": BF16, "wire_dtype": F32, "recipe": MXFP8},
    "fp8 by group": {"params_dtype": BF16, "recipe": tgl.recipes.Float8CurrentScaling()},
    "fp8 of earlier calls": {"params_dtype": BF16, "recipe": tgl.recipes.DelayedScaling()},
    "weights per expert": {"params_dtype": F64, "single_grouped_weight": False},
    "main_grad": {"params_dtype": F64, "fuse_wgrad_accumulation": True},
    "delayed": {"params_dtype": F64, "delay_wgrad_compute": True},
}


class Pair:
    """One rank's layers, one that holds rows and one that sends tokens again, and its tokens."""

    def __init__(self, form: str, tokens: int = MOST) -> None:
        options = dict(FORMS[form])
        dtype, self.width = options["params_dtype"], options.pop("width", 32)
        self.ranks, self.me = dist.get_world_size(), dist.get_rank()
        room = {"max_tokens": tokens, "capacity_factor": float(self.ranks)}
        given = {"group": dist.group.WORLD, "top_k": TOP_K, "bias": True, **room, **options}
        self.rows, self.again = (
            ExpertParallelMLP(E, self.width, 32, **given, recompute_dispatch=a) for a in (False, True)
        )
        self.again.load_state_dict(self.rows.state_dict())
        self.draw("even", tokens, dtype)

    def draw(self, case: str, tokens: int, dtype: torch.dtype) -> None:
        self.x, self.dy = torch.randn(2, tokens, self.width).to(dtype)
        self.index, self.weights = chosen(case, tokens), torch.rand(tokens, TOP_K).to(dtype)

    def step(self, layer: Any, *, unbacked: bool = False) -> dict[str, Tensor]:
        """The result, and gradients wherever a layer leaves them."""
        x, weights = self.x.clone().requires_grad_(), self.weights.clone().requires_grad_()
        for t in (x, weights, self.index) if unbacked else ():
            mark_unbacked(t, 0)
        for p in layer.parameters():
            p.grad, p.main_grad = None, torch.zeros_like(p)
        y = layer(x, self.index, weights)
        y.backward(self.dy)
        of = getattr(layer, "layer", getattr(layer, "_orig_mod", layer))
        if of.need_backward_dw():
            of.backward_dw()
        found = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
        for name, p in of.named_parameters():
            found |= {name: p.grad, f"{name}, main": p.main_grad}
        return {name: t for name, t in found.items() if t is not None}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: object) -> None:
    assert ours.keys() == theirs.keys(), what
    for name, t in theirs.items():
        assert torch.equal(ours[name], t), (what, name)


@contextlib.contextmanager
def exchanges() -> Iterator[list[tuple[int, ...]]]:
    """Shapes of what is exchanged meanwhile."""
    made: list[tuple[int, ...]] = []
    exchange = dist.all_to_all_single

    def counted(out: Tensor, t: Tensor, group: dist.ProcessGroup) -> None:
        made.append(tuple(t.shape))
        exchange(out, t, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        yield made


def held(call: Any) -> dict[int, int]:
    """Bytes of each memory that autograd saves for the backward of a call, by address."""
    found: dict[int, int] = {}
    alive = []  # no address is used twice

    def pack(t: Tensor) -> Tensor:
        alive.append(t)
        if t.numel():
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return found


# --- bits -------------------------------------------------------------------------------------------------------------


def check_bits(form: str) -> None:
    pair = Pair(form)
    dtype = FORMS[form]["params_dtype"]
    for case, tokens in (
        ("even", MOST),
        ("sentinels", 4),
        ("one rank takes all", MOST * pair.me),
        ("nothing is routed", 5),
    ):
        pair.draw(case, tokens, dtype)
        same(pair.step(pair.again), pair.step(pair.rows), case)
    pair.draw("even", MOST, dtype)
    assert not torch.equal(pair.step(pair.again)["y"], torch.zeros_like(pair.x))


@pytest.mark.parametrize("form", FORMS)
def test_recomputing_the_dispatch_changes_no_bit(ranks, form):
    ranks(check_bits, form)


def check_overflow() -> None:
    for form in ("float64", "mxfp8"):
        pair = Pair(form)
        layer = pair.again
        layer.exchange.expert_rows = layer.expert_rows = 6
        assert all_nan({name: t for name, t in pair.step(layer).items() if "main" not in name}), form
        layer.clear()
        assert pair.again(pair.x, pair.index).isnan().all()
        layer.clear()


def check_unweighted() -> None:
    pair = Pair("float64")
    same(pair.step(Unweighted(pair.again)), pair.step(Unweighted(pair.rows)), "unweighted")


def check_in_flight() -> None:
    """Four layers, of which one is checkpointed too; two microbatches, whose forwards both come before a backward."""
    problem = Problem("full", BF16)
    rows = [problem.layer() for _ in range(4)]
    again = [problem.layer(recompute_dispatch=True) for _ in range(4)]
    results = []
    for layers in (rows, again):
        stack = Stack(layers)
        losses = []
        for shift in range(2):
            x, index = problem.x[problem.tokens].roll(shift, 0), (problem.index[problem.tokens] + shift) % E
            losses.append(stack(x, index, problem.weights[problem.tokens]).float().square().sum())
        for loss in losses:
            loss.backward()
        results.append([p.grad for p in stack.parameters()])
    assert all(torch.equal(ours, theirs) for theirs, ours in zip(*results, strict=True))


def test_overflow_unweighted_and_several_in_flight(ranks):
    for check in (check_overflow, check_unweighted, check_in_flight):
        ranks(check)


# --- what is held and what travels ------------------------------------------------------------------------------------


def check_held(form: str) -> None:
    """Autograd saves tokens instead of rows, and otherwise the same."""
    pair = Pair(form, tokens=64)
    arrived = pair.ranks * pair.rows.pair_rows
    row = max(codec.width for codec in pair.rows.form.codecs(pair.width, pair.x.dtype))
    x, weights = pair.x.requires_grad_(), pair.weights.requires_grad_()
    rows, again = (held(lambda layer=layer: layer(x, pair.index, weights)) for layer in (pair.rows, pair.again))
    assert x.data_ptr() in again
    assert x.data_ptr() not in rows
    del again[x.data_ptr()]
    assert sorted(rows.values()) == sorted([*again.values(), arrived * row])


def allocated(call: Callable[[], Tensor]) -> int:
    """Bytes that a call allocates and does not free."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        y = call()
    events = profiler.profiler.kineto_results.events()
    del y
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


def check_allocated() -> None:
    """Nobody else holds them. Threads of gloo free what they sent when they get to it, so one of many calls counts."""
    pair = Pair("float64", tokens=64)
    x, weights, found = pair.x.requires_grad_(), pair.weights.requires_grad_(), []
    for _ in range(10):
        rows, again = (
            allocated(lambda layer=layer: layer(x, pair.index, weights)) for layer in (pair.rows, pair.again)
        )
        found.append(rows - again)
    assert pair.ranks * 64 * pair.width * 8 in found, found


def check_exchanges() -> None:
    """One dispatch more, in a backward that reads it; none where ``fc1.weight`` is frozen or not requested."""
    pair = Pair("float64")
    with exchanges() as made:
        pair.step(pair.rows)
        rows = made.copy()
        made.clear()
        pair.step(pair.again)
        assert len(made) == len(rows) + 1 == 9
        made.clear()
        pair.again.fc1.weight.requires_grad_(False)
        pair.step(pair.again)
        assert len(made) == len(rows)
        pair.again.fc1.weight.requires_grad_(True)
        x = pair.x.clone().requires_grad_()
        y = pair.again(x, pair.index, pair.weights)
        made.clear()
        torch.autograd.grad(y, x, pair.dy)
        assert len(made) == 2


def check_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`recompute_dispatch` must be equal on all ranks of `group`.*\[False, True\]"
    ):
        options: dict[str, Any] = {"top_k": TOP_K, "max_tokens": MOST, "recompute_dispatch": dist.get_rank() == 1}
        ExpertParallelMLP(E, 32, 32, group=dist.group.WORLD, **options)
    pair = Pair("float64")
    pair.again.fc1.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"`fc1` must be a GroupedLinear without hooks .*recompute_dispatch=True"):
        pair.again(pair.x, pair.index)


@pytest.mark.parametrize("form", ["float64", "float32 sums", "by choice", "quantized", "mxfp8", "fp8 of earlier calls"])
def test_tokens_are_saved_instead_of_rows(ranks, form):
    ranks(check_held, form)


def test_allocations_exchanges_and_errors(ranks):
    for check in (check_allocated, check_exchanges, check_refused):
        ranks(check)


# --- one graph --------------------------------------------------------------------------------------------------------


def check_graph(form: str, backend: str, one_op: bool) -> None:
    """One graph serves all routings and numbers of tokens, with the exchanges of the eager layer, and saves no rows.

    Partial sums are not rounded to bfloat16, whose order a graph for a CPU decides.

    ``one_op``: a plain block is the ops that it is in a graph for a GPU.
    """
    with pytest.MonkeyPatch.context() as patch:
        if one_op:
            patch.setattr(_expert_path, "compiled_without_kernels", lambda _: False)
        pair, dtype = Pair(form), FORMS[form]["params_dtype"]
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(pair.again, fullgraph=True, backend=counter)
        for case, tokens in (("even", MOST), ("sentinels", 4), ("one rank takes all", 0), ("nothing is routed", 5)):
            pair.draw(case, tokens, dtype)
            with exchanges() as made:
                expected = pair.step(pair.again)
                called = made.copy()
                made.clear()
                same(pair.step(compiled, unbacked=True), expected, case)
                assert made == called, case
        assert counter.frame_count == 1
        pair.draw("even", MOST, dtype)
        x, weights = pair.x.requires_grad_(), pair.weights.requires_grad_()
        found = held(lambda: compiled(x, pair.index, weights))
        row = max(codec.width for codec in pair.again.form.codecs(pair.width, dtype))
        assert pair.ranks * MOST * row not in [size for place, size in found.items() if place != x.data_ptr()]


# A plain layer as ops, and codes that are sent; what is between them takes parts of both.
GRAPHS = [
    ("float32 sums", True),
    ("quantized, float32 sums", False),
    pytest.param("float64", False, marks=pytest.mark.slow),
    pytest.param("mxfp8, float32 sums", False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("form", "one_op"), GRAPHS)
def test_one_graph_for_all_routings(ranks, form, one_op):
    ranks(check_graph, form, "aot_eager", one_op)


@pytest.mark.slow
def test_one_graph_of_inductor(ranks):
    """Inductor adds up expressions for a CPU in orders of its own, with the option and without."""
    ranks(check_graph, "float32 sums", "inductor", True, limit=300.0)
