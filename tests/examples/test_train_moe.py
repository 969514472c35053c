"""The demo: a tiny run from the command line to the picture, and its parts."""

from __future__ import annotations

import functools
import json
import math
import runpy
import sys

import pytest
import torch

from examples.train_moe import data, model, recipes
from examples.train_moe.__main__ import main
from examples.train_moe.compare import compare
from examples.train_moe.model import Config, Transformer, load_balance
from examples.train_moe.train import autocast, sample

TINY = ["--dim", "32", "--layers", "1", "--experts", "4", "--top-k", "2", "--context", "32", "--batch", "32"]


def tiny_model(**changes):
    torch.manual_seed(0)
    return Transformer(Config(**{"dim": 32, "layers": 2, "experts": 4, "top_k": 2, "context": 32, **changes}))


def windows(seed=0):
    return torch.randint(256, (3, 33), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_run_from_the_command_line(backend, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(sys, "argv", ["train_moe", *TINY, "--steps", "100", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("examples.train_moe", run_name="__main__", alter_sys=True)
    done = capsys.readouterr()
    assert stop.value.code == 0, done.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())

    (first, before), *_, (last, after) = results["held_out"]
    assert (first, last) == (0, 100)
    assert len(results["train"]) == 100
    assert after < results["unigram"] - 0.2 < results["unigram"] < before

    assert set(results["tokens_per_second"]) == {"plain loop, eager", "tgl, eager", "tgl, compiled"}
    assert all(rate > 0 for rate in results["tokens_per_second"].values())
    assert results["loss_gap"] < 1e-12
    assert results["gradient_gap"] < 1e-12
    assert len({f"{loss:.4f}" for loss in results["losses"].values()}) == 1

    assert sum(map(sum, results["usage"])) == pytest.approx(1)
    assert min(map(min, results["usage"])) > 0

    picture = (tmp_path / "out" / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.rstrip(b"\0").endswith(b"IEND\xaeB`\x82")

    for text in ("fullgraph=True", "4 experts", "nats per byte", "bits per byte", "agree in float64", "tgl, compiled"):
        assert text in done.out
    assert "100/100" in done.err  # the progress bar


def test_a_run_with_a_recipe(tmp_path, capsys):
    assert main([*TINY, "--steps", "2", "--recipe", "mxfp8", "--no-compile", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["loss_gap"] < 1e-12  # of the same model without the recipe
    losses = results["losses"]
    assert losses["tgl, eager"] == pytest.approx(losses["plain loop, eager"], rel=1e-2)
    assert losses["tgl, eager"] != losses["plain loop, eager"]
    assert "MXFP8BlockScaling" in capsys.readouterr().out


def test_recipes_are_compared(capsys):
    small = ["--dim", "32", "--layers", "1", "--experts", "4", "--context", "32", "--steps", "3", "--no-compile"]
    assert recipes.main([*small, "--only", "mxfp8", "nvfp4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["recipe", "none", "mxfp8", "nvfp4"]
    assert float(lines[2].split()[1]) == pytest.approx(float(lines[1].split()[1]), rel=0.02)


def test_a_recipe_that_trains_badly_is_seen(monkeypatch, capsys):
    losses = {"none": 2.0, "mxfp8": 2.05, "nvfp4": 2.05}
    monkeypatch.setattr(recipes, "final_loss", lambda name, config, **kwargs: losses[name])
    assert recipes.main(["--only", "mxfp8", "nvfp4"]) == 1
    assert "beyond the limit: mxfp8\n" in capsys.readouterr().err


@pytest.mark.slow
def test_every_recipe_trains_as_bfloat16_does():
    assert recipes.main(["--no-compile"]) == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (["--steps", "0"], "--steps must be at least 1, but got 0"),
        (["--top-k", "9", "--experts", "8"], "--top-k must be at most --experts (8), but got 9"),
        (["--dim", "48"], "--dim must be a multiple of 32, but got 48"),
        (["--batch", "-1"], "--batch must be at least 1, but got -1"),
        (["--context", "many"], "argument --context: invalid int value: 'many'"),
        (["--recipe", "int8"], "argument --recipe: invalid choice: 'int8'"),
        (["--recipe", "mxfp8", "--dtype", "float64"], "--dtype must be float32 or bfloat16 with --recipe mxfp8"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--device", "abacus"], "--device must be a device of this machine, but got abacus"),
        (["--out", __file__], "--out must be a folder"),
    ],
)
def test_bad_options_get_one_error(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert message in errors[0]


def test_the_error_without_a_compiler_gives_a_remedy(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SystemExit):
        main([])
    assert "needs a C++ compiler such as g++ on the PATH; --no-compile trains without one" in capsys.readouterr().err


def test_a_window_longer_than_the_text_is_refused(capsys):
    with pytest.raises(SystemExit, match=r"^train_moe: .* more than 100000000 bytes to train on"):
        main(["--context", "100000000"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_loop_and_the_grouped_gemms_are_the_same_function(top_k):
    ours = tiny_model(top_k=top_k).double()
    loop = tiny_model(top_k=top_k).double().use_plain_loop()
    results = []
    for network in (ours, loop):
        nats, balance, rows = network(windows())
        (nats + balance).backward()
        results.append((nats, balance, rows))
    torch.testing.assert_close(results[0], results[1], rtol=1e-13, atol=0)
    for (name, p), q in zip(ours.named_parameters(), loop.parameters(), strict=True):
        assert q.grad.abs().max() > 0, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-14)


def test_a_wrong_loop_is_seen(monkeypatch):
    loop = model.plain_loop
    assert compare(tiny_model(), None, windows(), torch.float32).agree
    monkeypatch.setattr(model, "plain_loop", lambda *arguments: loop(*arguments) * (1 + 1e-6))
    assert not compare(tiny_model(), None, windows(), torch.float32).agree


def test_predictions_do_not_see_the_future():
    network = tiny_model().double()
    one = windows()[:, :-1]
    two = one.clone()
    two[:, 20:] = (two[:, 20:] + 1) % 256
    a, b = network.logits(one)[0], network.logits(two)[0]
    torch.testing.assert_close(a[:, :20], b[:, :20], rtol=1e-12, atol=1e-12)
    assert (a[:, 20:] - b[:, 20:]).abs().amax(dim=-1).min() > 1e-6


def test_active_parameters_are_those_that_top_k_experts_use():
    total, active = tiny_model(layers=1, experts=4, top_k=1).parameter_counts()
    per_expert = 3 * 32 * 64
    assert total - active == 3 * per_expert
    assert total == 2 * 256 * 32 + 4 * 32 * 32 + 4 * 32 + 3 * 32 + 4 * per_expert


def test_even_load_balance_is_one_and_a_collapsed_router_is_worse():
    even = load_balance(torch.full((8, 4), 0.25), torch.tensor([4, 4, 4, 4], dtype=torch.int32), 2)
    assert even.item() == 1
    collapsed = load_balance(torch.tensor([[0.5, 0.5, 0.0, 0.0]]), torch.tensor([1, 1, 0, 0], dtype=torch.int32), 2)
    assert collapsed.item() == 2


def test_files_are_held_out_whole_and_by_name(tmp_path):
    for i in range(200):
        (tmp_path / f"m{i}.py").write_bytes(bytes([32 + i % 90]) * 40)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_bytes(b"\x01" * 1000)
    corpus = data.load(8, tmp_path)
    again = data.load(8, tmp_path)
    assert sum(corpus.files) == 200
    assert 2 <= corpus.files[1] <= 30
    assert corpus.train.shape[0] == corpus.files[0] * 41 - 1
    assert not (corpus.train == 1).any()
    torch.testing.assert_close(corpus.held_out, again.held_out, rtol=0, atol=0)
    batch = corpus.batch(5, torch.Generator().manual_seed(0))
    assert batch.shape == (5, 9)
    text = bytes(corpus.train.tolist())
    assert all(bytes(window.tolist()) in text for window in batch)


def test_unigram_baseline_is_the_cross_entropy_of_byte_frequencies(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "HELD_OUT_SHARE", 0.5)
    for i in range(40):
        (tmp_path / f"{i}.py").write_bytes(b"ab" * 20)
    corpus = data.load(4, tmp_path)
    counts = {byte: 20 * corpus.files[0] for byte in b"ab"} | {0: corpus.files[0] - 1}
    total = sum(counts.values()) + 256
    targets = corpus.held_out[:, 1:].flatten().tolist()
    expected = -sum(math.log((counts[t] + 1) / total) for t in targets) / len(targets)
    assert corpus.unigram == pytest.approx(expected, rel=1e-12)


def test_bfloat16_trains_through_autocast():
    network = tiny_model()
    with autocast(torch.device("cpu"), torch.bfloat16):
        nats, _, _ = network(windows())
    nats.backward()
    exact = tiny_model().double()(windows())[0]
    assert nats.item() == pytest.approx(exact.item(), rel=2e-2)
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in network.parameters())


def test_a_sample_continues_the_prompt_and_repeats_with_its_seed():
    network = tiny_model()
    one, two, other = (sample(network, b"def", 50, dtype=torch.float32, seed=seed) for seed in (1, 1, 2))
    assert one == two != other
    assert one.startswith(b"def")
    assert len(one) == 53
