"""Operands at any strides and addresses on a CPU: results are those of contiguous copies."""

import pytest
import torch

from . import layouts


@pytest.mark.parametrize("name", layouts.OPS)
def test_as_of_contiguous_operands(name):
    calls = layouts.cover(layouts.calls(name), 2, "format")
    assert calls
    for call in calls:
        found = layouts.outputs(call, *call.arguments())
        args, named = call.arguments()
        written = {o.name for o in call.sample.signature.operands if o.written}
        names = [a.name for a in call.op._schema.arguments]

        def plain(name, value, written=written):
            return value.contiguous() if isinstance(value, torch.Tensor) and name not in written else value

        args = tuple(plain(name, value) for name, value in zip(names, args))
        named = {name: plain(name, value) for name, value in named.items()}
        for i, (a, b) in enumerate(zip(found, layouts.outputs(call, args, named), strict=True)):
            assert layouts.agree(call, a.contiguous(), b.contiguous()), f"{call}: output {i}"
