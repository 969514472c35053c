"""The README's example of an emulated launch runs as it stands."""

import re
from pathlib import Path

import pytest

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")


def test_example(capsys):
    text = Path(__file__).parents[2].joinpath("README.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "emulate(" in block)
    exec(code, {})
    assert int(capsys.readouterr().out.split()[0]) > 0
