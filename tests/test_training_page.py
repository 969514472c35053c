"""The examples of docs/training.md run one after the other, as they stand."""

import re
from pathlib import Path

import torch


def test_examples(fresh_compiler, capsys):
    text = (Path(__file__).parents[1] / "docs" / "training.md").read_text()
    scope: dict = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(example, scope)
        if "input_gradient" in example:
            layer, rows = scope["layer"], scope["rows"]
            (dx,) = torch.autograd.grad(layer(rows, scope["m_splits"]).sum(), rows)
            torch.testing.assert_close(scope["dx"], dx)
    copied = 2 * (4 * scope["T"] * (scope["H"] + scope["I"]) + 4 * scope["G"] * (1 + scope["I"]))
    assert capsys.readouterr().out == f"{copied} bytes copied\n"
    assert scope["mlp"].fc2.weight.main_grad.any()
