"""The example that fine-tunes a transformers model: it learns, by the grouped ops, and as by transformers' own loop."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from examples import finetune_transformers  # noqa: E402


@pytest.fixture
def command(tmp_path, monkeypatch):
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    monkeypatch.setattr(finetune_transformers, "SIZES", finetune_transformers.SIZES | sizes)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return ["--text", str(text), "--steps", "12", "--context", "32", "--lr", "0.01", "--out", str(tmp_path / "out")]


def test_it_learns_as_by_transformers_own_loop(command):
    before, after = finetune_transformers.main(command)
    assert after < before - 1
    theirs = finetune_transformers.main([*command, "--experts", "eager"])
    assert (before, after) == pytest.approx(theirs, rel=1e-4)


def test_another_architecture(command):
    before, after = finetune_transformers.main([*command, "--config", "mixtral"])
    assert after < before - 1


def test_a_checkpoint(command, tmp_path):
    """A folder as ``save_pretrained`` makes it, with a tokenizer that needs no other files."""
    config = transformers.AutoConfig.for_model("qwen3_moe", **finetune_transformers.SIZES | {"vocab_size": 384})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "model")
    before, after = finetune_transformers.main([*command, "--model", str(tmp_path / "model")])
    assert after < before - 1


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--steps", "0"], "--steps must be at least 1, but got 0"),
        (["--text", "/nowhere.txt"], "--text must be files, but /nowhere.txt is none"),
        (["--context", "100000"], "--text must have 3200000 tokens, but has"),
    ],
)
def test_a_bad_value_is_named(wrong, message, command, capsys):
    with pytest.raises(SystemExit) as error:
        finetune_transformers.main([*command, *wrong])
    assert message in capsys.readouterr().err + str(error.value)
