"""Every activation of the table in every kernel that computes one: the bits of its own kernel, and no spill."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.activation_cases import PARAMS, back_to_hidden
from tests.cutlass_kernels import sass
from tests.memory import same_bytes
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.specs import TensorSpec
from tgl.testing import emulate

BF16 = torch.bfloat16
OFFS = (0, 70, 131)
TAIL, DEPTH, COLUMNS = 5, 72, 136
MXFP8 = {"format": "mxfp8", "scale_layout": "blocked"}
KINDS = [name for name, params in PARAMS.items() if not params.interleaved]
ARCHS = ("sm_90a", "sm_100a")


@pytest.fixture
def kernels(monkeypatch):
    """The kernels that a test compiles, and with them what the assembler made of them."""
    compile, compiled = launcher.compiled, []
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    monkeypatch.setattr(launcher, "compiled", lambda *args: compiled.append(compile(*args)) or compiled[-1])
    yield compiled
    for kernel in compiled:
        report = sass.inspect(kernel.artifacts.CUBIN)
        assert report.spills == report.frame == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", KINDS)
def test_fused_with_gemms_and_quantised(kernels, name, arch):
    """FC1 with the activation behind it, FC2's input gradient back through it (and its result again), and quantised."""
    torch.manual_seed(0)
    params, rows = PARAMS[name], OFFS[-1] + TAIL
    width = params.activation.width(COLUMNS)
    a, b1 = torch.randn(rows, DEPTH).to(BF16), torch.randn(len(OFFS), width, DEPTH).to(BF16).transpose(1, 2)
    dy, b2 = torch.randn(rows, DEPTH).to(BF16), torch.randn(len(OFFS), COLUMNS, DEPTH).to(BF16).transpose(1, 2)
    offs, probs, options = torch.tensor(OFFS, dtype=torch.int32), torch.rand(rows), params._asdict()
    with emulate(arch, detect_races=False) as machine:
        y, h = tgl.grouped_gemm_activation(a, b1, offs, None, probs, **options)
        assert len(machine.launches) == 1
        inner = TensorSpec((rows, COLUMNS), BF16, dy.device)
        dh, dprobs, act = back_to_hidden([dy, b2, h, offs, probs], inner, params=params)
        assert len(machine.launches) == 3  # the last one adds up sums for dprobs
        quantised = tgl.grouped_activation_quantize(h, offs, probs, **MXFP8, **options)
        da = tgl.grouped_gemm(dy, b2, offs)
        wanted = tgl.grouped_activation(h, offs, probs, **options)
        wanted_dh, wanted_dprobs = torch.ops.tgl.grouped_activation_backward(da, h, offs, probs, **options)
    for result in (y, act):
        assert torch.equal(result, wanted)
    assert torch.equal(dh, wanted_dh)
    summands = (da.double() * params.value(*params.halves(h.double())))[: OFFS[-1]].abs().sum(1)
    assert ((dprobs - wanted_dprobs)[: OFFS[-1]].abs() <= 2.0**-24 * (8 + COLUMNS / 32) * summands).all()
    assert all(map(same_bytes, quantised, tgl.group_quantize(wanted, offs, **MXFP8)))
    assert len(kernels) >= 5
