"""Adapters of experts, inside PEFT and transformers, against PEFT's own forward."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.nn.seen import Ops, Sizes
from tests.peak_memory import peak_memory
from tests.processes import run_script
from tgl.integrations import transformers as models

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from peft.tuners import lora  # noqa: E402

from tgl.integrations import peft as integration  # noqa: E402

EXPERTS, HIDDEN, INTER, VOCABULARY = 4, 32, 48, 11
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=INTER)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=EXPERTS)),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, num_local_experts=EXPERTS)),
}
TOKENS = torch.arange(14).view(2, 7) % VOCABULARY


@pytest.fixture(autouse=True)
def registered() -> None:
    models.register()


def base(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(1)
    model = MODELS[kind]()
    for parameter in model.parameters():  # transformers leaves some to a checkpoint
        nn.init.normal_(parameter, std=0.3)
    model.set_experts_implementation("eager")  # the one that takes float64
    return model.to(dtype)


def config(parameters: list[str] = BOTH, **options: Any) -> Any:
    return peft.LoraConfig(target_modules=[], target_parameters=parameters, **{"r": 4, "lora_alpha": 6} | options)


def fill(model: nn.Module) -> None:
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)


def adapted(kind: str, parameters: list[str] = BOTH, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A model that PEFT serves, with updates that are not zero."""
    model = peft.get_peft_model(base(kind, dtype), config(parameters, **options))
    fill(model)
    return model


def attached(model: Any) -> Any:
    """A copy of ``model`` that is served here."""
    model = copy.deepcopy(model)
    model.get_base_model().set_experts_implementation("tgl")
    integration.attach(model)
    return model


def results(model: Any, call: Callable | None = None) -> dict[str, Tensor]:
    """The logits, and the gradients of the parameters that have one."""
    model.zero_grad()
    logits = (model if call is None else call)(TOKENS).logits
    generator = torch.Generator().manual_seed(3)
    logits.backward(torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits.dtype))
    return {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def experts_of(model: nn.Module) -> nn.Module:
    """The outermost module around the experts of the first layer."""
    return next(m for n, m in model.named_modules() if n.endswith("experts"))


def assert_equal(model: Any, expected: Any) -> None:
    """Both models have the same logits and gradients, those of adapters among them, up to rounding in float64."""
    found, wanted = results(model), results(expected)
    assert sum("lora_" in name for name in wanted) > 0
    torch.testing.assert_close(found, wanted)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "r": 3}], ids=["lora", "rslora"])
@pytest.mark.parametrize("parameters", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("kind", MODELS)
def test_equals_peft(kind: str, parameters: list[str], options: dict[str, Any]) -> None:
    theirs = adapted(kind, parameters, **options)
    assert_equal(attached(theirs), theirs)


@pytest.mark.parametrize("kind", MODELS)
def test_several_active_adapters(kind: str) -> None:
    """One adapter was active already; the other has another rank and scaling."""
    theirs = adapted(kind)
    ours = attached(theirs)
    for model in (theirs, ours):
        model.add_adapter("more", config(r=2, lora_alpha=5))
        fill(model)
    single = results(ours)
    for model in (theirs, ours):
        model.base_model.set_adapter(["default", "more"])
    assert_equal(ours, theirs)
    assert not torch.allclose(results(ours)["logits"], single["logits"])
    for model in (theirs, ours):
        model.set_adapter("more")
    assert_equal(ours, theirs)


@pytest.mark.parametrize("kind", MODELS)
def test_disable_merge_and_unmerge(kind: str) -> None:
    theirs = adapted(kind)
    ours, plain = attached(theirs), base(kind)(TOKENS).logits
    with_adapters = ours(TOKENS).logits
    assert not torch.allclose(with_adapters, plain)
    with ours.disable_adapter():
        torch.testing.assert_close(ours(TOKENS).logits, plain)
    ours.merge_adapter()
    assert not any(name == "low_rank" for name in calls(ours))
    torch.testing.assert_close(ours(TOKENS).logits, with_adapters)
    with ours.disable_adapter():  # unmerges, as PEFT does
        torch.testing.assert_close(ours(TOKENS).logits, plain)
    ours.unmerge_adapter()
    assert "low_rank" in calls(ours)
    torch.testing.assert_close(ours(TOKENS).logits, with_adapters)
    merged = ours.merge_and_unload()
    assert not any(isinstance(m, lora.ParamWrapper) for m in merged.modules())
    torch.testing.assert_close(merged(TOKENS).logits, with_adapters)


def calls(model: Any) -> list[str]:
    """Keywords of the call of the experts, by a hook of theirs, which fires."""
    seen: list[str] = []
    hook = (
        experts_of(model)
        .get_base_layer()
        .register_forward_pre_hook(lambda m, args, kwargs: seen.extend(kwargs), with_kwargs=True)
    )
    model(TOKENS)
    hook.remove()
    return seen


def test_detach() -> None:
    theirs = adapted("mixtral")
    ours = attached(theirs)
    integration.detach(ours)
    ours.get_base_model().set_experts_implementation("eager")
    assert all(type(m) is not integration.ParamWrapper for m in ours.modules())
    found, wanted = results(ours), results(theirs)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_narrow_experts_with_wide_adapters(kind: str) -> None:
    """PEFT's adapters of bfloat16 models: float32, used in the dtype of the parameter."""
    theirs = adapted(kind, dtype=torch.bfloat16)
    ours = attached(theirs)
    wide = adapted(kind)
    wide.load_state_dict(theirs.state_dict())
    exact, found, rounded = results(wide), results(ours), results(theirs)
    for name, gradient in found.items():
        assert gradient.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        scale = exact[name].norm()
        error, of_peft = ((t.double() - exact[name]).norm() / scale for t in (gradient, rounded[name]))
        assert error < 2 * of_peft + torch.finfo(torch.bfloat16).eps, name


def test_a_model_compiles_whole(fresh_compiler: None) -> None:
    theirs = adapted("gpt_oss")
    ours = attached(theirs)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(ours, compiled), results(theirs))


def test_a_forward_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo of PyTorch 2.11 traces no import from transformers, whose packages load their modules late."""
    ours, found = attached(adapted("gpt_oss")), []
    original = builtins.__import__

    def imports(name: str, context: Any = None, *rest: Any) -> Any:
        by = (context or {}).get("__name__", "")
        if by.startswith("tgl.") and name.startswith(("transformers", "peft")):
            found.append((by, name))
        return original(name, context, *rest)

    monkeypatch.setattr(builtins, "__import__", imports)
    ours(TOKENS)
    assert not found


def test_checkpointing() -> None:
    theirs = adapted("mixtral")
    ours = attached(theirs)
    ours.gradient_checkpointing_enable()
    ours.enable_input_require_grads()
    ours.train()
    assert_equal(ours, theirs)


# --- what is not computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_no_tensor_of_the_weights_size(kind: str) -> None:
    theirs = adapted(kind)
    size = EXPERTS * HIDDEN * INTER  # of ``down_proj``, the smaller one
    largest = {}
    for name, model in (("theirs", theirs), ("ours", attached(theirs))):
        with Sizes() as seen:
            results(model)
        largest[name] = seen.largest
    assert largest["ours"] < size <= largest["theirs"]


def test_memory_of_a_step() -> None:
    """Less than PEFT's by the sums of both weights at least, within ops as well."""
    theirs = adapted("gpt_oss")
    theirs_layer, layer = experts_of(theirs), experts_of(attached(theirs))
    experts = layer.get_base_layer()
    x, index = torch.randn(6, HIDDEN, dtype=torch.float64), torch.rand(6, EXPERTS).topk(2).indices
    weights = torch.rand(6, 2, dtype=torch.float64)
    peaks = [peak_memory(lambda m=m: m(x, index, weights).sum().backward()) for m in (theirs_layer, layer)]
    assert peaks[0] - peaks[1] > experts.gate_up_proj.nbytes + experts.down_proj.nbytes
    assert peaks[1] < experts.gate_up_proj.nbytes


@pytest.mark.parametrize("kind", MODELS)
def test_products_of_a_step(kind: str) -> None:
    ours = attached(adapted(kind))
    with Ops() as seen:
        logits = ours(TOKENS).logits
    assert seen.names.count("grouped_gemm_low_rank_activation") == seen.names.count("grouped_gemm_low_rank") == 2
    assert "grouped_activation" not in seen.names
    with Ops() as seen:
        logits.sum().backward()
    # Of the adapters' four matrices in each of two layers; and input gradients: of each adapter's second matrix, and
    # of its first one together with the parameter's, but for what would flow into the first layer's input, behind
    # which nothing is trained.
    assert seen.names.count("grouped_gemm_wgrad") == 2 * 4
    assert seen.names.count("grouped_gemm") == 2 * 2
    assert seen.names.count("grouped_gemm_low_rank") == 2 * 2 - 1
    assert all("lora_" in name for name, p in ours.named_parameters() if p.grad is not None)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("saved_by", ["ours", "theirs"])
def test_files_of_one_load_in_the_other(kind: str, saved_by: str, tmp_path: Path) -> None:
    theirs = adapted(kind)
    source = attached(theirs) if saved_by == "ours" else theirs
    source.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(kind), tmp_path, is_trainable=True)
    assert_equal(loaded if saved_by == "ours" else attached(loaded), source)


# --- unsupported ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [({"lora_dropout": 0.1}, "lora_dropout"), ({"use_dora": True}, "use_dora"), ({"lora_bias": True}, "lora_bias")],
    ids=["dropout", "dora", "bias"],
)
def test_unsupported_adapters_of_a_served_model_raise(options: dict[str, Any], message: str) -> None:
    """tgl checks the bias of a second adapter, too; PEFT reads only that of the first, and adds none."""
    ours = attached(adapted("mixtral"))
    with pytest.raises(ValueError, match=message):
        ours.add_adapter("more", config(**options))
    with pytest.raises(ValueError, match=message):
        adapted("mixtral", **options)


def test_lora_biases_that_peft_ignores_raise() -> None:
    model = adapted("mixtral")
    model.add_adapter("more", config(lora_bias=True))
    model.get_base_model().set_experts_implementation("tgl")
    with pytest.raises(ValueError, match="`lora_bias` must be False for adapters of experts, but is True of 'more' at"):
        integration.attach(model)


def test_models_without_adapters_of_experts() -> None:
    other = peft.get_peft_model(base("mixtral"), peft.LoraConfig(target_modules=["q_proj"]))
    for model in (nn.Linear(2, 2), base("mixtral"), other):
        with pytest.raises(ValueError, match=r"`model` must have adapters of experts .*, but has none"):
            integration.attach(model)


def test_another_implementation() -> None:
    """Before and after; nothing is changed by an ``attach`` that raises."""
    theirs = adapted("mixtral")
    with pytest.raises(
        ValueError, match=r"`experts_implementation` must be the one of .* at .*experts.*, but is 'eager'"
    ):
        integration.attach(theirs)
    assert not any(isinstance(m, integration.ParamWrapper) for m in theirs.modules())
    ours = attached(theirs)
    ours.get_base_model().set_experts_implementation("eager")
    with pytest.raises(ValueError, match=r"`experts_implementation` must be the one of .*, but is 'eager'"):
        ours(TOKENS)
    with ours.disable_adapter():  # which any implementation serves
        torch.testing.assert_close(ours(TOKENS).logits, base("mixtral")(TOKENS).logits)


def test_sharded_experts_raise() -> None:
    model = adapted("mixtral")
    model.get_base_model().set_experts_implementation("tgl")
    experts = experts_of(model).get_base_layer()
    experts._is_expert_parallel = True
    with pytest.raises(
        ValueError, match=r"`model` must hold all experts on every rank, but .*experts.* is in expert pa"
    ):
        integration.attach(model)
    experts._is_expert_parallel = False
    experts.down_proj.data = experts.down_proj.to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"`model` must have experts in a floating dtype of 16 bits .* torch.float8_e4m3"
    ):
        integration.attach(model)


def test_mixed_batches_of_adapters() -> None:
    layer = experts_of(attached(adapted("mixtral")))
    with pytest.raises(ValueError, match="mixed adapter batches"):
        layer(torch.zeros(2, HIDDEN), adapter_names=["default", "default"])


def test_an_older_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft, "__version__", "0.20.1")
    with pytest.raises(ImportError, match=r"needs peft 0.21 or later; .* but 0\.20\.1 is installed"):
        integration.attach(nn.Linear(2, 2))


def test_missing_peft_is_a_clear_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.modules['peft'] = None\n"
        "try:\n    import tgl.integrations.peft\nexcept ImportError as error:\n    print(error)"
    )
    status, printed = run_script(script, {}, timeout=300)
    assert status == 0, printed
    assert "pip install torch-grouped-linear[peft]" in printed
