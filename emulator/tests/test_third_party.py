"""Kernels written by others and known to run right on hardware: exact against torch, under adversarial timing."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from .third_party.__main__ import DRIVERS

ROOT = Path(__file__).resolve().parents[1]


def run(driver, *arguments):
    """The records of a driver, all of them without an error."""
    command = [sys.executable, "-m", f"tests.third_party.{driver}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    records = [json.loads(line) for line in done.stdout.splitlines()]
    failures = {r["case"]: r.get("failure", r.get("error")) for r in records if r.get("error") != 0}
    assert not failures
    return records


USUAL = {("cutlass_operators", "sm_100a", "0"), ("quack_gemm", "sm_90a", "0")}
"""Each package and each kind of wide MMAs once; ``make test-full`` has the others, and further seeds."""


@pytest.mark.parametrize(
    ("driver", "arch", "seeds"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in USUAL))
        for case in ((*driver, seeds) for driver, seeds in itertools.product(DRIVERS, ("0", "1,2,3")))
    ],
)
def test_exact_against_torch(driver, arch, seeds):
    records = run(driver, "--arch", arch, "--seeds", seeds)
    assert len(records) >= 2
    assert {"grouped", "dense"} & {r.get("kind") for r in records}


@pytest.mark.parametrize(("driver", "case"), [("cutlass_operators", "sm80_bf16"), ("quack_gemm", "sm120_mxfp8")])
def test_one_with_mmas_of_warps(driver, case):
    (record,) = run(driver, case)
    assert record["mma"]
