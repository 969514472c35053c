"""The documented example, run as it is."""

import shutil
from pathlib import Path

from tests.processes import run_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "foreign_op.py"


def test_example(tmp_path):
    status, printed = run_script(Path(shutil.copy(EXAMPLE, tmp_path)), {}, timeout=500)
    assert status == 0, printed
    assert "  runs cumsum\n  not  loop of sums: lower priority" in printed
    assert "mylib::scale_groups keeps its contracts on " in printed
    assert "tgl::grouped_dbias with the kernel 'cumsum' keeps its contracts on " in printed
