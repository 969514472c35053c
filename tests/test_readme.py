"""The README's examples run as they stand, and the reference's table has every op.

What a new user does with nothing but the README at hand is here, too: with transformers, with PEFT, with torch's own
products, and ``doctor`` after it.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch

from tests.nn.seen import Ops
from tgl import doctor
from tgl.testing import SIGNATURES

ROOT = Path(__file__).parents[1]
TEXT = ROOT.joinpath("README.md").read_text()


def test_it_fits_on_two_screens():
    lines = TEXT.splitlines()
    assert len(lines) <= 100
    assert [line for line in lines if len(line) > 100] == []


def test_first_example():
    code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
    torch.manual_seed(0)
    scope: dict = {}
    exec(code, scope)
    gradients = {name: p.grad for name, p in scope["experts"].named_parameters()}
    assert set(gradients) == {"fc1.weight", "fc2.weight"}
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients.values())
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    scope["moe"](torch.randn(333, 512))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "one graph for every token count"


def test_transformers():
    """The second example, and a step of its model."""
    pytest.importorskip("transformers")
    scope: dict = {}
    exec(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[1], scope)
    model, tokens = scope["model"], torch.randint(1000, (1, 16))
    with Ops() as ops:
        model(tokens, labels=tokens).loss.backward()
    assert {"moe", "moe_backward_input"} <= set(ops.names)
    assert all(p.grad is not None for p in model.parameters())


def tiny_gpt_oss():
    """Return a small gpt-oss with adapters of PEFT on its experts."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_local_experts": 8, "head_dim": 16}
    sizes |= {"vocab_size": 100, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=[], target_parameters=targets))


def test_adapters():
    model, tokens = tiny_gpt_oss(), torch.randint(100, (1, 16))
    import tgl.integrations.peft

    with pytest.raises(ValueError) as raised:
        tgl.integrations.peft.attach(model)
    for line in str(raised.value).rpartition("call ")[2].split(" and "):  # what the error says is what helps
        exec(f"import tgl.integrations.transformers\n{line}", {"model": model})
    tgl.integrations.peft.attach(model)
    with Ops() as ops:
        model(tokens, labels=tokens).loss.backward()
    assert "grouped_gemm_low_rank" in ops.names
    assert all("lora_" in name for name, p in model.named_parameters() if p.grad is not None)
    assert sum(p.grad is not None for p in model.parameters()) == 4


def test_products_of_torch():
    """``enable()`` is for GPUs; where there is none, ``explain`` and ``doctor`` say so."""
    import tgl

    given = torch.ones(4, 8), torch.ones(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)
    own = "ATen's grouped products are ATen's own"
    assert own in doctor.report()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tgl.integrations.torch.enable()
    found = [str(w.message) for w in seen if "torch finds no GPU, so nothing changes here" in str(w.message)]
    assert len(found) == (not torch.cuda.is_available())
    try:
        assert "not enabled for cpu" in str(tgl.explain(torch.ops.aten._grouped_mm, *given))
        assert "ATen's grouped products are served on cuda" in doctor.report()
        tgl.integrations.torch.enable(["cpu"])
        assert "runs tgl::grouped_gemm" in str(tgl.explain(torch.ops.aten._grouped_mm, *given))
        assert torch.nn.functional.grouped_mm(*given[:2], offs=given[2]).eq(8).all()
    finally:
        tgl.integrations.torch.disable()
    assert own in doctor.report()


def test_every_op_is_in_the_table():
    """Backward ops are the derivatives of those that stand there."""
    page = ROOT.joinpath("docs/api/ops.md").read_text()
    named = {name for row in re.findall(r"^\| (`.*?) \| ", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    ops = {name.partition(".")[0] for name in SIGNATURES}
    missing = {op for op in ops - named if op.partition("_backward")[0] not in named}
    assert not missing
