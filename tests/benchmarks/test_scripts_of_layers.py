"""Scripts of ``benchmarks`` that run blocks, layers and models, on a CPU; see ``stand_in``."""

import json

import pytest
import torch

from tests.benchmarks.stand_in import ran


@pytest.fixture
def decode(gpu, load, monkeypatch):
    script = gpu("decode")
    of_a_gpu = script.Problem
    monkeypatch.setattr(script, "Problem", lambda block, tokens, layers: of_a_gpu(block, tokens, layers, "cpu"))
    monkeypatch.setattr(script, "kernels_of", lambda graph: [load("harness.kernels").Kernel("a", 6, 3.0)])
    monkeypatch.setitem(script.SHAPES, "small", script.Block(64, 48, 8, 2))
    monkeypatch.setattr(script, "grouped_mm", lambda: lambda layer, x: layer.oracle(x).bfloat16())
    return script


def test_decode(decode, monkeypatch, tmp_path, capsys):
    options = ("--shapes", "small", "--tokens", "4", "--bandwidth", "1")
    lines, found = ran(decode, tmp_path, capsys, *options, "--kernels")
    (result,) = found["results"]
    assert set(result["times"]) == set(decode.ARMS)
    assert not result["left out"]
    assert 2 <= result["experts hit"] <= 8
    assert result["bound"] == result["experts hit"] * 3 * 48 * 64 * 2 / 1e9  # ms at 1 TB/s
    (line,) = (line for line in lines if line[:2] == ["small", "4"])
    assert line[5 : 5 + len(decode.ARMS)] == ["1000.0"] * len(decode.ARMS)
    assert line[-2:] == ["6", "6"]
    assert all([arm, "3.0", "us", "6", "x", "a"] in lines for arm in ("tgl", "block", "torch"))
    monkeypatch.setattr(decode, "block", lambda layer, x, chosen, weights: torch.zeros_like(x))
    _, found = ran(decode, tmp_path, capsys, *options, "--arms", "tgl", "torch", "block")
    (result,) = found["results"]
    assert set(result["times"]) == {"torch"}
    assert set(result["left out"]) == {"tgl", "block"}


def test_decode_of_layers(decode, monkeypatch, tmp_path, capsys):
    """Each has its own experts and the result of the one before, and its number names it if it is wrong."""
    options = ("--shapes", "small", "--tokens", "4", "--bandwidth", "1", "--layers")
    lines, found = ran(decode, tmp_path, capsys, *options, "1", "3")
    one, result = found["results"]
    assert (one["layers"], result["layers"]) == ("1", "3")
    assert (set(result["times"]), result["left out"]) == (set(decode.ARMS), {})
    assert result["times"]["tgl"]["median"] == pytest.approx(1 / 3)
    assert result["bound"] == pytest.approx(result["experts hit"] * 3 * 48 * 64 * 2 / 1e9)
    (line,) = (line for line in lines if line[:3] == ["small", "4", "3"])
    assert line[-2:] == ["2", "2"]

    torch.manual_seed(0)
    problem = decode.Problem(decode.SHAPES["small"], 4, 3)
    assert len({layer.w1.sum().item() for layer in problem.layers}) == 3
    results = decode.arms_of(problem)["tgl"]()
    tokens = [problem.x, *results]
    for layer, x, y in zip(problem.layers, tokens, results, strict=False):
        assert 0.9 < y.float().square().mean().sqrt() < 1.1
        assert (y.float() - layer.oracle(x)).abs().max() < 0.1
    assert problem.wrong(results) is None
    results[1] = -results[1]
    assert problem.wrong(results).startswith("block 1: error 2")

    monkeypatch.setattr(decode, "chain", lambda p, serve: [serve(layer, p.x) for layer in p.layers])
    _, found = ran(decode, tmp_path, capsys, *options, "2", "--arms", "tgl")
    assert found["results"][0]["left out"]["tgl"].startswith("block 1: error ")
    with pytest.raises(SystemExit):
        decode.main(["--layers", "0"])


@pytest.fixture
def moe_block(gpu, uncompiled, monkeypatch):
    """The script with two small shapes."""
    script = gpu("moe_block")
    monkeypatch.setitem(script.SHAPES, "small", script.Block(96, 64, 32, 5, 2))
    monkeypatch.setitem(script.SHAPES, "biased", script.Block(96, 64, 32, 5, 2, biases=True))
    return script


def test_moe_block(moe_block, tmp_path, capsys):
    options = ("--shapes", "small", "biased", "--routings", "balanced", "zipf")
    lines, found = ran(moe_block, tmp_path, capsys, *options)
    assert [(r["shape"], r["routing"]) for r in found["results"]] == [
        (shape, routing) for shape in ("small", "biased") for routing in ("balanced", "zipf")
    ]
    ours = {"eager", "compiled", "captured"}
    further = {"torch", "torch captured", *moe_block.RECIPES}
    for result in found["results"]:
        served = ours if result["biases"] else ours | further
        assert set(result["step"]) == set(result["forward"]) == set(result["memory"]) == served, result["left out"]
        assert set(result["left out"]) == set(moe_block.ARMS) - served
        assert result["flops"] == 6 * 96 * 2 * 64 * 32
        assert set(result["prepared"]) == served
    assert ["small", "zipf", "captured", "1.000", "0", "1.000", "0", "1.000", "-0", "0"] in lines
    assert ["biased", "zipf:", "not", "torch:", "ValueError:", "takes", "no", "biases"] in lines
    for part in ("step", "forward"):
        assert ["eager", "/", "captured", part, "1.000", "(1.000,", "small", "balanced,", "of", "4)"] in lines
        assert ["torch", "/", "eager", part, "1.000", "(1.000,", "small", "balanced,", "of", "2)"] in lines
    assert ["SonicMoE:", "sonic-moe", "is", "not", "installed"] in lines


def test_a_block_that_does_not_fit_leaves_the_others(moe_block, monkeypatch, tmp_path, capsys):
    of_a_gpu = moe_block.Problem

    def problem(block, routing):
        if block.biases:
            raise torch.OutOfMemoryError
        return of_a_gpu(block, routing)

    monkeypatch.setattr(moe_block, "Problem", problem)
    options = ("--shapes", "biased", "small", "--routings", "zipf", "--arms", "eager", "captured")
    lines, found = ran(moe_block, tmp_path, capsys, *options)
    assert [set(result.get("step", {})) for result in found["results"]] == [set(), {"eager", "captured"}]
    assert ["biased", "zipf:", "out", "of", "memory"] in lines or lines[3][:3] == ["biased", "zipf", "out"]
    assert ["eager", "/", "captured", "step", "1.000", "(1.000,", "small", "zipf,", "of", "1)"] in lines


def test_a_case_that_is_cut_off_leaves_those_before(moe_block, monkeypatch, tmp_path, capsys):
    of_a_gpu = moe_block.run_case

    def cut_off(shape, routing, args):
        if routing == "zipf":
            raise KeyboardInterrupt
        return of_a_gpu(shape, routing, args)

    monkeypatch.setattr(moe_block, "run_case", cut_off)
    with pytest.raises(KeyboardInterrupt):
        ran(moe_block, tmp_path, capsys, "--shapes", "small", "--routings", "balanced", "zipf", "--arms", "eager")
    found = json.loads((tmp_path / "results.json").read_text())
    assert [result["routing"] for result in found["results"]] == ["balanced"]


def test_a_wrong_block_is_not_timed(moe_block, monkeypatch, tmp_path, capsys):
    right = moe_block.ARMS["eager"]
    monkeypatch.setitem(moe_block.ARMS, "eager", lambda p: lambda: right(p)() * 2)
    _, found = ran(
        moe_block, tmp_path, capsys, "--shapes", "small", "--routings", "zipf", "--arms", "compiled", "eager"
    )
    (result,) = found["results"]
    assert set(result["step"]) == {"compiled"}
    assert result["left out"]["eager"].startswith("output: error 1.0e+00")


@pytest.mark.parametrize("routing", ["balanced", "multinomial", "zipf"])
def test_choices_of_a_token_are_distinct(load, routing):
    script = load("moe_block")
    block = script.Block(4096, 8, 8, 16, 4)
    chosen = script.chosen(routing, block)
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    rows = chosen.flatten().bincount(minlength=16)
    assert (rows.max() == rows.min()) == (routing == "balanced")
    assert (rows.max() > 3 * rows.min()) == (routing == "zipf")


SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS_OF = {
    "qwen3-moe": {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss": {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture
def models(gpu, uncompiled, monkeypatch):
    """Each of the models, with every size that it names made small."""
    pytest.importorskip("transformers")
    script = gpu("transformers_models")
    for name, model in script.MODELS.items():
        small = model._replace(tokens=48, sizes={**model.sizes, **SMALL, **EXPERTS_OF[name]})
        monkeypatch.setitem(script.MODELS, name, small)
    return script


def test_transformers_models(models, tmp_path, capsys):
    lines, found = ran(models, tmp_path, capsys)
    assert [result["model"] for result in found["results"]] == list(models.MODELS) == list(EXPERTS_OF)
    served = {f"{experts} {way}" for experts in ("tgl", "grouped_mm") for way in models.WAYS}
    for result in found["results"]:
        assert set(result["step"]) == set(result["peak"]) == served, result["left out"]
        assert set(result["left out"]) == set(models.ARMS) - served
    assert ["captured", "1.000", "(1.000,", "qwen3-moe,", "of", "3)"] in lines


def test_attention_without_a_mask(models, tmp_path, capsys):
    _, found = ran(models, tmp_path, capsys, "--models", "mixtral", "--arms", "tgl eager", "--attention", "causal")
    (result,) = found["results"]
    assert result["attention"] == "causal"
    assert set(result["step"]) == {"grouped_mm eager", "tgl eager"}, result["left out"]


def test_a_model_with_a_wrong_loss_is_not_timed(models, monkeypatch, tmp_path, capsys):
    right = models.Problem.step
    monkeypatch.setattr(
        models.Problem, "step", lambda self, loss: [t * (1 if loss == self.loss else 1.1) for t in right(self, loss)]
    )
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda: function())
    _, found = ran(models, tmp_path, capsys, "--models", "mixtral", "--arms", "tgl eager", "tgl compiled")
    (result,) = found["results"]
    assert set(result["step"]) == {"grouped_mm eager", "tgl eager"}
    assert result["left out"]["tgl compiled"].startswith("loss: ")
