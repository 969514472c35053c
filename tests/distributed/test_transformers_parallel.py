"""Expert parallelism of transformers' experts, as its plans install it, against ``experts_forward`` on one rank."""

from __future__ import annotations

import builtins
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tgl.integrations import transformers_parallel
from tgl.integrations.transformers import experts_forward

pytest.importorskip("transformers.distributed.expert_parallel")

from tests.integrations import test_transformers as models

E, TOP_K, TOKENS = 8, 2, 7  # of a batch: two ranks cannot share it evenly
COUNTS = {name: E for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")}
CLASSES = ("mixtral.MixtralExperts", "gpt_oss.GptOssExperts", "inkling2.Inkling2Experts")


class Parent(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def chosen(tokens: int) -> Tensor:
    return torch.rand(tokens, E).topk(TOP_K).indices


def parallel(experts: nn.Module, batches: int) -> nn.Module:
    """The experts as a plan for all ranks leaves them, which hold ``batches`` batches."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    world = dist.get_world_size()
    ep_mesh = init_device_mesh("cpu", (world,))
    tp_mesh = init_device_mesh("cpu", (batches, world // batches), mesh_dim_names=("dp", "tp"))["tp"]
    parent = Parent(experts)
    plan = {f"experts.{name}": "grouped_gemm" for name, _ in experts.named_parameters()}
    apply_expert_parallelism(parent, ep_mesh, tp_mesh, {**plan, "experts": "ep_dispatch_experts"}, "tgl")
    return parent.experts


def check(path: str, batches: int, invariant: bool) -> None:
    transformers_parallel.register(max_tokens=TOKENS, capacity_factor=None, invariant=invariant)
    reference = models.make(models.FOUND[path], **COUNTS).double()
    ours = parallel(copy.deepcopy(reference), batches)
    x = torch.randn(batches, TOKENS, models.HIDDEN).double().requires_grad_()
    weights = torch.rand(batches, TOKENS, TOP_K).double().requires_grad_()
    index, dy = chosen(batches * TOKENS).view(batches, TOKENS, TOP_K), torch.randn_like(x)

    flat = [t.flatten(0, 1) for t in (x, index, weights)]
    expected = experts_forward(reference, *flat)
    leaves = [x, weights, *reference.parameters()]
    wanted = torch.autograd.grad(expected, leaves, dy.flatten(0, 1))
    batch = dist.get_rank() * batches // dist.get_world_size()
    own_x, own_weights = (t.detach()[batch].requires_grad_() for t in (x, weights))
    for _ in range(2):  # the second call finds what the first has made
        y = ours(own_x, index[batch], own_weights)
        torch.testing.assert_close(y, expected.view_as(x)[batch], rtol=0, atol=1e-11)
        grads = torch.autograd.grad(y, [own_x, own_weights, *ours.parameters()], dy[batch])
        for actual, gradient in zip(grads[:2], wanted[:2], strict=True):
            torch.testing.assert_close(actual, gradient[batch], rtol=0, atol=1e-11)
        for actual, gradient in zip(grads[2:], wanted[2:], strict=True):
            assert isinstance(actual, DTensor)
            torch.testing.assert_close(actual.full_tensor(), gradient, rtol=0, atol=1e-11)
    ours.exchange.check()


@pytest.mark.parametrize("path", CLASSES)
def test_ranks_with_different_batches(ranks, path):
    for invariant in (False, True):
        ranks(check, path, 2, invariant)


def test_ranks_that_share_a_batch(ranks, four_ranks):
    ranks(check, CLASSES[0], 1, False)
    four_ranks(check, CLASSES[0], 2, False)


def check_cold(path: str, batches: int, dynamic: bool | None) -> None:
    """Nothing has been made before the call that is traced, and its graph serves every routing."""
    transformers_parallel.register(max_tokens=TOKENS, capacity_factor=None)
    experts = parallel(models.make(models.FOUND[path], **COUNTS).double(), batches)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(experts, fullgraph=True, backend=counter, dynamic=dynamic)
    for seed in range(2):
        torch.manual_seed(seed * batches + dist.get_rank() * batches // dist.get_world_size())
        x, index = torch.randn(TOKENS, models.HIDDEN).double(), chosen(TOKENS)
        weights = torch.rand(TOKENS, TOP_K).double()
        results = []
        for model in (compiled, experts):
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            y = model(leaves[0], index, leaves[1])
            results.append((y, *torch.autograd.grad(y.sin().sum(), [*leaves, *experts.parameters()])))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert counter.frame_count == 1
    experts.exchange.check()


MIXTRAL, GPT_OSS, INKLING = CLASSES
COLD = [
    (MIXTRAL, 1, None),
    (GPT_OSS, 2, True),
    pytest.param(MIXTRAL, 2, None, marks=pytest.mark.slow),
    pytest.param(INKLING, 1, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("path", "batches", "dynamic"), COLD)
def test_a_first_call_that_is_compiled(ranks, path, batches, dynamic):
    ranks(check_cold, path, batches, dynamic)


def check_overflow() -> None:
    """Overflow with a gate of the model's own, which is computed on rows."""
    for path in CLASSES:
        transformers_parallel.register(max_tokens=TOKENS, capacity_factor=0.6)
        experts = parallel(models.make(models.FOUND[path], **COUNTS), 2)
        x, weights = torch.randn(TOKENS, models.HIDDEN, requires_grad=True), torch.rand(TOKENS, TOP_K)
        y = experts(x, torch.zeros(TOKENS, TOP_K, dtype=torch.int64), weights)
        grads = torch.autograd.grad(y.sum(), [x, *experts.parameters()])
        assert all(bool(t.isnan().all()) for t in (y, *(g.to_local() if isinstance(g, DTensor) else g for g in grads)))
        with pytest.raises(RuntimeError, match=f"{type(experts).__name__}: 28 rows of experts were needed, but there"):
            experts(x, chosen(TOKENS), weights)


def test_overflow(ranks):
    ranks(check_overflow)


def check_engine() -> None:
    """A group on CPUs has no symmetric memory: all ranks raise, and the next call works."""
    transformers_parallel.register(max_tokens=TOKENS, capacity_factor=None, engine="symmetric_memory")
    experts = parallel(models.make(models.FOUND[CLASSES[0]], **COUNTS), 2)
    call = torch.randn(TOKENS, models.HIDDEN), chosen(TOKENS), torch.rand(TOKENS, TOP_K)
    with pytest.raises(RuntimeError, match="MixtralExperts: `engine='symmetric_memory'` is not available: rank 0: it"):
        experts(*call)
    assert not hasattr(experts, "exchange")


def test_a_missing_engine_is_an_error(ranks):
    ranks(check_engine)
    with pytest.raises(ValueError, match="`engine` must be one of 'all_to_all', 'symmetric_memory', but got 'nvshmem'"):
        transformers_parallel.register(max_tokens=1, engine="nvshmem")


def test_unsupported_wire_formats_are_errors():
    with pytest.raises(ValueError, match=r"`wire` must be 'dense', as experts .*, but got 'quantized'"):
        transformers_parallel.register(max_tokens=1, wire="quantized")
    with pytest.raises(ValueError, match=r"`wire_dtype` must be None, as experts .*, but got torch\.float32"):
        transformers_parallel.register(max_tokens=1, wire_dtype=torch.float32)
    with pytest.raises(TypeError, match=r"register\(\) got an unexpected keyword argument 'wires'"):
        transformers_parallel.register(max_tokens=1, wires="dense")


def test_an_older_transformers_is_named(monkeypatch):
    found = builtins.__import__

    def older(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers.distributed.expert_parallel":
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", older)
    with pytest.raises(ImportError, match=r"transformers_parallel needs transformers 5\.23 or later"):
        transformers_parallel.register(max_tokens=1)
