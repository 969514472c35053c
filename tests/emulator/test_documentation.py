"""The examples in docs/emulator.md run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


PAGE = (ROOT / "docs" / "emulator.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"\d+ warp instructions\n|[\d.]+ cycles; [\d.]+ of the tensor cores\n\[.+\]\n", done.stdout)


def test_both_kinds_of_kernels_are_shown():
    assert ["cute.kernel" in code for code in EXAMPLES] == [False, True, False]
