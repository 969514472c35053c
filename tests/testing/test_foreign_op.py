"""The documented example, run as it is."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "foreign_op.py"


def test_example():
    result = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    assert "  runs cumsum\n  not  loop of sums: lower priority" in result.stdout
    assert "mylib::scale_groups keeps its contracts on " in result.stdout
    assert "tgl::grouped_dbias with the kernel 'cumsum' keeps its contracts on " in result.stdout
