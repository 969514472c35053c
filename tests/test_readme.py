"""The README's first example runs as it stands."""

import re
from pathlib import Path

import torch


def test_first_example():
    text = Path(__file__).parents[1].joinpath("README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    torch.manual_seed(0)
    scope: dict = {}
    exec(code, scope)
    gradients = {name: p.grad for name, p in scope["experts"].named_parameters()}
    assert set(gradients) == {"fc1.weight", "fc2.weight"}
    assert all(g is not None and g.isfinite().all() and g.any() for g in gradients.values())
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    scope["moe"](torch.randn(333, 512))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "one graph for every token count"
