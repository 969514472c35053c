"""The demo over two ranks trains as on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.train_moe import parallel
from examples.train_moe.__main__ import main, options
from examples.train_moe.model import Config, Transformer
from examples.train_moe.parallel import OneRank, Ranks

ROOT = Path(__file__).parents[2]
CONFIG = Config(dim=32, layers=2, experts=4, top_k=2, context=16)
TINY = ["--dim", "32", "--layers", "1", "--experts", "4", "--top-k", "2", "--context", "32", "--batch", "8"]


def check_steps() -> None:
    """Three steps of SGD, whose updates tell a wrong factor of a gradient, which Adam would hide."""
    windows = torch.randint(256, (3, 4, CONFIG.context + 1))
    trained, losses = [], []
    for ranks in (OneRank(), Ranks(dist.group.WORLD)):
        torch.manual_seed(1)
        model = ranks.shared(Transformer(CONFIG).double(), 4 * CONFIG.context)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for batch in windows:
            nats, balance, _ = model(ranks.windows(batch))
            (nats + 0.01 * balance).backward()
            losses.append(ranks.finish_backward(model, nats))
            optimizer.step()
            optimizer.zero_grad()
        trained.append(ranks.whole(model))
    assert losses[3:] == pytest.approx(losses[:3], abs=1e-12)
    for ours, theirs in zip(trained[1].parameters(), trained[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_two_ranks_train_as_one(ranks):
    ranks(check_steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ep", "0"], "--ep must be at least 1, but got 0"),
        (["--ep", "2"], "--ep must be the number of ranks that torchrun has started, 1, but got 2"),
        (["--ep", "3"], "--experts must be a multiple of --ep (3), but got 4"),
    ],
)
def test_bad_numbers_of_ranks(capsys, arguments, message):
    with pytest.raises(SystemExit):
        options([*TINY, *arguments])
    assert message in capsys.readouterr().err


def test_every_rank_has_a_gpu_of_its_own(monkeypatch):
    """Every rank selects its GPU before anything is allocated, which would otherwise be on the first one."""
    taken = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: taken.append((args, options)))
    monkeypatch.setattr(parallel, "Ranks", lambda group: "both")
    own = torch.device("cuda", 1)
    assert parallel.started(2, torch.device("cuda")) == (own, "both")
    assert taken == [own, (("nccl",), {"device_id": own})]
    with pytest.raises(ValueError, match=r"^--device must be cuda with --ep 2, .* but got cuda:0$"):
        parallel.started(2, torch.device("cuda:0"))


@pytest.mark.parametrize("engine", ["all_to_all", "symmetric_memory"])
def test_the_engine_reaches_the_layers(ranks, engine):
    ranks(check_engine, engine)


def check_engine(engine: str) -> None:
    made = Ranks(dist.group.WORLD)
    if engine == "symmetric_memory":  # which no CPU has
        with pytest.raises(RuntimeError, match="`engine='symmetric_memory'` is not available"):
            made.shared(Transformer(CONFIG), CONFIG.context, engine)
    else:
        blocks = made.shared(Transformer(CONFIG), CONFIG.context, engine).blocks
        assert {block.moe.experts.exchange.engine for block in blocks} == {engine}


@pytest.mark.slow
def test_a_run_from_the_command_line(tmp_path):
    """One graph on each of two ranks that torchrun starts, against one rank in eager mode."""
    run = ["--steps", "3", "--dtype", "float64", "--out"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "examples.train_moe", *TINY, *run, str(tmp_path / "two"), "--ep", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("agree in float64") == 1  # of rank 0 alone
    assert main([*TINY, *run, str(tmp_path / "one"), "--no-compile"]) == 0
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    for name in ("train", "usage"):
        assert torch.allclose(torch.tensor(two[name]), torch.tensor(one[name]), rtol=1e-12, atol=1e-12)
