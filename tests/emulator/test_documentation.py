"""The example in docs/emulator.md runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_ten_line_example(tmp_path):
    page = (ROOT / "docs" / "emulator.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    script = tmp_path / "example.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"\d+ warp instructions\n", done.stdout)
