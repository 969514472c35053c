"""A kernel of another package on the launcher: compiled for every architecture, and run on the emulator."""

import shutil
from pathlib import Path

import pytest
import torch

import tgl
from tests import chips
from tests.processes import run_script
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.runtime import launcher
from tgl.testing import emulate

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

EXAMPLE = Path(__file__).parents[2] / "examples" / "foreign_kernel.py"


@pytest.fixture(scope="module")
def mine():
    from examples import foreign_kernel

    return foreign_kernel


def operands(dtype=torch.bfloat16):
    x, scale = torch.randint(-3, 4, (10, 48)).to(dtype), torch.randint(-3, 4, (3, 48)).to(dtype)
    x[9] = float("nan")  # the tail is not read
    return x, scale, torch.tensor([4, 4, 9], dtype=torch.int32)


@pytest.mark.parametrize("arch", chips.parameters())
def test_a_launch_for_every_architecture(mine, arch, monkeypatch):
    args = operands()
    expected = torch.ops.mykernels.scale_groups(*args)
    with emulate(ARCHS[arch].target) as machine:
        assert tgl.explain(torch.ops.mykernels.scale_groups, *args).chosen.name == "a CuTe kernel"
        tgl.warmup(torch.ops.mykernels.scale_groups.default, *args)
        monkeypatch.setattr(launcher, "compiled", None)
        assert torch.equal(torch.ops.mykernels.scale_groups(*args), expected)
        assert torch.equal(torch.ops.mykernels.scale_groups(args[0][:7], *args[1:]), expected[:7])
        column_major = args[0].t().contiguous().t()
        assert tgl.explain("mykernels::scale_groups", column_major, *args[1:]).copies == (("x", 10 * 48 * 2),)
        assert torch.equal(torch.ops.mykernels.scale_groups(column_major, *args[1:]), expected)
        assert len(machine.launches) == 3


def test_a_warm_call_is_one_look_up(mine, monkeypatch):
    args = operands(torch.float32)
    with emulate("sm_90a"):
        expected = torch.ops.mykernels.scale_groups(*args)
        for method in ("reason", "plan"):
            monkeypatch.setattr(launcher.Launcher, method, None)
        assert torch.equal(torch.ops.mykernels.scale_groups(*args), expected)


def test_unsupported_calls_have_reasons(mine):
    args = operands(torch.float64)
    with backends.emulated_device("sm_90"):
        explanation = tgl.explain("mykernels::scale_groups", *args)
    assert explanation.chosen.name == "steps of aten"
    assert "takes float32, bfloat16 and float16, got torch.float64" in str(explanation)


def test_the_example_runs_as_it_is(tmp_path):
    status, printed = run_script(Path(shutil.copy(EXAMPLE, tmp_path)), {}, timeout=500)
    assert status == 0, printed
    assert "runs steps of aten" in printed
