"""``MoE`` with a recipe where kernels serve it: the bits of its pieces, without copies of tokens."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tgl.cutlass_kernels.archs import ARCHS
from tgl.testing import emulator

G, H, I, S, K = 3, 64, 64, 40, 2
CASES = {
    "sm_90": {"recipe": tgl.recipes.Float8CurrentScaling()},
    "sm_100": {"recipe": tgl.recipes.MXFP8BlockScaling()},
}


def step(block, x, routing, weights, *, pieces):
    if pieces:
        rows = block.forward_offsets(tgl.dispatch(x, routing), routing.offs, tgl.dispatch_weights(weights, routing))
        y = tgl.combine(rows, routing)
    else:
        y = block(x, routing, weights)
    return [y.detach(), *torch.autograd.grad(y, [x, weights, *block.parameters()], torch.ones_like(y))]


@pytest.mark.parametrize("arch", [pytest.param("sm_90", marks=pytest.mark.slow), "sm_100"])
def test_quantisers_gather_tokens(arch):
    torch.manual_seed(0)
    block = tgl.MoE(G, H, I, params_dtype=torch.bfloat16, **CASES[arch])
    chosen = torch.arange(S * K).view(S, K) % (G + 1)  # of the last nothing
    x, weights = torch.randn(S, H).bfloat16(), torch.rand(S, K, requires_grad=True)
    x[(chosen == G).all(1)] = float("nan")
    x.requires_grad_()
    results, dispatches = [], []
    for pieces in (False, True):
        with emulator.emulate(ARCHS[arch].target, detect_races=False) as machine:
            routing = tgl.route(chosen, G)
            results.append(step(block, x, routing, weights, pieces=pieces))
        dispatches.append(sum("Dispatch" in launch.kernel for launch in machine.launches))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert all(t.isfinite().all() for t in results[0])
    assert dispatches == [1, 3]  # of routing weights; by the pieces of tokens and of their results' gradients too


RECIPES = [tgl.recipes.Float8BlockScaling(), pytest.param(tgl.recipes.Float8CurrentScaling(), marks=pytest.mark.slow)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_products_write_nothing_past_the_last_experts_rows(recipe, monkeypatch):
    """New memory is NaN, and is there still; results have the bits of pieces whose spare rows are zeros."""
    torch.manual_seed(0)
    block = tgl.MoE(G, 128, 128, params_dtype=torch.bfloat16, recipe=recipe, bias=True)
    chosen = torch.arange(S * K).view(S, K) % (G + 1)
    x, weights = torch.randn(S, 128).bfloat16().requires_grad_(), torch.rand(S, K, requires_grad=True)
    made = []

    def seen(gemm):
        return lambda *args, **options: made.append(gemm(*args, **options)) or made[-1]

    for layer in (block.fc1, block.fc2):
        for name in ("fprop", "dgrad"):
            monkeypatch.setattr(layer.gemms, name, seen(getattr(layer.gemms, name)))
    results = []
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        for pieces in (False, True):
            with emulator.emulate("sm_90a", detect_races=False):
                routing = tgl.route(chosen, G, S * K + 50)
                results.append(step(block, x, routing, weights, pieces=pieces))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    used = int(routing.offs[-1])
    assert len(made) == 8
    for ours, theirs in zip(made[:4], made[4:]):
        assert torch.equal(ours[:used], theirs[:used])
        assert ours[used:].isnan().all()
        assert not theirs[used:].any()
