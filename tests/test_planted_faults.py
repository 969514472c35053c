"""Planted faults: the run whose test sees a fault is named, and a fault without an effect is reported as not found."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    "pytest.ini": """
[pytest]
markers =
    slow
    gpu
""",
    "toy/functions.py": """
def smallest(values):
    list.sort(values, key=lambda value: value)
    return values[0]


def larger(a, b):
    return a if a > b else b


def doubled(a):
    return a * 2


def unused(a):
    return -a
""",
    "test_toy.py": """
import pytest
from toy.functions import doubled, larger, smallest


def test_larger():
    assert [larger(1, 3), larger(3, 1), larger(smallest([3, 1]), 2)] == [3, 3, 2]


@pytest.mark.slow
def test_doubled():
    assert doubled(3) == 6


def test_that_always_fails():
    assert larger(1, 1) == 2
""",
}
FAULTS = {
    "+ pass": "quick",
    "+ list.sort(values)": "not found",  # the key is the value, and functions after the lambda stay as they are
    "+ return values[1]": "quick",
    "+ return a if not a > b else b": "quick",
    "+ return a if a >= b else b": "not found",  # the larger of two equal numbers is either
    "+ return a // 2": "slices",
    "+ return a * 3": "slices",
    "+ return a": "not reached",
}


def planted(folder, *options):
    """Return the verdict about every fault of the toy package."""
    for path, text in FILES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    options = ["--packages", "toy", "--paths", "test_toy.py", "--count", "99", *options]
    command = [sys.executable, "-m", "tests.planted_faults", *options]
    env = {"PYTHONPATH": f"{ROOT}:{folder}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    blocks = [block.splitlines() for block in done.stdout.split("\n\n")]
    return {block[2]: block[0].split(":")[0] for block in blocks if len(block) == 4}


def test_verdicts(tmp_path):
    assert planted(tmp_path) == FAULTS


def test_verdicts_of_the_quick_run(tmp_path):
    without = {fault: "not reached" if verdict == "slices" else verdict for fault, verdict in FAULTS.items()}
    assert planted(tmp_path, "--tests", "quick") == without


def test_a_seed_draws_the_same_faults(tmp_path):
    first, again = (list(planted(tmp_path, "--count", count, "--seed", "1")) for count in "35")
    assert len(first) == 3
    assert first == again[:3]
