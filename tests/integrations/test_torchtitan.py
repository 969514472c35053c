"""Models of torchtitan with their experts on the grouped ops; `make test-torchtitan` makes the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("torchtitan")

from torchtitan.config import CompileConfig, Configurable, OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import apply_overrides, derive
from torchtitan.distributed import ParallelDims, parallel_dims, utils
from torchtitan.distributed.compile import apply_compile
from torchtitan.models import gpt_oss, qwen3
from torchtitan.models.common import moe
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

import tgl
import tgl.integrations.torch as drop_in
from tests.distributed.conftest import Ranks
from tests.integrations.test_torch import Refusing
from tgl.integrations._torchtitan_experts import GroupedExperts
from tgl.integrations.torchtitan import converter, grouped_experts

PAGE = Path(__file__).parents[2] / "docs" / "torchtitan.md"
VOCABULARY, BATCH, LENGTH, EXPERTS = 64, 2, 16, 4

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported")


class FixedRouter(moe.TokenChoiceTopKRouter):
    """A router whose choices do not depend on roundings; one of the experts gets no token."""

    @dataclass(kw_only=True, slots=True)
    class Config(moe.TokenChoiceTopKRouter.Config):
        _debug_force_load_balance: bool = True

    def _debug_force_load_balance_routing(self, scores_BLE: Tensor) -> tuple[Tensor, Tensor]:
        position = torch.arange(scores_BLE.shape[:-1].numel()).view(scores_BLE.shape[:-1])
        index = torch.stack([position % 5 // 2, torch.full_like(position, EXPERTS - 1)], -1)
        return index, scores_BLE.gather(-1, index)


def config() -> Any:
    """Return a Qwen3-MoE of two layers by torchtitan's builder; its usual attention has no backward on a CPU."""
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=32,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        moe_hidden_dim=48,
        num_experts=EXPERTS,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=qwen3.CosSinRoPE.Config(dim=16, max_seq_len=64, theta=1e6),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.moe.router = derive(layer.moe.router, FixedRouter.Config, _debug_force_load_balance=True)
    embedding = qwen3.Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=32, param_init=qwen3._EMBEDDING_INIT)
    head = qwen3.Linear.Config(in_features=32, out_features=VOCABULARY, param_init=qwen3._LINEAR_INIT)
    return qwen3.Qwen3Model.Config(
        vocab_size=VOCABULARY, dim=32, norm=qwen3._qwen3_norm(32), tok_embeddings=embedding, lm_head=head, layers=layers
    )


def converted(recipe: str | None = None) -> Any:
    return converter(recipe).build().convert(config())


def build(config: Any) -> nn.Module:
    """Return the model; parameters are drawn wide enough that the experts contribute to every gradient."""
    torch.manual_seed(1)
    model = config.build()
    model.verify_module_protocol()
    return draw(model)


def draw(model: nn.Module) -> nn.Module:
    model.init_states()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, rank: int = 0) -> Tensor:
    tokens, labels = batch(step, rank)
    logits = model(tokens, positions=torch.arange(LENGTH).expand(BATCH, LENGTH))
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


class Step(NamedTuple):
    """The loss and the gradients of a training step, by the names of the parameters."""

    loss: Tensor
    gradients: dict[str, Tensor]


def train(model: nn.Module, steps: int = 3) -> list[Step]:
    optimizer, made = torch.optim.SGD(model.parameters(), lr=0.003), []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        made.append(Step(loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
        optimizer.step()
        optimizer.zero_grad()
    return made


def exactly(run: Callable[[], Any]) -> Any:
    """Run torchtitan's own experts in float32, without their conversions to bfloat16."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "bfloat16", lambda self: self)
        return run()


def errors(steps: list[Step], exact: list[Step]) -> list[dict[str, float]]:
    """Return each gradient's distance from the exact one, relative to its norm, and the loss' own."""
    made = []
    for step, other in zip(steps, exact, strict=True):
        assert step.gradients.keys() == other.gradients.keys()
        distances = {
            name: float((gradient - other.gradients[name]).norm() / other.gradients[name].norm())
            for name, gradient in step.gradients.items()
        }
        made.append({"loss": float((step.loss - other.loss).abs() / other.loss), **distances})
    return made


def assert_as_exact(steps: list[Step], own: list[Step], exact: list[Step]) -> None:
    """Assert that no gradient is further from the exact one than twice torchtitan's own in bfloat16 is."""
    for step, (mine, theirs) in enumerate(zip(errors(steps, exact), errors(own, exact), strict=True)):
        assert max(theirs.values()) < 2**-5
        # The loss is a sum in float32, in which roundings of the layers cancel out by chance.
        assert mine.pop("loss") < 2**-10 > theirs.pop("loss")
        assert not {name: (step, error, theirs[name]) for name, error in mine.items() if error > 2 * theirs[name]}


@pytest.fixture(scope="module")
def exact() -> list[Step]:
    return exactly(lambda: train(build(config())))


@pytest.fixture(scope="module")
def own() -> list[Step]:
    return train(build(config()))


@pytest.fixture
def compiler() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        yield
    torch._dynamo.reset()


@contextmanager
def served_by_ours() -> Iterator[None]:
    """Enable the drop-in on the CPU, where no call may be left to ATen's own kernel."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.library, "get_kernel", lambda *_: Refusing())
        drop_in.enable(["cpu"])
        try:
            yield
        finally:
            drop_in.disable()


def compile_blocks(model: nn.Module) -> nn.Module:
    """Compile every block as torchtitan does, as one graph."""
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
    apply_compile(model, compile_config=CompileConfig(enable=True, backend="aot_eager"), parallel_dims=dims)
    return model


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("implementation", ["drop-in", "converter"])
def test_training(implementation: str, compiled: bool, own: list[Step], exact: list[Step]) -> None:
    model = build(config() if implementation == "drop-in" else converted())
    with served_by_ours() if implementation == "drop-in" else nullcontext():
        steps = train(compile_blocks(model) if compiled else model)
    assert_as_exact(steps, own, exact)


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_block", "fp8_current"])
def test_experts_have_the_bits_of_grouped_mlp(recipe: str | None) -> None:
    experts = build(converted(recipe)).layers["0"].moe.routed_experts.inner_experts
    layer = tgl.GroupedMLP(EXPERTS, 32, 48, dtype=torch.bfloat16, recipe=recipe)
    w1, w2, w3 = (w.detach().bfloat16() for w in experts.parameters())
    layer.load_state_dict({"fc1.weight": torch.cat([w1, w3], 1), "fc2.weight": w2}, strict=False)
    x, counts, dy = torch.randn(12, 32), torch.tensor([3, 0, 6, 1]), torch.randn(12, 32)
    results = []
    for module, dtype in ((experts, torch.float32), (layer, torch.bfloat16)):
        rows = x.to(dtype, copy=True).requires_grad_()
        y = module(rows, counts)
        y.backward(dy.to(dtype))
        results.append([y.detach(), rows.grad, *(p.grad for p in module.parameters())])
    y, dx, dw1, dw2, dw3 = results[0]
    assert not y[10:].any()
    for mine, expected in zip((y, dx, torch.cat([dw1, dw3], 1), dw2), results[1], strict=True):
        assert torch.equal(mine, expected.float())


def test_override_of_a_run() -> None:
    """``--override.imports`` changes the config of a trainer, for all layers and for the recipe's."""
    run = Run.Config(model=config())
    target = f"{grouped_experts.__module__}.{grouped_experts.__name__}"
    assert len(apply_overrides(OverrideConfig(imports=[(target, {"recipe": "mxfp8"})]), run)) == 2
    experts = [layer.moe.routed_experts.inner_experts for layer in build(run.model).layers.values()]
    assert [(type(e), e.recipe) for e in experts] == [(GroupedExperts, "mxfp8")] * 2


class Run(Configurable):
    """As much of a trainer as its config, which overrides are applied to."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        model: Any


def test_layers_are_converted_by_name() -> None:
    model = converter(fqns=["layers.1."]).build().convert(config())
    experts = [layer.moe.routed_experts.inner_experts for layer in model.layers]
    assert [type(e) for e in experts] == [moe.GroupedExperts.Config, GroupedExperts.Config]


def test_state_dict_is_torchtitans() -> None:
    state = build(config()).state_dict()
    model = build(converted())
    assert [(name, t.shape, t.dtype) for name, t in model.state_dict().items()] == [
        (name, t.shape, t.dtype) for name, t in state.items()
    ]
    drawn = config().build()
    drawn.init_states()
    model.load_state_dict(drawn.state_dict())
    exact_loss = exactly(lambda: loss_of(drawn, 0))
    torch.testing.assert_close(loss_of(model, 0), exact_loss, rtol=2**-10, atol=0)


def test_example_of_the_page() -> None:
    namespace: dict[str, Any] = {}
    exec(PAGE.read_text().split("```python\n")[1].split("```")[0], namespace)
    experts = [layer.moe.routed_experts.inner_experts for layer in namespace["spec"].model.layers]
    assert {type(e) for e in experts} == {GroupedExperts.Config}


def test_concatenated_weights_are_not_saved() -> None:
    """Eagerly: FSDP frees the gate and up weights after the forward, and nothing keeps a copy of them."""
    experts = build(converted()).layers["0"].moe.routed_experts.inner_experts
    x, counts = torch.randn(10, 32, requires_grad=True), torch.tensor([3, 0, 6, 1])
    made, cat = [], torch.cat
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "cat", lambda *args: made.append(cat(*args)) or made[-1])
        y = experts(x, counts)
        (kept,) = (StorageWeakRef(t.untyped_storage()) for t in made)
        made.clear()
    assert kept.expired()
    y.sum().backward()
    assert experts.w1_EFD.grad.any()
    assert experts.w3_EFD.grad.any()


def test_mistakes() -> None:
    for recipe in ("fp8_delayed", "nvfp4"):
        with pytest.raises(ValueError, match=f"`recipe` must be one of mxfp8, .* or None .*, but got '{recipe}'"):
            converted(recipe)
    with pytest.raises(ValueError, match="mxfp8"):
        converted("mxfp9")
    with pytest.raises(
        ValueError, match=r"`model_config` must have GroupedExperts under names .*, but Qwen3Model.Config"
    ):
        converter(fqns=["layers.7."]).build().convert(config())
    with pytest.raises(TypeError, match=r"got torchtitan.models.gpt_oss.moe.GptOssGroupedExperts.Config"):
        converter().build().convert(gpt_oss.model_registry("debugmodel").model)
    with pytest.raises(TypeError, match=r"got tgl.integrations._torchtitan_experts.GroupedExperts.Config"):
        converter().build().convert(converted())


# --- FSDP2 and expert parallelism -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    workers = Ranks(4)
    yield workers
    workers.stop()


def test_fsdp_and_expert_parallelism(four_ranks: Ranks) -> None:
    """Four ranks: FSDP2 over all of them, and experts over two, sharded by FSDP2 over the other two."""
    four_ranks(check_parallel)


def check_parallel() -> None:
    rank = torch.distributed.get_rank()

    def step(model: nn.Module, ranks: range) -> Step:
        losses = []
        for one in ranks:
            losses.append(loss_of(model, 0, one))
            losses[-1].backward()
        gradients = {name: full(p.grad) for name, p in model.named_parameters()}
        model.zero_grad()
        return Step(torch.stack(losses).sum().detach(), gradients)

    for make, context in ((config, served_by_ours), (converted, nullcontext)):
        model = parallelize(make())
        whole = build(config())
        assert model.state_dict().keys() == whole.state_dict().keys()
        with torch.no_grad():
            for parameter, sharded in zip(whole.parameters(), model.parameters(), strict=True):
                parameter.copy_(full(sharded))
        exact, own = exactly(lambda: step(whole, range(4))), step(whole, range(4))  # noqa: B023
        with context():
            found = step(model, range(rank, rank + 1))
        torch.distributed.all_reduce(found.loss)
        assert_as_exact([found], [own], [exact])


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


def parallelize(config: Any) -> nn.Module:
    """Return the model as torchtitan's trainer makes and shards it, with FSDP2 and expert parallelism of two ranks."""
    options = ParallelismConfig(data_parallel_shard_degree=4, expert_parallel_degree=2, spmd_backend="partial_dtensor")
    utils.set_spmd_backend(options.spmd_backend)
    parallel_dims.device_type = "cpu"  # without a GPU torchtitan takes CUDA for granted
    dims = ParallelDims.from_config(options, 4)
    dims.build_mesh()
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=True)
    with torch.device("meta"):
        model = config.build()
    parallelize_qwen3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=options,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot reduce with a factor
    return draw(model.to_empty(device="cpu"))
