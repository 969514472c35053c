"""Layers with recipes on a device: the same products as on the CPU, eager, compiled and replayed with other routing."""

import pytest
import torch

import tgl
from tgl import recipes
from tgl.nn import _token_permutation
from tgl.ops import permutation

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("FP8 formats are those of sm_90", allow_module_level=True)

RECIPES = [recipes.Float8CurrentScaling(), recipes.Float8BlockScaling(), recipes.DelayedScaling()]
GROUPS, HIDDEN, INNER = 5, 256, 384


def layer(recipe) -> tgl.GroupedMLP:
    torch.manual_seed(0)
    return tgl.GroupedMLP(GROUPS, HIDDEN, INNER, params_dtype=torch.bfloat16, recipe=recipe)


def batch(sizes, rows=700):
    torch.manual_seed(1)
    x, dy = torch.randn(rows, HIDDEN).bfloat16(), torch.randn(rows, HIDDEN).bfloat16()
    x[sum(sizes) :] = float("nan")
    return x, torch.tensor(sizes), torch.rand(rows), dy


def step(mlp, x, m_splits, probs, dy):
    x = x.detach().requires_grad_()
    y = mlp(x, m_splits, probs)
    y.backward(dy)
    grads = [p.grad.clone() for p in mlp.parameters()]
    mlp.zero_grad()
    return [y.detach(), x.grad, *grads]


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.float().cpu(), theirs.float().cpu()
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_step_has_the_values_of_a_cpu(recipe, compiled):
    on_cpu, on_device = layer(recipe), layer(recipe).cuda()
    run = torch.compile(on_device, fullgraph=True) if compiled else on_device
    for sizes in ((100, 0, 300, 1, 200), (0, 0, 0, 700, 0)):
        arguments = batch(sizes)
        theirs = step(on_cpu, *arguments)
        x, m_splits, probs, dy = (t.cuda() for t in arguments)
        x = x.requires_grad_()
        y = run(x, m_splits, probs)
        y.backward(dy)
        ours = [y.detach(), x.grad, *(p.grad for p in on_device.parameters())]
        for a, b in zip(ours, theirs):
            # The activations differ in a last bit here and there, which moves an element by one of its steps of 2^-3.
            assert error(a, b) < 2.0**-6
        assert not y[sum(sizes) :].any()
        on_device.zero_grad()


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=lambda r: type(r).__name__)
def test_one_graph_serves_every_routing(recipe):
    mlp = layer(recipe).cuda()
    x, m_splits, probs, dy = (t.cuda() for t in batch((100, 0, 300, 1, 200)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(mlp, x, m_splits, probs, dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(mlp, x, m_splits, probs, dy)
    for sizes in ((100, 0, 300, 1, 200), (0, 0, 0, 700, 0), (140, 140, 140, 140, 140), (0, 0, 0, 0, 0)):
        for held, value in zip((x, m_splits, probs, dy), batch(sizes)):
            held.copy_(value)
        graph.replay()
        replayed = [t.clone() for t in captured]
        for a, b in zip(replayed, step(mlp, x, m_splits, probs, dy)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", [recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling()], ids=lambda r: r.format)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_tokens_quantised_once_have_the_bits_of_rows_quantised_by_an_index(compiled, recipe, monkeypatch):
    """Dropped slots, whose rows are the tail, and NaN in a token that has only such slots."""
    torch.manual_seed(0)
    tokens, top_k = 1024, _token_permutation.CHOICES
    hidden = _token_permutation.ELEMENTS // tokens
    block = tgl.MoE(GROUPS, hidden, INNER, params_dtype=torch.bfloat16, recipe=recipe).cuda()
    x, dy = (torch.randn(tokens, hidden, device="cuda").bfloat16() for _ in range(2))
    chosen = torch.randint(-1, GROUPS + 1, (tokens, top_k), device="cuda")
    chosen[7] = -1
    x[7] = float("nan")
    weights = torch.rand(tokens, top_k, device="cuda")
    # Inside of the op: a compiler traces what is outside, and refuses a list there that is no part of the function.
    widths, ours = [], permutation._produced
    monkeypatch.setattr(permutation, "_produced", lambda *args: widths.append(args[2][0].shape[1:]) or ours(*args))
    results = []
    for least in (_token_permutation.CHOICES, top_k + 1):
        monkeypatch.setattr(_token_permutation, "CHOICES", least)
        torch.compiler.reset()
        run = torch.compile(block, fullgraph=True) if compiled else block
        given = x.detach().requires_grad_()
        y = run(given, chosen, weights)
        y.backward(dy)
        results.append([y.detach(), given.grad, *(p.grad.clone() for p in block.parameters())])
        block.zero_grad()
        assert ((hidden // 2,) in widths) == (least == top_k)  # codes, two to an element
        widths.clear()
    for once, by_rows in zip(*results, strict=True):
        assert torch.equal(once, by_rows)
        assert once.isfinite().all()
