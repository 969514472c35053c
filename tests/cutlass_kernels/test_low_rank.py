"""``GroupedLoRALinear`` where kernels serve it: products of low rank, forward and backward, exact on integers."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.kernel_cases import integers
from tgl.cutlass_kernels.archs import ARCHS, PAIRED, having
from tgl.testing import emulate

G, T, K, N = 2, 24, 16, 16
SPLITS = torch.tensor([13, 7])


def step(layer: tgl.GroupedLoRALinear, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and all gradients, of an output's gradient of ones."""
    y = layer(x, SPLITS)
    return [y.detach(), *torch.autograd.grad(y, [x, layer.lora_A, layer.lora_B], torch.ones_like(y))]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [8, 12, 128])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_kernels_serve_every_product(arch, rank):
    """Rank 12 takes 24 bytes a row, which copies make readable."""
    torch.manual_seed(0)
    layer = tgl.GroupedLoRALinear(tgl.GroupedLinear(G, K, N, bias=False, params_dtype=torch.bfloat16), rank)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(integers(*parameter.shape))
    x = integers(T, K).requires_grad_()
    wanted = step(layer, x)
    with emulate(ARCHS[arch].target, detect_races=False) as machine:
        found = step(layer, x)
    products = 2 if arch in having(PAIRED) else 3  # forward, and as many in the backward beside two weight gradients
    assert sum("Gemm" in launch.kernel for launch in machine.launches) == 2 * products + 2
    for ours, cpu in zip(found, wanted, strict=True):
        assert torch.equal(ours, cpu)
