"""The page on moving from TransformerEngine: its example runs, and what it calls the same is there by that name."""

import inspect
import re
from pathlib import Path

import tgl

PAGE = (Path(__file__).parents[1] / "docs" / "moving_from_transformer_engine.md").read_text()


def names_called(verdict, section):
    """The arguments in the first column of the rows of ``section`` that ``verdict`` says."""
    text = PAGE[PAGE.index(section) :].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("|")]
    return {name for cell, said in rows if said.strip() == verdict for name in re.findall(r"`(\w+)", cell)}


def test_example():
    scope: dict = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], scope)
    layer = scope["layer"]
    assert layer.weight0.main_grad.any()
    assert not layer.weight1.main_grad.any()


def test_what_is_the_same_exists():
    of_layer, of_call = (inspect.signature(f).parameters for f in (tgl.GroupedLinear, tgl.GroupedLinear.forward))
    arguments = {*of_layer, *of_call}
    same = names_called("same", "## `GroupedLinear`, the module") - {"state", "_extra_state"}
    assert len(same) >= 12
    assert same <= arguments
    absent = names_called("absent", "## `GroupedLinear`, the module")
    assert len(absent) >= 10
    assert not absent & arguments


def test_linked_from_the_readme():
    assert "docs/moving_from_transformer_engine.md" in (Path(__file__).parents[1] / "README.md").read_text()
