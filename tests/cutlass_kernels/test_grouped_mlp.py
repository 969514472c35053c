"""``GroupedMLP`` where kernels serve it: one op, whose kernels span the activation and the GEMMs beside it."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tgl.cutlass_kernels.archs import ARCHS
from tgl.testing import emulate


def step(mlp: tgl.GroupedMLP, x: torch.Tensor, offs: torch.Tensor, probs: torch.Tensor) -> list[torch.Tensor]:
    """Output and all gradients."""
    y = mlp.forward_offsets(x, offs, probs)
    return [y.detach(), *torch.autograd.grad(y, [x, probs, *mlp.parameters()], torch.ones_like(y))]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100", pytest.param("sm_86", marks=pytest.mark.slow)])
def test_activation_is_part_of_the_gemms(arch):
    torch.manual_seed(0)
    mlp = tgl.GroupedMLP(3, 64, 64, params_dtype=torch.bfloat16, recompute_activation=True)
    offs = torch.tensor([40, 40, 150], dtype=torch.int32)
    x = torch.randn(160, 64).bfloat16()
    x[150:] = float("nan")
    x.requires_grad_()
    probs = torch.rand(160, requires_grad=True)
    near = step(mlp, x, offs, probs)
    with emulate(ARCHS[arch].target, detect_races=False) as machine:
        found = step(mlp, x, offs, probs)
    # FC1 with its activation, FC2; FC2's input gradient with the activation's and its result again, the sums for the
    # gradient of the probabilities, FC1's input gradient; two weight gradients.
    assert len(machine.launches) == 7
    kernels = " ".join(launch.kernel for launch in machine.launches)
    assert kernels.count("GemmActivationKernel") == kernels.count("GemmDactivationKernel") == 1
    for ours, cpu in zip(found, near, strict=True):
        assert ours.isfinite().all()
        # What the products round to bfloat16 between them may differ by its last bit.
        assert (ours.float() - cpu.float()).norm() <= 2.0**-7 * cpu.float().norm()
