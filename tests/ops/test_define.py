"""Errors of ``define`` for the author of an op."""

import pytest
import torch

from tgl.ops._define import define


@pytest.mark.parametrize("rule", [lambda x, c: x, lambda x, c=1: x], ids=["none", "another"])
def test_a_rule_has_the_defaults_of_the_schema(rule):
    """The dispatcher drops arguments that equal their defaults."""
    with pytest.raises(ValueError, match="tgl::planted: `c` of the shape rule must have the default None"):
        define("planted(Tensor x, Tensor? c=None) -> Tensor", rule)
    assert not hasattr(torch.ops.tgl, "planted")
