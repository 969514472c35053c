"""Tensors that share components share their versions: what a backward needs may not be written in between."""

import pytest
import torch

import tgl
from tests.tensor.cases import arguments
from tgl.tensor import save_for_backward, saved_tensors

CHANGED = "modified by an inplace operation"


class Reads(torch.autograd.Function):
    """Saves a GroupedTensor, as a whole or by its components, and reads it in the backward."""

    @staticmethod
    def forward(ctx, x, t, whole):
        ctx.whole = whole
        (ctx.save_for_backward if whole else lambda t: save_for_backward(ctx, t))(t)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (t,) = ctx.saved_tensors if ctx.whole else saved_tensors(ctx)
        return grad * t.dequantize().sum(), None, None


ALIASES = {
    "itself": lambda t: t,
    "detach": lambda t: t.detach(),
    "alias": lambda t: torch.ops.aten.alias(t),
    "view": lambda t: t.view(t.shape),
    "parameter": lambda t: torch.nn.Parameter(t),
    "data": lambda t: torch.nn.Parameter(t).detach(),
    "select": lambda t: t[1],
    "unbind": lambda t: t.unbind()[1],
    "split": lambda t: t.split()[1],
}

WRITES = {
    "quantize_": lambda t: t.quantize_(torch.randn(t.shape)),
    "copy_": lambda t: t.copy_(torch.randn(t.shape)),
    "copy_ of its kind": lambda t: t.copy_(t.clone()),
    "a component": lambda t: next(iter(t.parts().values())).zero_(),
}


def make(case):
    return tgl.quantize(torch.randn(2, 32, 48), None, **arguments(case))


@pytest.mark.parametrize("case", ["dense", "mxfp8-blocked", "nvfp4"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("alias", ALIASES)
def test_a_write_through_one_is_seen_by_the_others(alias, write, case):
    t = make(case)
    x = torch.ones(3, requires_grad=True)
    y = Reads.apply(x, ALIASES[alias](t), False)
    with torch.no_grad():
        WRITES[write](t)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


@pytest.mark.parametrize("write", ["quantize_", "copy_"])
@pytest.mark.parametrize("alias", ["itself", "detach", "parameter", "select"])
def test_a_tensor_saved_as_a_whole(alias, write):
    """A function saves the tensor that knows nothing of components."""
    t = make("mxfp8")
    x = torch.ones(3, requires_grad=True)
    y = Reads.apply(x, ALIASES[alias](t), True)
    with torch.no_grad():
        WRITES[write](t)
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("alias", [name for name in ALIASES if name != "itself"])
def test_a_write_through_an_alias_is_seen_by_the_tensor(alias, write):
    t = make("mxfp8")
    x = torch.ones(3, requires_grad=True)
    y = Reads.apply(x, t, False)
    with torch.no_grad():
        WRITES[write](ALIASES[alias](t))
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()
