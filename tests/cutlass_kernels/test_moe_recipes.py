"""``MoE`` with a recipe where kernels serve it: the bits of its pieces, without copies of tokens."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.memory import new_memory_is_nan
from tests.nn.test_unwritten_rows import Products
from tgl.cutlass_kernels.archs import ARCHS
from tgl.testing import emulate

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


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_quantisers_gather_tokens(arch):
    torch.manual_seed(0)
    block = tgl.MoE(G, H, I, params_dtype=torch.bfloat16, **CASES[arch])
    chosen = torch.arange(S * K).view(S, K) % (G + 1)  # of the last nothing
    x, weights = torch.randn(S, H).bfloat16(), torch.rand(S, K, requires_grad=True)
    x[(chosen == G).all(1)] = float("nan")
    x.requires_grad_()
    results, dispatches = [], []
    for pieces in (False, True):
        with emulate(ARCHS[arch].target, detect_races=False) as machine:
            routing = tgl.route(chosen, G)
            results.append(step(block, x, routing, weights, pieces=pieces))
        dispatches.append(sum("Dispatch" in launch.kernel for launch in machine.launches))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert all(t.isfinite().all() for t in results[0])
    assert dispatches == [1, 3]  # of routing weights; by the pieces of tokens and of their results' gradients too


UNWRITTEN = [
    ("sm_90", tgl.recipes.Float8BlockScaling()),
    ("sm_90", tgl.recipes.Float8CurrentScaling()),
    ("sm_100", tgl.recipes.MXFP8BlockScaling()),
    ("sm_100", tgl.recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "recipe"), UNWRITTEN, ids=lambda value: value if isinstance(value, str) else type(value).__name__
)
def test_kernels_neither_write_nor_read_unused_rows(arch, recipe):
    """A larger capacity, NaN in new memory and behind the products: the bits of a capacity that is full."""
    torch.manual_seed(0)
    block = tgl.MoE(G, 128, 128, bias=True, recipe=recipe, params_dtype=torch.bfloat16)
    chosen = torch.arange(S * K).view(S, K) % (G + 1)
    x, weights = torch.randn(S, 128).bfloat16().requires_grad_(), torch.rand(S, K, requires_grad=True)
    results, unwritten = [], []
    for room in (int((chosen < G).sum()), S * K + 300):
        target = ARCHS[arch].target
        with new_memory_is_nan(), emulate(target, detect_races=False) as machine, Products() as seen:
            results.append(step(block, x, tgl.route(chosen, G, num_rows=room), weights, pieces=False))
        unwritten.append([t.shape[0] > 0 and bool(t.isnan().all()) for t in seen.tails])
        kernels = [launch.kernel for launch in machine.launches]
        assert sum("ScaledGemm" in kernel for kernel in kernels) >= 5
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert all(t.isfinite().all() for t in results[0])
    assert not any(unwritten[0])
    assert len(unwritten[1]) >= 3
    assert all(unwritten[1])
