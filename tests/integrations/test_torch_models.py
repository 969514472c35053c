"""Models that call ATen's grouped products, unchanged: transformers' experts and a module as torchtitan writes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

from tests.integrations.test_torch import Refusing
from tests.integrations.test_torch_compile import Graphs
from tgl.integrations import torch as integration

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 6, 16, 24, 2, 20


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enabled for the CPU, and ATen's own kernel refuses."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.library, "get_kernel", lambda *_: Refusing())
        integration.enable(["cpu"])
    yield
    integration.disable()


class GroupedExperts(nn.Module):
    """Rows sorted by expert and padded, counts of rows, weights ``[G, out, in]``, three products in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, INTER, HIDDEN) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTER) / 4)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, INTER, HIDDEN) / 4)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate = grouped_mm(x.bfloat16(), self.w1.bfloat16().transpose(-2, -1), offs=offs)
        up = grouped_mm(x.bfloat16(), self.w3.bfloat16().transpose(-2, -1), offs=offs)
        return grouped_mm(silu(gate) * up, self.w2.bfloat16().transpose(-2, -1), offs=offs).type_as(x)

    def by_experts(self, x: Tensor, counts: Tensor) -> Tensor:
        """A loop over the experts, with the roundings to bfloat16 of ``forward``."""
        rows = x.bfloat16().split([*counts.tolist(), len(x) - int(counts.sum())])
        made = []
        for w1, w2, w3, y in zip(self.w1.bfloat16(), self.w2.bfloat16(), self.w3.bfloat16(), rows):
            made.append((silu(y @ w1.T) * (y @ w3.T)) @ w2.T)
        return torch.cat([*made, torch.zeros_like(rows[-1])]).type_as(x)


def gradients(module: nn.Module, out: Tensor, x: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, [x, *module.parameters()], torch.ones_like(out) / 8)]


@pytest.mark.parametrize("compiled", [False, True])
def test_torchtitans_experts(ours, compiled):
    experts = GroupedExperts()
    counts = torch.tensor([3, 0, 8, 1, 5, 2])
    x = torch.randn(TOKENS + 4, HIDDEN)
    x[TOKENS - 1 :] = torch.nan
    x.requires_grad_()
    run = torch.compile(experts, backend="aot_eager", fullgraph=True) if compiled else experts
    found = gradients(experts, run(x, counts), x)
    wanted = gradients(experts, experts.by_experts(x, counts), x)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=float(2**-8 * theirs.abs().max()))


transformers = pytest.importorskip("transformers")

from tests.integrations.test_transformers import GptOssExperts, MixtralExperts, inputs, make, run  # noqa: E402

CLASSES = [cls for cls in (MixtralExperts, GptOssExperts) if hasattr(cls, "_apply_gate")]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_experts_of_transformers(ours, cls):
    """Their ``grouped_mm`` against their own loop over experts, in float64."""
    experts = make(cls).double()
    x, index, weights, dy = inputs(dtype=torch.float64)
    found, wanted = (run(experts, how, (x, index, weights, dy)) for how in ("grouped_mm", "eager"))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=float(2**-40 * theirs.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_experts_of_transformers(ours, dtype):
    """Of other dtypes than bfloat16 they make an op that loops; that one is served as well."""
    experts = make(MixtralExperts, _experts_implementation="grouped_mm").to(dtype)
    x, index, weights, _ = inputs(dtype=dtype)
    graphs = Graphs()
    out = torch.compile(experts, backend=graphs, fullgraph=True)(x, index, weights)
    targets = [str(node.target) for graph in graphs.made for node in graph.graph.nodes]
    assert targets.count("tgl.grouped_gemm.default") == 2
    assert not any("transformers" in t for t in targets)
    assert torch.equal(out, experts(x, index, weights))


def test_choices_of_no_expert_leave_no_garbage(ours):
    """Their rows are sorted behind the last group, where ATen's kernel writes nothing."""
    experts = make(MixtralExperts).double()
    x, index, weights, dy = inputs(dtype=torch.float64)
    skipping = x, index.masked_fill(index == 3, EXPERTS), weights, dy
    found, wanted = (run(experts, how, skipping) for how in ("grouped_mm", "eager"))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=float(2**-40 * theirs.abs().max()))
