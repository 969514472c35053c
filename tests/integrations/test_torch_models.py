"""Models that call ATen's grouped products, unchanged: transformers' experts and a module as torchtitan writes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu

from tests.integrations.test_torch import Refusing
from tests.integrations.test_torch_compile import Graphs
from tests.memory import new_memory_is_nan
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


# --- what users report of torch's product -----------------------------------------------------------------------------


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every allocation holds NaN, as memory does that a step before has used."""
    with new_memory_is_nan():
        assert torch.empty(3).isnan().all()
        yield


class ShardOfExperts(nn.Module):
    """A router and the experts of one rank, which others' choices pass as one number too many, with a weight of 0.

    Nothing masks their rows, which are sorted behind the last group.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(2 * EXPERTS, HIDDEN))
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INTER, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTER) / 4)

    def forward(self, x: Tensor, way: str) -> Tensor:
        weights, chosen = torch.softmax(x @ self.router.T, -1).topk(TOP_K)
        ours = chosen < EXPERTS
        assert 0 < int(ours.sum()) < ours.numel()
        return self.experts(x, chosen.where(ours, EXPERTS), weights.masked_fill(~ours, 0.0), way)

    def experts(self, x: Tensor, chosen: Tensor, weights: Tensor, way: str) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS + 1)[:EXPERTS]
        rows = x[order // TOP_K]
        y = getattr(self, way)(rows, counts) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // TOP_K, y)

    def by_product(self, rows: Tensor, counts: Tensor) -> Tensor:
        offs = counts.cumsum(0, dtype=torch.int32)
        gate, up = grouped_mm(rows, self.gate_up.transpose(1, 2), offs=offs).chunk(2, -1)
        return grouped_mm(silu(gate) * up, self.down.transpose(1, 2), offs=offs)

    def by_expert(self, rows: Tensor, counts: Tensor) -> Tensor:
        *parts, tail = rows.split([*counts.tolist(), len(rows) - int(counts.sum())])
        made = []
        for part, gate_up, down in zip(parts, self.gate_up, self.down):
            gate, up = (part @ gate_up.T).chunk(2, -1)
            made.append((silu(gate) * up) @ down.T)
        return torch.cat([*made, torch.zeros_like(tail)])


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Every tensor within 64 roundings of float32 of the largest element, and finite."""
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=float(2**-18 * theirs.detach().abs().max()))


def trained(way: str, steps: int = 3) -> list[Tensor]:
    """Return the losses of training steps, and the parameters after them."""
    torch.manual_seed(0)
    model, x, target = ShardOfExperts(), torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(steps):
        loss = (model(x, way) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def test_a_second_step_on_used_memory(ours, poisoned):
    """NaN from the second backward on, by rows past ``offs[-1]``: pytorch #193633, transformers #48205."""
    close(trained("by_product"), trained("by_expert"))


def test_rows_behind_the_groups_are_zeros(ours, poisoned):
    """Rows of results and of gradients, whatever stands there in an operand: pytorch #154557."""
    rows = torch.randn(TOKENS, HIDDEN)
    rows[8:] = torch.nan
    rows.requires_grad_()
    y = grouped_mm(rows, torch.randn(EXPERTS, HIDDEN, INTER), offs=torch.tensor([3, 3, 4, 4, 8, 8], dtype=torch.int32))
    dy = torch.randn(TOKENS, INTER)
    dy[8:] = torch.nan
    (dx,) = torch.autograd.grad(y, rows, dy)
    assert not y[8:].any()
    assert not dx[8:].any()
    scattered = torch.zeros(4, INTER).index_add(0, torch.arange(TOKENS) % 4, y)
    assert torch.isfinite(scattered).all()


@pytest.mark.parametrize("compiled", [False, True])
def test_choices_of_other_ranks_have_no_gradient(ours, poisoned, compiled):
    """Their weight of 0 times garbage was NaN (transformers #45621), and garbage times a gradient was their weight's
    gradient (#48687, #48689)."""
    model, x = ShardOfExperts(), torch.randn(TOKENS, HIDDEN)
    chosen = torch.rand(TOKENS, EXPERTS + 2).topk(TOP_K).indices.clamp(max=EXPERTS)
    weights = torch.rand(TOKENS, TOP_K).masked_fill(chosen == EXPERTS, 0.0).requires_grad_()
    run = torch.compile(model.experts, backend="aot_eager", fullgraph=True) if compiled else model.experts
    both = run(x, chosen, weights, "by_product"), model.experts(x, chosen, weights, "by_expert")
    found, wanted = ([y, *torch.autograd.grad(y.sum(), [weights, model.down])] for y in both)
    close(found, wanted)
    assert not found[1][chosen == EXPERTS].any()
    assert found[1][chosen < EXPERTS].all()


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
    """For dtypes except bfloat16 they call an op that loops, which is served as well."""
    experts = make(MixtralExperts, _experts_implementation="grouped_mm").to(dtype)
    x, index, weights, _ = inputs(dtype=dtype)
    graphs = Graphs()
    out = torch.compile(experts, backend=graphs, fullgraph=True)(x, index, weights)
    targets = [str(node.target) for graph in graphs.made for node in graph.graph.nodes]
    assert targets.count("tgl.grouped_gemm.default") == 2
    assert not any("transformers" in t for t in targets)
    assert torch.equal(out, experts(x, index, weights))


def test_choices_of_no_expert_leave_no_garbage(ours):
    """Dropped slots are sorted after the last group, where ATen's kernel writes nothing."""
    experts = make(MixtralExperts).double()
    x, index, weights, dy = inputs(dtype=torch.float64)
    skipping = x, index.masked_fill(index == 3, EXPERTS), weights, dy
    found, wanted = (run(experts, how, skipping) for how in ("grouped_mm", "eager"))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=float(2**-40 * theirs.abs().max()))
