"""Layers and transformers' experts whose weights torchao has quantised."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tgl
from tgl.integrations import torch as products
from tgl.integrations import transformers as models

quantization = pytest.importorskip("torchao.quantization")
transformers = pytest.importorskip("transformers")

from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs  # noqa: E402

EXPERTS, WIDTH = 4, 32
BF16 = torch.bfloat16
SPLITS = torch.tensor([3, 0, 4, 2])
CONFIGS = {
    "float8": quantization.Float8WeightOnlyConfig(),
    "int8": quantization.Int8WeightOnlyConfig(version=2),
}
CONFIG = pytest.mark.parametrize("config", CONFIGS)


def quantize(module: nn.Module, config: str, names: str = r"re:.*weight\d*") -> Any:
    """A copy of ``module`` with quantised weights, and one with their values."""
    quantized = copy.deepcopy(module)
    quantization.quantize_(quantized, quantization.FqnToConfig({names: CONFIGS[config]}), filter_fn=None)
    values = copy.deepcopy(module)
    changed = {name: p for name, p in quantized.named_parameters() if type(p) is not nn.Parameter}
    assert changed
    for name, parameter in changed.items():
        owner, _, last = name.rpartition(".")
        setattr(values.get_submodule(owner), last, nn.Parameter(parameter.dequantize(), requires_grad=False))
    return quantized, values


def linear(**options: Any) -> tgl.GroupedLinear:
    torch.manual_seed(0)
    return tgl.GroupedLinear(EXPERTS, WIDTH, WIDTH, params_dtype=BF16, **options)


def mlp(cls: type[tgl.GroupedMLP] = tgl.GroupedMLP) -> nn.Module:
    torch.manual_seed(0)
    return cls(EXPERTS, WIDTH, WIDTH, params_dtype=BF16)


def low_rank() -> nn.Module:
    layer = tgl.GroupedLoRALinear(linear(), rank=4)
    nn.init.normal_(layer.lora_B)
    return layer


LAYERS = {
    "packed": linear,
    "discrete": functools.partial(linear, single_grouped_weight=False),
    "recipe": functools.partial(linear, recipe=tgl.recipes.Float8CurrentScaling()),
    "mlp": mlp,
    "low rank": low_rank,
}


def run(layer: Any, *groups: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(9, WIDTH, dtype=BF16, requires_grad=True)
    y = layer(x, *groups)
    y.square().sum().backward()
    return [y.detach(), x.grad] + [p.grad for p in layer.parameters() if p.requires_grad]


@CONFIG
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_multiply_the_values(kind: str, config: str) -> None:
    quantized, values = quantize(LAYERS[kind](), config)
    for a, b in zip(run(quantized, SPLITS), run(values, SPLITS), strict=True):
        assert torch.equal(a, b)


@CONFIG
def test_a_block(config: str) -> None:
    quantized, values = quantize(mlp(tgl.MoE), config)
    experts = torch.randint(EXPERTS, (9, 2))
    for a, b in zip(run(quantized, experts), run(values, experts), strict=True):
        assert torch.equal(a, b)


def test_compiled() -> None:
    quantized, values = quantize(linear(), "float8")
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    x = torch.randn(9, WIDTH, dtype=BF16)
    assert torch.equal(compiled(x, SPLITS), values(x, SPLITS))


SIZES = {
    "vocab_size": 11,
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
TOKENS = torch.arange(14).view(2, 7) % 11


def qwen3() -> Any:
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, moe_intermediate_size=WIDTH)
    )


def gpt_oss() -> Any:
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, num_local_experts=EXPERTS))


EXPERTS_OF_MODELS = r"re:.*experts\.(gate_up_proj|down_proj)"


def model_of(make: Any) -> Any:
    models.register()
    torch.manual_seed(1)
    model = make().to(BF16).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@CONFIG
@pytest.mark.parametrize("make", [qwen3, gpt_oss])
def test_models_multiply_the_values(make: Any, config: str) -> None:
    quantized, values = quantize(model_of(make), config, EXPERTS_OF_MODELS)
    for model in (quantized, values):
        model.set_experts_implementation("tgl")
    with torch.no_grad():
        assert torch.equal(quantized(TOKENS).logits, values(TOKENS).logits)


def test_a_quantised_model_from_a_file() -> None:
    quantized, _ = quantize(model_of(qwen3), "float8", EXPERTS_OF_MODELS)
    quantized.set_experts_implementation("tgl")
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    fresh = model_of(qwen3)
    fresh.set_experts_implementation("tgl")
    fresh.load_state_dict(torch.load(file, weights_only=True), assign=True)
    with torch.no_grad():
        assert torch.equal(fresh(TOKENS).logits, quantized(TOKENS).logits)


def test_adapters_on_a_quantised_model() -> None:
    peft = pytest.importorskip("peft")
    from tgl.integrations import peft as adapters

    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    results = []
    for model in quantize(model_of(qwen3), "float8", EXPERTS_OF_MODELS):
        model.set_experts_implementation("tgl")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=targets))
        assert len(adapters.attach(adapted)) == 4
        torch.manual_seed(2)
        trained = [nn.init.normal_(p, std=0.1) for p in adapted.parameters() if p.requires_grad]
        loss = adapted(input_ids=TOKENS, labels=TOKENS).loss
        results.append((loss.detach(), *torch.autograd.grad(loss, trained)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# --- what is not served, and by what it is ----------------------------------------------------------------------------


def dynamic(module: nn.Module) -> nn.Module:
    """Return weights whose rows are quantised in every product, which torchao's configuration makes on a GPU alone."""
    rows = quantization.PerRow()
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.dim() == 3:
                made = quantization.Float8Tensor.from_hp(
                    parameter.detach(), granularity=rows, act_quant_kwargs=QuantizeTensorToFloat8Kwargs()
                )
                setattr(owner, name, nn.Parameter(made, requires_grad=False))
    return module


NAMED = r"`weight` must be quantised alone, but is a Float8Tensor with `act_quant_kwargs`.*experts_implementation"


def test_the_error_about_dynamic_rows_gives_a_remedy() -> None:
    layer = dynamic(linear())
    with pytest.raises(NotImplementedError, match=NAMED):
        layer(torch.randn(9, WIDTH, dtype=BF16), SPLITS)
    model = dynamic(model_of(qwen3))
    model.set_experts_implementation("tgl")
    with pytest.raises(NotImplementedError, match=NAMED):
        model(TOKENS)


def test_dynamic_rows_run_as_the_error_says() -> None:
    model = model_of(qwen3)
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        expected = model(TOKENS).logits
        with products.enabled(["cpu"]):
            y = dynamic(model)(TOKENS).logits
    assert (y - expected).norm() / expected.norm() < 0.2


def test_a_weight_that_requires_grad_is_refused() -> None:
    quantized, _ = quantize(linear(), "float8")
    quantized.weight.requires_grad_()
    with pytest.raises(RuntimeError, match="`weight` must not require grad: a Float8Tensor is frozen"):
        quantized(torch.randn(9, WIDTH, dtype=BF16), SPLITS)


def test_nothing_is_written_into_a_quantised_weight() -> None:
    quantized, _ = quantize(low_rank(), "float8")
    with pytest.raises(ValueError, match="`base` must have a weight of plain parameters"):
        quantized.merge()
    with pytest.raises(RuntimeError, match="`weight` must be a plain tensor to be initialised, but is a Float8Tensor"):
        quantized.base.reset_parameters()
