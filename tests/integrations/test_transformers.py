"""The experts implementation for transformers, against the models' own loop over experts."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from tests.processes import run_script
from tgl import backends
from tgl.integrations import transformers as integration
from tgl.meta.activations import IDENTITY, TABLE

transformers = pytest.importorskip("transformers")

from transformers.integrations.moe import use_experts_implementation  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 6, 16, 24, 2, 20


@use_experts_implementation(has_bias=True, has_gate=False)
class PlainBiasedExperts(nn.Module):
    """Plain experts with biases, which no model of transformers has."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.up_proj = nn.Parameter(torch.empty(EXPERTS, INTER, HIDDEN))
        self.up_proj_bias = nn.Parameter(torch.empty(EXPERTS, INTER))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INTER))
        self.down_proj_bias = nn.Parameter(torch.empty(EXPERTS, HIDDEN))
        self.act_fn = nn.GELU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            y = self.act_fn(nn.functional.linear(hidden_states[token], self.up_proj[expert], self.up_proj_bias[expert]))
            y = nn.functional.linear(y, self.down_proj[expert], self.down_proj_bias[expert])
            out = out.index_add(0, token, y * top_k_weights[token, choice, None])
        return out


def experts_class(path: str) -> type[nn.Module] | None:
    """``"model.Class"`` of transformers, None in a version that does not have it."""
    model, name = path.split(".")
    try:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    except ModuleNotFoundError:
        return None
    return getattr(module, name, None)


# class -> the fused activation that must serve it, None for the module's own
MODELS_EXPERTS: dict[str, tuple[str, bool] | None] = {
    "mixtral.MixtralExperts": ("swiglu", False),
    "qwen3_moe.Qwen3MoeExperts": ("swiglu", False),
    "deepseek_v3.DeepseekV3Experts": ("swiglu", False),
    "beam.BeamExperts": ("swiglu", False),
    "aria.AriaExperts": ("swiglu", False),  # transposed
    "muse_spark.MuseSparkExperts": ("swiglu", False),  # a norm after the experts
    "gpt_oss.GptOssExperts": ("clamped_qgeglu", True),  # transposed, biases, interleaved
    "openai_privacy_filter.OpenAIPrivacyFilterExperts": ("clamped_qgeglu", False),  # transposed, biases
    "minimax_m3_vl.MiniMaxM3VLExperts": ("clamped_qgeglu", False),
    "glm5_next.Glm5NextTextExperts": ("clamped_qgeglu", False),
    "hy_v4.HYV4Experts": ("clamped_qgeglu", False),
    "deepseek_v4.DeepseekV4Experts": ("clamped_qgeglu", False),
    "nemotron_h.NemotronHExperts": ("srelu", False),  # plain
    "inkling2.Inkling2Experts": None,  # a gate of its own
}
FOUND = {path: experts_class(path) for path in MODELS_EXPERTS}
# What the decorator of this version of transformers serves: older ones have fewer models and fewer kinds of experts.
CASES = {cls: MODELS_EXPERTS[path] for path, cls in FOUND.items() if hasattr(cls, "_apply_gate")}
CASES[PlainBiasedExperts] = ("gelu", False)
MixtralExperts, GptOssExperts = FOUND["mixtral.MixtralExperts"], FOUND["gpt_oss.GptOssExperts"]
# One of each kind: gated, transposed with biases, a norm behind, a gate of its own, plain.
NAMES = ("MixtralExperts", "GptOssExperts", "MuseSparkExperts", "Inkling2Experts", "PlainBiasedExperts")
KINDS = [cls for cls in CASES if cls.__name__ in NAMES]
BY_CLASS = pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def config(**changes: Any) -> SimpleNamespace:
    """Return a configuration under all the names that the models use."""
    values = {name: EXPERTS for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")}
    values |= {name: HIDDEN for name in ("hidden_size", "moe_hidden_size")}
    values |= {name: INTER for name in ("intermediate_size", "moe_intermediate_size")}
    values |= {"hidden_act": "silu", "mlp_hidden_act": "relu2", "moe_latent_size": None, "post_norm_eps": 1e-6}
    # A low limit, so that random inputs reach both sides of it.
    values |= {"swiglu_limit": 1.5, "swiglu_alpha": 1.702, "mlp_gate_softcap": 5.0, "mlp_up_softcap": 5.0}
    values |= {"_experts_implementation": "eager"}
    return SimpleNamespace(**values | changes)


def make(cls: type[nn.Module], **changes: Any) -> nn.Module:
    torch.manual_seed(1)
    experts = cls(config(**changes))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return experts


def inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, indices (expert 0 idle), weights and an output gradient."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    index = torch.rand(tokens, EXPERTS - 1, generator=generator).topk(TOP_K).indices + 1
    weights = torch.rand(tokens, TOP_K, generator=generator).to(dtype).requires_grad_()
    return x, index, weights, torch.randn(tokens, HIDDEN, generator=generator).to(dtype)


def run(
    experts: nn.Module, how: str, data: tuple[Tensor, Tensor, Tensor, Tensor], call: Callable | None = None
) -> list[Tensor]:
    """Output, and gradients of the input, the routing weights and every parameter."""
    x, index, weights, dy = data
    experts.config._experts_implementation = how
    out = (call or experts)(x, index, weights)
    wanted = [x, weights, *experts.parameters()]
    grads = torch.autograd.grad(out, wanted, dy, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def assert_rounding(results: list[Tensor], references: list[Tensor], ulps: float = 16) -> None:
    """Every result within ``ulps`` float32 roundings, in units of the largest entry, of a float64 reference."""
    for result, reference in zip(results, references, strict=True):
        assert result.dtype == torch.float32
        scale = reference.abs().max()
        torch.testing.assert_close(
            result.double(), reference, rtol=0, atol=float(ulps * torch.finfo(torch.float32).eps * scale)
        )


def exact(experts: nn.Module, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """The model's own loop in float64 (privacy filter and Beam force float32 on any input, though)."""
    wide = type(experts)(experts.config).double()
    wide.load_state_dict(experts.state_dict())
    x, index, weights, dy = data
    data64 = (x.detach().double().requires_grad_(), index, weights.detach().double().requires_grad_(), dy.double())
    return run(wide, "eager", data64)


@pytest.mark.parametrize("cls", [cls for cls, fused in CASES.items() if fused and cls.__name__ != "MuseSparkExperts"])
def test_one_op_where_kernels_span_its_parts(cls: type[nn.Module]) -> None:
    """On a stand-in for a GPU one op has the bits of its parts."""
    experts, data = make(cls), inputs()
    parts = run(experts, "tgl", data)
    with backends.emulated_device("an arch without kernels"):
        out = experts(*data[:3])
        nodes, found = [out.grad_fn], set()
        while nodes:
            node = nodes.pop()
            found.add(type(node).__name__)
            nodes += [n for n, _ in node.next_functions if n is not None]
        assert "tgl_moeBackward" in found
        assert "tgl_grouped_gemmBackward" not in found
        whole = run(experts, "tgl", data)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)


@BY_CLASS
def test_equals_the_models_own_loop(cls: type[nn.Module]) -> None:
    experts, data = make(cls), inputs()
    assert_rounding(run(experts, "tgl", data), exact(experts, data))


def test_flags_that_older_versions_do_not_set() -> None:
    """Attributes that came later are optional: transformers 5.7 sets neither."""
    experts, data = make(MixtralExperts), inputs()
    wanted = run(experts, "tgl", data)
    for name in ("has_post_expert_norm", "_is_expert_parallel"):
        vars(experts).pop(name, None)
    for result, expected in zip(run(experts, "tgl", data), wanted, strict=True):
        assert torch.equal(result, expected)


def test_no_model_is_missing_from_the_newest_version() -> None:
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23):
        assert len(CASES) == len(MODELS_EXPERTS) + 1
    assert {"MixtralExperts", "GptOssExperts"} <= {cls.__name__ for cls in CASES}


@BY_CLASS
def test_activation_is_recognised(cls: type[nn.Module]) -> None:
    found = integration.activation(make(cls))
    assert (found and (found.kind, found.interleaved)) == CASES[cls]


# transformers' name of a function -> the activation with a gate and without
SERVED = {
    "silu": ("swiglu", "silu"),
    "swish": ("swiglu", "silu"),
    "gelu": ("geglu", "gelu"),
    "gelu_python": ("geglu", "gelu"),
    "gelu_pytorch_tanh": ("geglu_tanh", "gelu_tanh"),
    "gelu_python_tanh": ("geglu_tanh", "gelu_tanh"),
    "gelu_new": ("geglu_tanh", "gelu_tanh"),
    "gelu_fast": ("geglu_tanh", "gelu_tanh"),
    "gelu_accurate": ("geglu_tanh", "gelu_tanh"),
    "relu": ("reglu", "relu"),
    "relu2": (None, "srelu"),
    "quick_gelu": (None, None),
    "mish": (None, None),
}


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("name", SERVED)
def test_functions_of_models_are_recognised_and_computed(name: str, gated: bool) -> None:
    """Every name of transformers for them is recognised; other functions are the module's own."""
    cls = MixtralExperts if gated else FOUND["nemotron_h.NemotronHExperts"] or PlainBiasedExperts
    experts, data = make(cls, hidden_act=name, mlp_hidden_act=name), inputs()
    if cls is PlainBiasedExperts:
        experts.act_fn = transformers.activations.ACT2FN[name]
    found = integration.activation(experts)
    assert (found and found.kind) == SERVED[name][0 if gated else 1]
    assert_rounding(run(experts, "tgl", data), exact(experts, data))


def test_every_activation_of_one_function_is_served() -> None:
    served = {kind for pair in SERVED.values() for kind in pair}
    plain = {a.name for a in TABLE.values() if a.linear in (None, IDENTITY)}
    assert plain == served - {None}


def test_modules_and_functions_of_torch() -> None:
    experts = make(MixtralExperts)
    for function, kind in (
        (nn.GELU(), "geglu"),
        (nn.GELU(approximate="tanh"), "geglu_tanh"),
        (nn.functional.gelu, "geglu"),
        (nn.functional.relu, "reglu"),
        (nn.functional.silu, "swiglu"),
        (nn.Tanh(), None),
    ):
        del experts.act_fn
        experts.act_fn = function
        found = integration.activation(experts)
        assert (found and found.kind) == kind


def test_a_changed_gate_is_not_taken_for_the_known_one() -> None:
    class Changed(GptOssExperts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
            return (up + 2) * gate * torch.sigmoid(gate * self.alpha)

    experts, data = make(Changed), inputs()
    assert integration.activation(experts) is None
    assert_rounding(run(experts, "tgl", data), exact(experts, data))


def test_an_unknown_gate_is_reported_once() -> None:
    class Changed(GptOssExperts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return gate_up[..., ::2] * torch.tanh(gate_up[..., 1::2])

    data = inputs()
    with pytest.warns(UserWarning, match="no activation of tgl computes what Changed does between its projections"):
        run(make(Changed), "tgl", data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(make(Changed), "tgl", data)


def halved(gate_up: Tensor) -> Tensor:
    """A gate that no class has."""
    return torch.tanh(gate_up[..., ::2]) * gate_up[..., 1::2] / 2


def with_gate_of_its_own(experts: nn.Module) -> None:
    experts._apply_gate = halved


def with_a_method(experts: nn.Module) -> None:
    experts._apply_gate = MethodType(lambda self, gate_up: halved(gate_up), experts)


def with_a_hook(experts: nn.Module) -> None:
    experts.act_fn.register_forward_hook(lambda module, args, y: 2 * y)


def with_another_forward(experts: nn.Module) -> None:
    experts.act_fn.forward = torch.tanh


CHANGES = {
    "gate": with_gate_of_its_own,
    "method": with_a_method,
    "hook of act_fn": with_a_hook,
    "forward of act_fn": with_another_forward,
}


def by_its_gate(experts: nn.Module, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Return transformers' results in float64 by the module's gate, which the model's own loop does not call."""
    x, index, weights, dy = data
    return run(
        experts.double(),
        "batched_mm",
        (x.detach().double().requires_grad_(), index, weights.detach().double().requires_grad_(), dy.double()),
    )


@pytest.mark.cover(2)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("known", [False, True], ids=["at once", "after a call"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_to_one_instance_is_respected(change: str, compiled: bool, known: bool) -> None:
    """A changed instance is computed as changed. Dynamo guards on no hooks: a graph from before them stays in use."""
    experts, other, reference, data = *(make(MixtralExperts) for _ in range(3)), inputs()
    call = torch.compile(lambda *args: experts(*args), fullgraph=True, backend="aot_eager") if compiled else None
    before = run(other, "tgl", data)
    if known:
        run(experts, "tgl", data, call)
    for module in (experts, reference):
        CHANGES[change](module)
    if compiled and known and "hook" in change:
        torch._dynamo.reset()
    assert_rounding(run(experts, "tgl", data, call), by_its_gate(reference, data))
    assert integration.activation(experts) is None
    assert all(torch.equal(one, same) for one, same in zip(run(other, "tgl", data), before, strict=True))


def test_a_gate_of_one_instance_is_reported_once() -> None:
    class Known(MixtralExperts):
        pass

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert integration.activation(make(Known)).kind == "swiglu"
    experts, data = make(Known), inputs()
    experts._apply_gate = halved
    with pytest.warns(UserWarning, match="computes what an instance of Known does between its projections"):
        run(experts, "tgl", data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(experts, "tgl", data)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_gate_replaced_in_the_class_is_computed(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a call, by which the class is known already."""
    experts, data = make(MixtralExperts), inputs()
    call = torch.compile(lambda *args: experts(*args), fullgraph=True, backend="aot_eager") if compiled else None
    run(experts, "tgl", data, call)
    monkeypatch.setattr(MixtralExperts, "_apply_gate", lambda self, gate_up: halved(gate_up))
    assert_rounding(run(experts, "tgl", data, call), by_its_gate(make(MixtralExperts), data))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "cls",
    [pytest.param(cls, marks=() if cls in KINDS else pytest.mark.slow, id=cls.__name__) for cls in CASES],
)
def test_compiles_whole(cls: type[nn.Module]) -> None:
    """fullgraph, forward and backward; the compiled layer answers as the uncompiled one.

    Its gate is recognised: the model's own code between the projections would leave ATen's derivatives in the graph.
    """
    targets: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    experts, data = make(cls), inputs()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(lambda *args: experts(*args), fullgraph=True, backend=backend)
    results = run(experts, "tgl", data, compiled)
    assert_rounding(results, [t.double() for t in run(experts, "tgl", data)], ulps=2)
    assert "tgl.grouped_gemm_wgrad.default" in targets
    assert not {"aten.silu_backward.default", "aten.gelu_backward.default"} & set(targets)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "cls, backend",
    [(MixtralExperts, "aot_eager")]
    + [pytest.param(cls, "inductor", marks=pytest.mark.slow) for cls in KINDS if cls is not PlainBiasedExperts],
)
def test_one_graph_for_all_numbers_of_tokens(cls: type[nn.Module], backend: str) -> None:
    experts, data = make(cls), inputs()
    compiled = torch.compile(lambda *args: experts(*args), fullgraph=True, dynamic=True, backend=backend)
    assert_rounding(run(experts, "tgl", data, compiled), exact(experts, data))
    data = inputs(tokens=TOKENS + 3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        results = run(experts, "tgl", data, compiled)
    assert_rounding(results, exact(experts, data))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_the_dtype(dtype: torch.dtype) -> None:
    """Routers of several models give float32 weights; the layer answers in the dtype of its input."""
    experts, data = make(MixtralExperts), inputs(dtype=dtype)
    ours = run(experts.to(dtype), "tgl", (data[0], data[1], data[2].detach().float().requires_grad_(), data[3]))
    assert [t.dtype for t in ours] == [dtype, dtype, torch.float32, dtype, dtype]
    for result, expected in zip(ours, exact(experts, data), strict=True):
        error = (result.double() - expected).norm() / expected.norm()
        assert error < 2 * torch.finfo(dtype).eps


def with_sentinels(
    sentinel: int,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The same routing twice: with sentinels and NaN where they are, and with weight zero on a real expert."""
    x, index, weights, dy = inputs()
    skipped = torch.zeros_like(index, dtype=torch.bool)
    skipped[::3, 0] = True
    skipped[5] = True
    poisoned_x = x.detach().clone()
    poisoned_x[5] = float("nan")
    clean_x = x.detach().clone()
    poisoned = (
        poisoned_x.requires_grad_(),
        index.masked_fill(skipped, sentinel),
        weights.detach().masked_fill(skipped, float("inf")).requires_grad_(),
        dy,
    )
    return poisoned, (clean_x.requires_grad_(), index, weights.detach().masked_fill(skipped, 0).requires_grad_(), dy)


@pytest.mark.parametrize("sentinel", [EXPERTS, EXPERTS + 5])
@pytest.mark.parametrize("cls", KINDS)
def test_dropped_slots_leak_no_values(cls: type[nn.Module], sentinel: int) -> None:
    """Infinite weights and a NaN row of dropped slots reach neither the output nor any gradient."""
    experts = make(cls)
    experts._is_expert_parallel = True
    poisoned, clean = with_sentinels(sentinel)
    out, dx, dweights, *rest = run(experts, "tgl", poisoned)
    expected, expected_dx, expected_dweights, *expected_rest = exact(experts, clean)
    skipped = poisoned[1] >= EXPERTS
    assert not dweights[skipped].any()
    assert not out[5].any()
    assert not dx[5].any()
    expected_dweights = expected_dweights.masked_fill(skipped, 0)
    assert_rounding([out, dx, dweights, *rest], [expected, expected_dx, expected_dweights, *expected_rest])


def test_only_dropped_slots_and_no_tokens() -> None:
    experts = make(MixtralExperts)
    x, index, weights, dy = inputs()
    for result in run(experts, "tgl", (x, torch.full_like(index, EXPERTS), weights, dy)):
        assert not result.any()
    out, dx, dweights, *rest = run(experts, "tgl", inputs(tokens=0))
    assert (out.shape, dx.shape, dweights.shape) == ((0, HIDDEN), (0, HIDDEN), (0, TOP_K))
    assert not any(t.any() for t in rest)


# --- whole models -----------------------------------------------------------------------------------------------------

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK = TINY | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "mixtral, gelu": (transformers.MixtralConfig, TINY | {"hidden_act": "gelu"}),
    "qwen3_moe, gelu_pytorch_tanh": (transformers.Qwen3MoeConfig, TINY | {"hidden_act": "gelu_pytorch_tanh"}),
    "mixtral, relu": (transformers.MixtralConfig, TINY | {"hidden_act": "relu"}),
    "mixtral": (transformers.MixtralConfig, TINY),
    "qwen3_moe": (transformers.Qwen3MoeConfig, TINY),
    "gpt_oss": (transformers.GptOssConfig, TINY),
    "deepseek_v3": (transformers.DeepseekV3Config, DEEPSEEK),
}


def tiny_model(name: str) -> nn.Module:
    cls, values = MODELS[name]
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(cls(**values)).train()


def loss_and_grads(model: nn.Module, forward: Callable) -> list[Tensor]:
    tokens = torch.arange(48).view(2, 24) * 7 % 64
    loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return [loss.detach(), *grads]


@pytest.mark.parametrize("name", MODELS)
def test_whole_model_trains_alike(name: str) -> None:
    model = tiny_model(name)
    model.set_experts_implementation("tgl")
    calls = []
    layers = [module for module in model.modules() if hasattr(module, "is_transposed")]
    for layer in layers:
        layer.register_forward_hook(lambda module, *_: calls.append(module.config._experts_implementation))
    ours = loss_and_grads(model, model)
    assert layers
    assert calls == ["tgl"] * len(layers)
    model.set_experts_implementation("eager")
    wide = tiny_model(name).double()
    wide.set_experts_implementation("eager")
    for result, own, exact in zip(ours, loss_and_grads(model, model), loss_and_grads(wide, wide), strict=True):
        # What the model's own loop loses to rounding is the measure for ours.
        allowed = 4 * (own - exact).abs().max() + 1e-6 * exact.abs().max()
        assert (result - exact).abs().max() <= allowed


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "name, backend",
    [("mixtral", "aot_eager"), *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in MODELS)],
)
def test_whole_model_compiles_whole(name: str, backend: str) -> None:
    model = tiny_model(name)
    model.set_experts_implementation("tgl")
    expected = loss_and_grads(model, model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for result, reference in zip(loss_and_grads(model, compiled), expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=float(1e-5 * reference.abs().max()))


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_attention_of_another_name_gets_no_mask() -> None:
    """Compiled attention stays causal, on which docs/compile_a_model.md relies, and the model computes the same."""
    model = tiny_model("qwen3_moe")
    expected = loss_and_grads(model, model)
    transformers.AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
    model.set_attn_implementation("sdpa_causal")
    attended = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
        attended.extend(n for n in graph.graph.nodes if n.target is torch.nn.functional.scaled_dot_product_attention)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for result, reference in zip(loss_and_grads(model, compiled), expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=float(1e-5 * reference.abs().max()))
    assert [(node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in attended] == [(None, True)] * 2


# --- the optional dependency ------------------------------------------------------------------------------------------


def in_fresh_python(code: str, folder: Path) -> str:
    (folder / "script.py").write_text(code)
    status, printed = run_script(folder / "script.py", {}, timeout=300)
    assert status == 0, printed
    return printed


def test_importing_tgl_imports_no_transformers(tmp_path: Path) -> None:
    code = "import sys, tgl, tgl.integrations.transformers; print('transformers' in sys.modules)"
    assert in_fresh_python(code, tmp_path).strip() == "False"


def test_missing_transformers_is_a_clear_error(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import tgl.integrations.transformers as t\n"
        "try:\n    t.register()\nexcept ImportError as error:\n    print(error)"
    )
    assert "pip install torch-grouped-linear[transformers]" in in_fresh_python(code, tmp_path)


def test_versions_whose_models_take_no_other_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.6.2")  # importing a model replaces it
    with pytest.raises(ImportError, match=r"needs transformers 5.7 or later; .* but 5\.6\.2 is installed"):
        integration.register()


def test_register_under_another_name() -> None:
    integration.register("tgl-again")
    experts, data = make(MixtralExperts), inputs()
    for result, expected in zip(run(experts, "tgl-again", data), run(experts, "tgl", data), strict=True):
        assert torch.equal(result, expected)
