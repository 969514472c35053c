"""The README's first example runs as it stands, and its table has every op."""

import re
from pathlib import Path

import torch

from tgl.testing import SIGNATURES

TEXT = Path(__file__).parents[1].joinpath("README.md").read_text()


def test_first_example():
    code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
    torch.manual_seed(0)
    scope: dict = {}
    exec(code, scope)
    gradients = {name: p.grad for name, p in scope["experts"].named_parameters()}
    assert set(gradients) == {"fc1.weight", "fc2.weight"}
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients.values())
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    scope["moe"](torch.randn(333, 512))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "one graph for every token count"


def test_every_op_is_in_the_table():
    """Backward ops are the derivatives of those that stand there."""
    named = {name for row in re.findall(r"^\| (`.*?) \| ", TEXT, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    ops = {name.partition(".")[0] for name in SIGNATURES}
    missing = {op for op in ops - named if op.partition("_backward")[0] not in named}
    assert not missing
