"""A router's choices, weights, sums and gradients on a device, captured in a graph too, against the CPU in float64."""

import pytest
import torch

import tgl
from tests.router_cases import CASES, cotangents, operands, weighing

pytestmark = pytest.mark.gpu


def magnitude(case, given):
    """Return the magnitude of the summands of a row's gradient, which may cancel: scores are at most 1."""
    logits, _, grad, shares, squares = given
    total = case.options.get("scale", 1.0) * grad.abs().amax(1)
    if shares is not None:
        total = total + 2 * shares.abs().max() + 2 * logits.logsumexp(1).abs() * squares.abs()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 77, 5000])
@pytest.mark.parametrize("name", CASES)
def test_topk_router(name, tokens, dtype):
    """Replays see other logits. A bias may put experts closer to each other than float32 tells apart."""
    case = CASES[name]
    (first, bias), (second, _) = (operands(case, tokens, dtype, seed) for seed in (0, 1))
    grads = cotangents(case, tokens, torch.float32)
    logits, on_device = first.cuda(), bias if bias is None else bias.cuda()
    grad, *sums = (t if t is None else t.cuda() for t in grads)
    assert tgl.explain("topk_router", logits, case.top_k, on_device, **case.options).chosen.name == "tgl kernel"

    def step():
        made = torch.ops.tgl.topk_router(logits, case.top_k, on_device, **case.options)
        return *made, torch.ops.tgl.topk_router_backward(grad, logits, made[1], *sums, **weighing(case))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for values in (first, second):
        logits.copy_(values)
        graph.replay()
        weights, index, counts, shares, z, back = (t.cpu() for t in made)
        wide = [None if t is None else t.double() for t in (values, bias, *grads)]
        wanted = torch.ops.tgl.topk_router(wide[0], case.top_k, wide[1], **case.options)
        same = (index == wanted[1]).all(1)
        assert (~same).sum() <= (tokens // 1000 if case.bias else 0)
        torch.testing.assert_close(weights[same].double(), wanted[0][same], rtol=4e-6, atol=1e-30)
        if case.options.get("sums"):
            assert torch.equal(counts, index.flatten().bincount(minlength=case.experts).int())
            torch.testing.assert_close(shares.double(), wanted[3], rtol=1e-5, atol=0)
            torch.testing.assert_close(z.double(), wanted[4], rtol=1e-5, atol=0)
        theirs = torch.ops.tgl.topk_router_backward(wide[2], wide[0], index, *wide[3:], **weighing(case))
        error = (back.double() - theirs).abs().amax(1)
        kind = torch.finfo(dtype)
        rounding = kind.eps * theirs.abs().amax(1).clamp(min=kind.tiny)
        assert (error <= rounding + 8 * torch.finfo(torch.float32).eps * magnitude(case, wide)).all()
        again = step()
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(again, made, strict=True))
