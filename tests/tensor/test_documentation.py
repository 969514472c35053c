"""The examples of the page about GroupedTensor run as they stand, and show what they say."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch


@pytest.mark.usefixtures("fresh_compiler")
def test_examples(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # no C++ compiler's time
    text = Path(__file__).parents[2].joinpath("docs/grouped_tensor.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code) == 7
    scope: dict = {}
    for block in code:
        exec(block, scope)
    printed = re.search(r"# (MXFP8GroupedTensor\(.*?\n# .*?\))\n", text, re.DOTALL).group(1)
    assert repr(scope["t"]) == re.sub(r"\n# +", " ", printed)
    assert (scope["t"].rowwise_data.dtype, scope["t"].rowwise_scale.shape) == (torch.float8_e4m3fn, (300, 16))
    grad = scope["x"].grad
    assert grad[:256].eq(1).all()
    assert not grad[256:].any()
    assert not scope["y"][256:].any()
    assert scope["weight"].dequantize()[[0, 2, 3]].any()
