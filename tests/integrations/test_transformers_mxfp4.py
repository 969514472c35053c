"""MXFP4 checkpoints of gpt-oss by ``from_pretrained``: against transformers' own model of the decoded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tgl
from tests.nn.seen import Sizes
from tgl.integrations import transformers as integration

transformers = pytest.importorskip("transformers")

from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.quantizers import auto  # noqa: E402

from tgl.integrations._packed_experts import PackedExperts  # noqa: E402

EXPERTS, HIDDEN, INTER, TOP_K = 8, 64, 96, 3
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a process that has just called it, whatever ran before."""
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "mxfp4", transformers.quantizers.quantizer_mxfp4.Mxfp4HfQuantizer)
    integration.register()


def configuration(**changes: Any) -> Any:
    sizes = {"vocab_size": 50, "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return transformers.GptOssConfig(
        num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, **{**sizes, **heads, **changes}
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one in the form of gpt-oss': weights of experts in blocks and scales, everything else in bfloat16."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(configuration()).bfloat16()
    tensors: dict[str, Tensor] = {}
    for name, t in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            made = tgl.group_quantize(t.transpose(1, 2).contiguous() * 10, None, format="mxfp4", columnwise=False)
            blocks, scales = tgl.nn.layouts.mxfp4_to_gpt_oss(made.data, made.scale)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            tensors[name] = torch.randn_like(t) if name.endswith("_bias") else t
    folder = tmp_path_factory.mktemp("gpt_oss")
    model.config.quantization_config = MXFP4
    model.config.save_pretrained(folder)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def load(checkpoint: Path, experts: str = "tgl", **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation=experts, **options)


def decoded(checkpoint: Path, **options: Any) -> Any:
    """transformers' own model of the decoded weights."""
    return load(checkpoint, "eager", quantization_config=transformers.Mxfp4Config(dequantize=True), **options)


def tokens() -> Tensor:
    return torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))


def packed(model: nn.Module) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


def test_outputs_and_gradients_are_those_of_the_decoded_weights(checkpoint: Path) -> None:
    ours, theirs = load(checkpoint, dtype=torch.float32), decoded(checkpoint, dtype=torch.float32).float()
    assert len(packed(ours)) == 2
    results = []
    for model in (ours, theirs):
        out = model(tokens(), labels=tokens())
        mlp = model.model.layers[0].mlp
        leaves = (
            model.model.embed_tokens.weight,
            mlp.router.weight,
            mlp.experts.gate_up_proj_bias,
            mlp.experts.down_proj_bias,
        )
        results.append((out.logits, *torch.autograd.grad(out.loss, leaves)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_gate_of_one_instance_is_computed(checkpoint: Path) -> None:
    def gate(gate_up: torch.Tensor) -> torch.Tensor:
        return torch.tanh(gate_up[..., ::2]) * gate_up[..., 1::2]

    ours, theirs = load(checkpoint, dtype=torch.float32), decoded(checkpoint, dtype=torch.float32).float()
    before = ours(tokens()).logits
    theirs.set_experts_implementation("batched_mm")
    for model in (ours, theirs):
        model.model.layers[0].mlp.experts._apply_gate = gate
    found = ours(tokens()).logits
    torch.testing.assert_close(found, theirs(tokens()).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, before)


def test_parameters_are_the_bytes_of_the_checkpoint(checkpoint: Path) -> None:
    from safetensors.torch import load_file

    model, file = load(checkpoint, dtype="auto"), load_file(checkpoint / "model.safetensors")
    state, _ = model.hf_quantizer.get_state_dict_and_metadata(model)
    assert state.keys() == file.keys()
    for name, t in file.items():
        assert state[name].dtype == t.dtype
        assert torch.equal(state[name], t), name


def test_no_weight_of_all_experts_is_decoded(checkpoint: Path) -> None:
    model = load(checkpoint, dtype="auto")
    experts = packed(model)[0]
    x = torch.randn(6, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    index = torch.rand(6, EXPERTS).topk(TOP_K).indices
    weights = torch.rand(6, TOP_K, dtype=torch.bfloat16, requires_grad=True)
    trained = [p for p in experts.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(experts.gate_up_proj_bias), id(experts.down_proj_bias)}
    with Sizes() as seen:
        torch.autograd.grad(experts(x, index, weights).sum(), (x, weights, *trained))
    assert 0 < seen.largest < 2 * 2 * INTER * HIDDEN


def test_saved_and_loaded(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, dtype="auto")
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype="auto")
    assert len(packed(again)) == 2
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    # And by transformers alone.
    torch.testing.assert_close(decoded(tmp_path)(tokens()).logits, decoded(checkpoint)(tokens()).logits)


def test_offloaded_to_the_host(checkpoint: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    with torch.no_grad():
        model = load(checkpoint, dtype="auto")
        expected = model(tokens()).logits
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert packed(model)[0].gate_up_proj.device.type == "meta"
        for _ in range(2):
            assert torch.equal(model(tokens()).logits, expected)


def test_adapters_of_peft(checkpoint: Path, tmp_path: Path) -> None:
    """Adapters train as on the decoded weights, with files that load in either; merging into packed weights raises."""
    peft = pytest.importorskip("peft")
    from tgl.integrations import peft as adapters

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    results = []
    for kind in ("packed", "decoded"):
        if kind == "packed":
            model = load(checkpoint, dtype=torch.float32)
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=names))
            torch.manual_seed(2)
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    nn.init.normal_(parameter, std=0.1)
            assert len(adapters.attach(model)) == 4
            model.save_pretrained(tmp_path)
        else:
            model = decoded(checkpoint, dtype=torch.float32).float()
            model = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert all("lora_" in name for name in trained)
        loss = model(tokens(), labels=tokens()).loss
        results.append([loss, *torch.autograd.grad(loss, [trained[name] for name in sorted(trained)])])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    served = load(checkpoint, dtype=torch.float32)
    model = peft.get_peft_model(served, peft.LoraConfig(r=4, target_modules=[], target_parameters=names))
    with pytest.raises(NotImplementedError, match="MXFP4GroupedTensor does not support"):
        model.merge_adapter()


def test_dropped_slots_leak_no_values(checkpoint: Path) -> None:
    experts = packed(load(checkpoint, dtype=torch.float32))[0]
    x, index, weights = torch.randn(5, HIDDEN), torch.randint(EXPERTS, (5, TOP_K)), torch.rand(5, TOP_K)
    skipped = index.clone()
    skipped[2] = EXPERTS
    poisoned = x.clone()
    poisoned[2] = float("nan")
    wanted = experts(x, index, weights)
    wanted[2] = 0
    torch.testing.assert_close(experts(poisoned, skipped, weights), wanted)


def test_generates_and_compiles(checkpoint: Path, fresh_compiler: None) -> None:
    model = load(checkpoint, dtype=torch.float32)
    prompt = tokens()[:1, :4]
    made = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert made.shape == (1, 8)
    experts = packed(model)[0]
    x, index, weights = torch.randn(5, HIDDEN), torch.randint(EXPERTS, (5, TOP_K)), torch.rand(5, TOP_K)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, index, weights), experts(x, index, weights))


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_other_implementations_are_loaded_as_ever(checkpoint: Path, experts: str) -> None:
    """transformers decodes where the kernels from the hub cannot be had."""
    model = load(checkpoint, experts)
    assert not packed(model)
    assert any(isinstance(module, GptOssExperts) for module in model.modules())


def test_decoded_on_request(checkpoint: Path) -> None:
    model = load(checkpoint, quantization_config=transformers.Mxfp4Config(dequantize=True))
    assert not packed(model)
    assert any(isinstance(module, GptOssExperts) for module in model.modules())
    assert model(tokens()).logits.isfinite().all()


def test_unsupported_models_raise(tmp_path: Path) -> None:
    dense = transformers.GptOssForCausalLM(configuration())
    dense.save_pretrained(tmp_path / "dense")
    with pytest.raises(NotImplementedError, match="a checkpoint that is not in MXFP4 is not quantised"):
        load(tmp_path / "dense", quantization_config=transformers.Mxfp4Config())
    other = transformers.MixtralConfig(
        vocab_size=50, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.MixtralForCausalLM(other)
    model.save_pretrained(tmp_path / "mixtral")
    other.quantization_config = MXFP4
    other.save_pretrained(tmp_path / "mixtral")
    with pytest.raises(NotImplementedError, match="MXFP4 stays packed in experts of gpt-oss; MixtralForCausalLM has"):
        load(tmp_path / "mixtral")
    with pytest.raises(ValueError, match="`down_proj` must have a multiple of 32 inputs for MXFP4, not 40"):
        PackedExperts(transformers.GptOssForCausalLM(configuration(intermediate_size=40)).model.layers[0].mlp.experts)
