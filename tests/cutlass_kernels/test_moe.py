"""``tgl.moe`` where kernels serve it: which GEMMs it launches, and results near those of a CPU, or equal to them."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests import moe_cases
from tests.chips import parameters
from tests.memory import new_memory_is_nan
from tgl import backends
from tgl.backends.composite import moe
from tgl.cutlass_kernels.archs import ARCHS, chips
from tgl.meta.specs import TensorSpec
from tgl.testing import emulate

G, S, K, H, I = 3, 80, 2, 64, 64


def step(routing: tgl.Routing, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and all gradients."""
    x, weights, w1, w2 = tensors
    y = tgl.moe(x, routing, weights, w1.transpose(1, 2), w2.transpose(1, 2))
    return [y.detach(), *torch.autograd.grad(y, tensors, torch.ones_like(y))]


@pytest.mark.slow
@pytest.mark.parametrize("chip", chips())
def test_kernels_serve_every_part(chip):
    torch.manual_seed(0)
    tensors = [torch.randn(size).bfloat16() for size in ((S, H), (S, K), (G, 2 * I, H), (G, H, I))]
    tensors = [t.mul_(t.shape[-1] ** -0.5 if t.dim() == 3 else 1).requires_grad_() for t in tensors]
    chosen = torch.randint(0, G + 1, (S, K))  # some are no expert's
    routing = tgl.route(chosen, G)
    near = step(routing, tensors)
    with emulate(chip, detect_races=False) as machine:
        found = step(routing, tensors)
    kernels = [launch.kernel for launch in machine.launches]
    assert sum("Gemm" in kernel for kernel in kernels) == 2 + 4
    assert not any("ActivationKernel" in kernel and "Gemm" not in kernel for kernel in kernels)
    assert " ".join(kernels).count("GemmActivationKernel") == " ".join(kernels).count("GemmDactivationKernel") == 1
    for ours, cpu in zip(found, near, strict=True):
        assert ours.isfinite().all()
        # What the products round to bfloat16 between them may differ by its last bit.
        assert (ours.float() - cpu.float()).norm() <= 2.0**-7 * cpu.float().norm()


@pytest.mark.parametrize("chip", chips())
def test_a_kernel_is_named_for_every_part(chip):
    x, w1, w2 = (torch.zeros(size).bfloat16() for size in ((S, H), (G, H, 2 * I), (G, I, H)))
    routing = tgl.route(torch.randint(0, G, (S, K)), G)
    with backends.compile_only(chip):
        places = routing.source, routing.position, routing.token, routing.offs
        parts = tgl.explain("moe", x, w1, w2, *places, top_k=K).parts
    assert [part.op for part in parts][-3:] == ["grouped_gemm_activation", "grouped_gemm", "combine"]
    assert {part.chosen.name for part in parts} == {"tgl kernel"}


@pytest.mark.parametrize("few", [False, True])
def test_tokens_of_few_rows_are_read_in_place(few, monkeypatch):
    """Tokens of few rows are gathered at any width, as the first product reads mostly weights."""
    monkeypatch.setattr(moe, "FIRST", 0)
    monkeypatch.setattr(moe, "FEW_ROWS", 24 if few else 23)
    x, weights, w1, w2 = (torch.randn(size).bfloat16() for size in ((36, H), (36, K), (G, 2 * I, H), (G, H, I)))
    with emulate("sm_90a", detect_races=False) as machine:
        tgl.moe(x, torch.tensor([[0, 1]] * 36), weights, w1.transpose(1, 2), w2.transpose(1, 2))
    kernels = " ".join(launch.kernel for launch in machine.launches)
    assert ("GatherGemmActivationKernel" in kernels) == few
    assert len(machine.launches) == (5 if few else 6)


@pytest.mark.parametrize("few", [False, True], ids=["copied", "by an index"])
def test_no_gradient_and_nothing_kept(few, monkeypatch):
    """Without a gradient the pre-activation is never written, whether tokens are copied or gathered."""
    monkeypatch.setattr(moe, "FIRST", 0)
    monkeypatch.setattr(moe, "FEW_ROWS", 24 if few else 23)
    tensors = [torch.randn(size).bfloat16() for size in ((36, H), (36, K), (G, 2 * I, H), (G, H, I))]
    x, weights, w1, w2 = tensors
    allocated, empty = [], TensorSpec.empty
    monkeypatch.setattr(TensorSpec, "empty", lambda spec: allocated.append(tuple(spec.shape)) or empty(spec))
    found = []
    for kept in (False, True):
        allocated.clear()
        w2.requires_grad_(kept)
        with emulate("sm_90a") as machine:
            y = tgl.moe(x, torch.tensor([[0, 1]] * 36), weights, w1.transpose(1, 2), w2.transpose(1, 2))
        found.append(y.detach())
        assert ((36 * K, 2 * I) in allocated) == kept
        assert sum("GemmActivationKernel" in launch.kernel for launch in machine.launches) == 1
    assert torch.equal(*found)


def integers_agree(arch: str, kind: str, biased: bool) -> list[str]:
    """Forward and every gradient have the CPU's bits, by kernels without a race; the kernels."""
    operands = moe_cases.block(moe_cases.Sizes(G, 24, K, H, I), kind, biased)
    expected = moe_cases.expected(operands, kind)
    with new_memory_is_nan(), emulate(ARCHS[arch].target) as machine:
        found = moe_cases.step(operands, kind)
    for name, wanted in expected.items():
        assert torch.equal(found[name], wanted), name
    kernels = [launch.kernel for launch in machine.launches]
    assert sum("Gemm" in kernel for kernel in kernels) == 2 + 4
    return kernels


@pytest.mark.parametrize("arch", parameters())
def test_integers_have_the_bits_of_a_cpu(arch):
    """The activation that takes the least time to compile; all are slow."""
    kernels = integers_agree(arch, "relu", biased=False)
    assert "GatherGemm" in " ".join(kernels)


def test_nothing_is_written_past_the_last_experts_rows():
    """New memory is NaN, and still is there behind both kernels with an activation, the copies and the products."""
    kind = "relu"
    given = moe_cases.block(moe_cases.Sizes(G, 24, K, H, I), kind, biased=False)
    x, weights, w1, w2, dy = (given[name] for name in ("x", "weights", "w1", "w2", "dy"))
    routing = tgl.route(given["chosen"], G, K * 24 + moe_cases.ROOM)
    places, used = (routing.source, routing.position, routing.token, routing.offs), int(routing.offs[-1])
    with new_memory_is_nan(), emulate("sm_90a", detect_races=False):
        _, h = torch.ops.tgl.moe(x, w1.transpose(1, 2), w2, *places, weights, top_k=K, kind=kind)
        options = {"top_k": K, "kind": kind, "output_mask": [True] * 4}
        dh, *_ = torch.ops.tgl.moe_backward_hidden(dy, w2, *places, h, weights, **options)
    for t in (h, dh):
        assert t[:used].isfinite().all()
        assert t[used:].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", moe_cases.KINDS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_integers_of_every_kind(arch, kind, biased, copies, monkeypatch):
    """Tokens read by an index, or as wide experts read many: in a copy."""
    for bound in moe_cases.BOUNDS if copies else ():
        monkeypatch.setattr(moe, bound, 0)
    kernels = integers_agree(arch, kind, biased)
    assert ("GatherGemm" in " ".join(kernels)) != copies
