"""A fixed sample of planted bugs: the emulator must report every one of them, or show a wrong result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = json.loads((Path(__file__).parent / "mutation" / "sample.json").read_text())


def test_sample_is_large_and_varied():
    ids = [i for ids in SAMPLE.values() for i in ids]
    assert len(ids) >= 60
    assert len({i.split("@")[0] for i in ids}) >= 20
    assert sum(i.startswith("delete@") for i in ids) >= 25


@pytest.mark.parametrize("subject", SAMPLE)
def test_every_planted_bug_is_caught(subject):
    command = [sys.executable, "-m", "tests.mutation.worker", subject, "2", *SAMPLE[subject]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    records = {r["id"]: r for r in map(json.loads, done.stdout.splitlines())}
    assert sorted(records) == sorted(SAMPLE[subject]), "the compiled kernel no longer has these instructions"
    missed = [i for i, r in records.items() if r["verdict"] != "caught"]
    assert not missed
    assert not [i for i, r in records.items() if r["how"] == "internal error"]
