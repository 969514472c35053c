"""ATen's grouped products, served by kernels in the emulator."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.kernel_cases import ends, gradient, integers, product
from tests.row_scaled_cases import of_columns, of_rows
from tgl.cutlass_kernels.archs import ARCHS
from tgl.integrations import torch as integration
from tgl.testing import emulate

SIZES, ROWS = (40, 0, 9), 56


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_100", marks=pytest.mark.slow)])
def test_kernels_serve_a_training_step(arch):
    a, b = integers(ROWS, 64), integers(len(SIZES), 64, 96)
    a[sum(SIZES) :] = torch.nan
    a, b, offs = a.requires_grad_(), b.requires_grad_(), ends(SIZES)
    dy = integers(ROWS, 96)
    with emulate(ARCHS[arch].target, detect_races=False) as machine, integration.enabled("cpu"):
        explained = str(tgl.explain(torch.ops.aten._grouped_mm, a, b, offs))
        tgl.warmup(torch.ops.aten._grouped_mm, a, b, offs)
        machine.launches.clear()  # what loading a kernel takes
        out = torch.nn.functional.grouped_mm(a, b, offs=offs)
        out.backward(dy)
    assert "runs tgl::grouped_gemm" in explained
    assert sum("Gemm" in launch.kernel for launch in machine.launches) == len(machine.launches) == 3
    assert torch.equal(out, product(a, b, SIZES).bfloat16())
    assert torch.equal(a.grad, product(dy, b.transpose(1, 2), SIZES).bfloat16())
    assert torch.equal(b.grad, gradient(a, dy, SIZES).bfloat16())


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_100", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [of_rows, of_columns])
def test_kernels_serve_scaled_products(make, arch):
    """Scaled products are computed in place, in one launch."""
    problem = make(SIZES, 64, 96, ROWS + 8 - sum(SIZES))
    a, a_scale, b, b_scale, offs = problem.operands
    given = a, b.transpose(-2, -1), *((a_scale, b_scale) if make is of_rows else (a_scale.flatten(), b_scale.flatten()))
    row_wise = [torch.nn.functional.ScalingType.RowWise] * 2
    with emulate(ARCHS[arch].target, detect_races=False) as machine, integration.enabled("cpu"):
        assert f"runs tgl::{problem.op}" in str(tgl.explain(torch.ops.aten._scaled_grouped_mm, *given, offs))
        out = torch.nn.functional.scaled_grouped_mm(*given[:3], row_wise[0], given[3], row_wise[1], offs=offs)
        assert ["ScaledGemm" in launch.kernel for launch in machine.launches] == [True]
    assert torch.equal(out, problem.wanted.bfloat16())
