"""Data sent between ranks: quantised tokens and gradients, and partial sums in float32.

**Quantised.** The layer with a quantised wire computes what that with a dense one makes of tokens and gradients which
were quantised by rows and decoded, to the bit: such values survive another quantisation by rows, as its power-of-two
scale is the first one or below it, and the columnwise codes are made of them.

**Bound of the codes that weight gradients read.** To nearest an element of E4M3 is off by u |x| at most, u = 2^-4, or
by half a subnormal step, 2^-10 s. The scale s of a block, the smallest power of two with amax <= 448 s, is below
2 amax / 448: one rounding of x is off by e = u |x| + 2^-10 a / 224 where a is its row's amax. The result x' has the
four significant bits of an element, which a second scale, a power of two as well, takes as they are unless they fall
below its normal range: |x'' - x| <= e + 2^-10 c / 224, where the column's amax c of x' is at most 1 + u + 2^-10 / 224
times the largest rowwise amax of x there.

**Partial sums in float32.** Those of ``test_expert_parallel_mlp`` without the rounding of every rank: k eps32 sum |t_j|
for two orders of sums, and 2 u16 sum |t_j| for two results in bfloat16.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tgl
from tgl.distributed import ExpertParallelMLP
from tgl.distributed._wire_format import WIRES, Codec, Wire, WireFormat, check_wire
from tgl.nn import _expert_path
from tgl.nn._token_permutation import LocalPermutation
from tgl.recipes import Float8BlockScaling, Format, MXFP8BlockScaling

from .test_expert_parallel_mlp import MOST, TOP_K, E, Problem, chosen, counts_of

BF16, F32 = torch.bfloat16, torch.float32
RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 compact": MXFP8BlockScaling(fp8_format=Format.HYBRID, scale_layout="compact"),
    "fp8_block": Float8BlockScaling(),
    "fp8_block float32": Float8BlockScaling(use_f32_scales=True),
}
REFUSED = [
    None,
    tgl.recipes.Float8CurrentScaling(),
    tgl.recipes.DelayedScaling(),
    tgl.recipes.NVFP4BlockScaling(),
]

# --- one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [1, 40, 160])
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_as_bytes(recipe, hidden):
    """Rows packed as bytes decode to the components of ``group_quantize``, in a recipe's layout."""
    spec, x = RECIPES[recipe].operands.grad, torch.randn(9, hidden).bfloat16()
    codec = Codec(spec, hidden, BF16)
    packed = codec.pack(x)
    assert packed.shape == (9, codec.width)
    assert codec.width % 16 == 0
    routing = tgl.route(torch.tensor([[1], [0], [3], [1], [-1], [3], [3], [2], [1]]), 4)
    made = codec.components(packed, LocalPermutation.of(routing), routing.offs)
    expected = spec.quantize(x, routing.offs, columnwise=False, rows=LocalPermutation.of(routing).token)
    used = routing.offs[-1]
    assert torch.equal(made[0].view(torch.uint8)[:used], expected.data.view(torch.uint8)[:used])
    assert made[1].stride() == expected.scale.stride()
    scales = (made[1], expected.scale) if made[1].dim() == 1 else (made[1][:used], expected.scale[:used])
    assert torch.equal(*scales)
    assert torch.equal(Codec(None, hidden, BF16).values(Codec(None, hidden, BF16).pack(x)), x)


def test_error_of_values_that_are_rounded_twice():
    spec, rows = MXFP8BlockScaling(scale_layout="compact").operands.input, 96
    x = (torch.randn(rows, 64) * torch.randn(rows, 1).mul(5).exp2()).bfloat16()
    offs, codec = torch.tensor([rows], dtype=torch.int32), Codec(spec, 64, BF16)
    made = codec.components(codec.pack(x), LocalPermutation.of(tgl.route(torch.zeros(rows, 1).int(), 1)), offs)
    columnwise = codec.columnwise(made, offs)
    options = {"format": "mxfp8", "columnwise": True, "out_dtype": F32}
    twice = tgl.group_dequantize(*columnwise, offs, **options).double()
    x = x.double()
    u, step = 2.0**-4, 2.0**-10 / 224
    amax = x.abs().unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1)
    column_amax = amax.unflatten(0, (-1, 32)).amax(1).repeat_interleave(32, 0)
    once = u * x.abs() + step * amax
    difference = (twice - x).abs()
    assert (difference <= once + step * (1 + u + step) * column_amax).all()
    assert (difference > once).any()
    assert (codec.decoded(made, offs).double() != twice).any()


@pytest.mark.parametrize("recipe", REFUSED, ids=lambda r: type(r).__name__)
def test_recipes_whose_scales_depend_on_where_rows_go(recipe):
    with pytest.raises(ValueError, match="`wire` must be 'dense' unless `recipe` scales blocks of one row") as error:
        check_wire("quantized", None, recipe)
    assert f"recipe={recipe!r}" in str(error.value)
    check_wire("dense", F32, recipe)


def test_names_of_wire_formats():
    assert list(WIRES) == ["dense", "quantized"]
    with pytest.raises(ValueError, match="`wire` must be one of 'dense', 'quantized', but got 'fp8'"):
        check_wire("fp8", None, MXFP8BlockScaling())
    with pytest.raises(ValueError, match=r"`wire_dtype` must be one of None, torch.float32, but got torch.float16"):
        check_wire("dense", torch.float16, None)


# --- layers -----------------------------------------------------------------------------------------------------------


class Pair:
    """The layers of one rank with a dense wire and another one, and its share of a problem."""

    def __init__(self, case: str, hidden: int, dtype: torch.dtype = BF16, **options: Any) -> None:
        self.ranks, self.me = dist.get_world_size(), dist.get_rank()
        counts = counts_of(case, self.ranks)
        first = sum(counts[: self.me])
        self.rows = slice(first, first + counts[self.me])
        total = sum(counts)
        self.index, self.weights = chosen(case, total), torch.rand(total, TOP_K).to(dtype)
        self.x, self.grad = torch.randn(total, hidden).to(dtype), torch.randn(total, hidden).to(dtype)
        wire = {name: options.pop(name) for name in ("wire", "wire_dtype") if name in options}
        room = {"max_tokens": MOST, "capacity_factor": float(self.ranks)}
        options = {"group": dist.group.WORLD, "top_k": TOP_K, **room, "params_dtype": dtype, **options}
        self.dense = ExpertParallelMLP(E, hidden, 96, **options)
        self.other = ExpertParallelMLP(E, hidden, 96, **options, **wire)
        self.other.load_state_dict(self.dense.state_dict())

    def results(self, layer: Any, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """The result and all gradients of this rank's tokens."""
        x, weights = x[self.rows].clone().requires_grad_(), self.weights[self.rows].clone().requires_grad_()
        index = self.index[self.rows]
        if isinstance(layer, torch._dynamo.eval_frame.OptimizedModule):
            for t in (x, weights, index):
                mark_unbacked(t, 0)
        y = layer(x, index, weights)
        leaves = {"x": x, "weights": weights, **dict(self.dense.named_parameters())}
        parameters = dict((self.other if layer is not self.dense else self.dense).named_parameters())
        leaves.update(parameters)
        return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, leaves.values(), grad[self.rows])))}

    def decoded(self, t: Tensor, spec: Any) -> Tensor:
        """Quantised by rows, and back."""
        ends = torch.tensor([len(t)], dtype=torch.int32)
        made = spec.quantize(t, ends, columnwise=False)
        return tgl.group_dequantize(
            made.data, made.scale, ends, format=spec.format, scale_layout=spec.scale_layout, out_dtype=t.dtype
        )


CASES = ("uneven", "sentinels", "one rank has all", "nothing is routed", "one expert takes all")


def check_quantized(name: str) -> None:
    recipe = RECIPES[name]
    for number, case in enumerate(CASES):
        options = {"bias": case == "sentinels", "invariant": number % 2 == 0, "recipe": recipe}
        options["wire_dtype"] = F32 if case == "one expert takes all" else None
        pair = Pair(case, (160, 40)[number % 2], wire="quantized", **options)
        dense = pair.results(pair.dense, pair.x, pair.grad)
        ours = pair.results(pair.other, pair.x, pair.grad)
        if options["wire_dtype"] is None:
            for result in ("y", "x", "fc1.bias" if options["bias"] else "weights"):
                assert torch.equal(ours[result], dense[result]), (case, result)
        specs = recipe.operands
        if options["wire_dtype"] is None and specs.input.power_of_two is not False:
            values = pair.decoded(pair.x, specs.input), pair.decoded(pair.grad, specs.grad)
            for result, expected in pair.results(pair.dense, *values).items():
                assert torch.equal(ours[result], expected), (case, result)
        pair.other.check()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_quantized_wire_has_the_bits_of_a_dense_one(ranks, recipe):
    ranks(check_quantized, recipe)


def check_float32() -> None:
    """Against one rank with all tokens. (A bias of FC2 is left out: ``tgl.moe`` rounds its part of the weights.)"""
    for case in ("uneven", "full", "sentinels", "one expert takes all"):
        problem = Problem(case, BF16, bias=False)
        results = problem.results(problem.layer(wire_dtype=F32), problem.tokens)
        bound = TOP_K * torch.finfo(F32).eps + torch.finfo(BF16).eps
        for name, expected in problem.expected.items():
            if name in problem.magnitudes:
                difference = (results[name].double() - expected.double()).abs()
                assert (difference <= bound * problem.magnitudes[name]).all(), (case, name)
            else:
                assert torch.equal(results[name], expected), (case, name)


def test_partial_sums_in_float32(four_ranks):
    four_ranks(check_float32)


def cast_first(wire: Wire, rows: Tensor) -> Tensor:
    """``Wire.combined`` of rows that are float32 in memory before they are summed, and of sums that are home."""
    sums = torch.ops.tgl.combine(rows.float(), *wire.local)
    group = {"group_name": wire.group_name, "engine": wire.engine}
    return torch.ops.tgl.ep_combine(sums, None, *wire.home, **group)[0].to(rows.dtype)


def check_sums_without_a_cast() -> None:
    """For a plain block, which runs its ops, and one with a recipe."""
    recipes = (None, False), (None, True), (MXFP8BlockScaling(), True)
    for case, (recipe, invariant) in itertools.product(("uneven", "sentinels", "one rank has all"), recipes):
        biased = case == "sentinels"  # whose part of the gradient of weights ``tgl.moe`` rounds before it adds it
        pair = Pair(case, 40, wire_dtype=F32, invariant=invariant, recipe=recipe, bias=biased)
        ours = pair.results(pair.other, pair.x, pair.grad)
        with by_pieces():
            expected = pair.results(pair.other, pair.x, pair.grad)
        for name, t in expected.items():
            assert torch.equal(ours[name], t) or (biased and recipe is None and name == "weights"), (case, name)


@contextlib.contextmanager
def by_pieces() -> Iterator[None]:
    """Layers compute sums of rows that are cast first, and a plain block by its parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "combined", cast_first)
        patch.setattr(_expert_path, "_against_op", lambda *_: [(_expert_path.ONE_OP, "the test", "runs a function")])
        yield


def check_gradients_asked_for() -> None:
    """Gradients requested by name, one or more of them; they have no derivative."""
    pair = Pair("uneven", 40, wire_dtype=F32)
    index, grad = pair.index[pair.rows], pair.grad[pair.rows]
    x, weights = pair.x[pair.rows].clone().requires_grad_(), pair.weights[pair.rows].clone().requires_grad_()
    leaves = {"x": x, "weights": weights, **dict(pair.other.named_parameters())}
    y = pair.other(x, index, weights)
    expected = dict(zip(leaves, torch.autograd.grad(y, leaves.values(), grad)))
    for names in (["x"], ["weights"], ["fc1.weight"], ["fc2.weight"], ["x", "fc2.weight"], ["weights", "fc1.weight"]):
        y = pair.other(x, index, weights)
        found = torch.autograd.grad(y, [leaves[name] for name in names], grad)
        assert all(torch.equal(one, expected[name]) for name, one in zip(names, found)), names
    (dx,) = torch.autograd.grad(pair.other(x, index), x, grad.clone().requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of a layer of this kind have no derivative"):
        dx.sum().backward()


def test_sums_have_the_bits_of_rows_in_float32(ranks):
    ranks(check_sums_without_a_cast)
    ranks(check_gradients_asked_for)


def check_bytes() -> None:
    """Exchanges of a forward and a backward send the bytes that ``traffic`` reports, besides the counts."""
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(out: Tensor, t: Tensor, group: dist.ProcessGroup) -> None:
        assert out.dtype == t.dtype
        sent.append(t.numel() * t.element_size())
        exchange(out, t, group=group)

    for wire, sums, row in (("quantized", None, 176 + 320), ("quantized", F32, 176 + 640), ("dense", F32, 320 + 640)):
        pair = Pair("full", 160, wire=wire, wire_dtype=sums, recipe=MXFP8BlockScaling())
        sent.clear()
        dist.all_to_all_single = counted
        try:
            pair.results(pair.other, pair.x, pair.grad)
        finally:
            dist.all_to_all_single = exchange
        places = pair.ranks * pair.other.pair_rows
        counts, choices = sent[:2]
        assert counts == pair.ranks * (E + pair.ranks) * 4
        assert pair.other.traffic(BF16)[0] == choices + sum(sent[2:5]) == places * (row + TOP_K * (4 + 2))
        assert sum(sent[5:]) == sum(sent[2:5])
        assert len(sent) == 8


def check_graph_of_ops() -> None:
    """A plain block with float32 sums, which is ops of its own in a graph for a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_expert_path, "compiled_without_kernels", lambda _: False)
        check_graph(wire="dense", recipe=None)


def check_graph(backend: str = "aot_eager", **options: Any) -> None:
    """One graph, made by the first call, serves every number of tokens and routing, with the bits of eager calls."""
    pair = Pair("full", 40, **{"wire": "quantized", "wire_dtype": F32, "recipe": MXFP8BlockScaling(), **options})
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(pair.other, fullgraph=True, backend=counter)
    for case, rows in (("even", slice(0, 5)), ("sentinels", slice(2, 8)), ("even", slice(0, 0))):
        pair.index, pair.rows = chosen(case, len(pair.x)), rows
        results = pair.results(compiled, pair.x, pair.grad)
        for name, t in pair.results(pair.other, pair.x, pair.grad).items():
            assert torch.equal(results[name], t), (case, name)
    assert counter.frame_count == 1


def check_dispatched_again() -> None:
    """Without its rows in the save list a checkpoint sends the tokens again, and holds none that arrived."""
    pair = Pair("full", 40, wire="quantized", recipe=MXFP8BlockScaling())
    saved = [op for op in tgl.SAC_SAVE_LIST if op is not torch.ops.tgl.ep_dispatch.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    counts, exchange = [0], dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> None:
        counts[-1] += 1
        exchange(*args, **kwargs)

    dist.all_to_all_single = counted
    try:
        expected = pair.results(pair.other, pair.x, pair.grad)
        counts.append(0)
        again = functools.partial(checkpoint, pair.other, use_reentrant=False, context_fn=contexts)
        results = pair.results(again, pair.x, pair.grad)
    finally:
        dist.all_to_all_single = exchange
    for name, t in expected.items():
        assert torch.equal(results[name], t), name
    assert counts == [8, 10]


def check_overflow() -> None:
    """NaN on all ranks, with and without routing weights."""
    for recipe in (MXFP8BlockScaling(), Float8BlockScaling(), None):
        wire = "dense" if recipe is None else "quantized"
        pair = Pair("full", 40, wire=wire, wire_dtype=F32, recipe=recipe, bias=True, capacity_factor=0.5)
        pair.index = torch.zeros_like(pair.index)
        assert all(bool(t.isnan().all()) for t in pair.results(pair.other, pair.x, pair.grad).values())
        pair.other.clear()
        assert pair.other(pair.x[pair.rows], pair.index[pair.rows]).isnan().all()
        with pytest.raises(RuntimeError, match="rows of experts were needed"):
            pair.other.check()


def check_refused() -> None:
    pair = Pair("full", 40, wire="quantized", recipe=MXFP8BlockScaling())
    x, index = pair.x[pair.rows], pair.index[pair.rows]
    hooked = copy.deepcopy(pair.other)
    hooked.fc1.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="`fc1` must be a GroupedLinear without hooks with wire='quantized'"):
        hooked(x, index)
    with pytest.raises(TypeError, match="`x` must be float32, bfloat16 or float16"):
        pair.other(x.double(), index)
    wide = Pair("full", 40, torch.float64, wire_dtype=F32).other
    with pytest.raises(TypeError, match=r"`x` must be no wider than wire_dtype=torch.float32, but got torch.float64"):
        wide(x.double(), index)
    for name, values in (("wire", list(WIRES)), ("recipe", [MXFP8BlockScaling(), Float8BlockScaling()])):
        given = {"wire": "quantized", "recipe": MXFP8BlockScaling(), name: values[pair.me]}
        with pytest.raises(ValueError, match=f"`{name}` must be equal on all ranks of `group`"):
            ExpertParallelMLP(E, 40, 96, group=dist.group.WORLD, top_k=TOP_K, max_tokens=MOST, **given)


def test_bytes_graphs_overflow_and_errors(ranks):
    for check in (check_bytes, check_graph, check_graph_of_ops, check_dispatched_again, check_overflow, check_refused):
        ranks(check)


@pytest.mark.slow
def test_one_graph_of_inductor(ranks):
    ranks(check_graph, "inductor", limit=300.0)


def test_sizes_of_rows():
    """Half the bytes and the scales; no less memory than any part of a call needs."""
    form = WireFormat.of("quantized", None, MXFP8BlockScaling())
    assert form.bytes_to(7168, BF16) == 7168 + 224
    assert form.bytes_back(7168, BF16) == 2 * 7168
    assert WireFormat.of("dense", F32, None).bytes_back(7168, BF16) == 4 * 7168
    assert WireFormat.of("dense", None, MXFP8BlockScaling()).as_always
