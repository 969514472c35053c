"""``tests.gpu.expert_parallel_ranks``, which is for GPUs, on two ranks of a CPU: it passes, and finds what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import expert_parallel_ranks as program

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("case", program.CASES)
def test_on_two_ranks(case):
    if case == "transformers":
        pytest.importorskip("transformers.distributed.expert_parallel")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", program.__name__, "--device", "cpu", "--cases", case]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    runs = {"demo": program.DEMO_RUNS, "transformers": program.TRANSFORMERS_RUNS}
    assert done.stdout.count(": passed") == len(runs[case])


def check_bounds() -> None:
    right = program.Update({"w": torch.ones(4), "b": torch.ones(2)}, torch.ones(3))
    near = program.Update({"w": torch.full((4,), 1.01), "b": torch.ones(2)}, torch.ones(3))
    assert near.error(right) == pytest.approx(0.02 / 6**0.5)
    assert near._replace(losses=torch.full((3,), 1.5)).error(right) == pytest.approx(0.5)
    program.check("near", near, right, 0.01)
    nan = near._replace(losses=torch.full((3,), torch.nan))
    for wrong, bound in ((near, 0.008), (nan, 1.0)):
        with pytest.raises(SystemExit, match="WRONG"):
            program.check("far", wrong if torch.distributed.get_rank() == 1 else right, right, bound)


def test_bounds(ranks):
    """All ranks stop where one is wrong."""
    ranks(check_bounds)
