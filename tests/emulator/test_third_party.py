"""Kernels written by others and known to run right on hardware: exact against torch, under adversarial timing."""

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"cutlass_operators": "cutlass.operators", "quack_gemm": "quack"}


USUAL = {("cutlass_operators", "sm_100a", "0"), ("quack_gemm", "sm_90a", "0")}
"""Each package and each architecture once; ``make test-full`` has the others, and further seeds."""


@pytest.mark.parametrize(
    ("driver", "arch", "seeds"),
    [
        pytest.param(*run, marks=[pytest.mark.slow] * (run not in USUAL))
        for run in itertools.product(PACKAGES, ("sm_90a", "sm_100a"), ("0", "1,2,3"))
    ],
)
def test_exact_against_torch(driver, arch, seeds):
    if importlib.util.find_spec(PACKAGES[driver]) is None:
        pytest.skip(f"{PACKAGES[driver]} is not installed")
    command = [sys.executable, "-m", f"tests.emulator.third_party.{driver}", "--arch", arch, "--seeds", seeds]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) >= 5
    assert {"grouped", "dense"} & {r.get("kind") for r in records}
    failures = {r["case"]: r.get("failure", r.get("error")) for r in records if r.get("error") != 0}
    assert not failures
