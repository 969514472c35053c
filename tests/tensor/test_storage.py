"""Clones, devices, files, modules."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import tgl
from tests.tensor.cases import CASES, MATRICES, ROWS, arguments, assert_same_bytes, rows

MAKERS = {
    "rows": lambda case: rows(case)[2],
    "stack": lambda case: tgl.quantize(torch.randn(3, 32, 48), None, **arguments(case)),
    "matrix": lambda case: tgl.quantize(torch.randn(32, 48), None, **arguments(case)),
    "list": lambda case: tgl.quantize([torch.randn(4, 32), torch.randn(6, 16)], None, **arguments(case)),
}
PAIRS = [(kind, case) for kind in MAKERS for case in (ROWS if kind == "rows" else MATRICES)]


def disjoint(x, y) -> bool:
    return not {p.data_ptr() for p in x.parts().values() if p.numel()} & {p.data_ptr() for p in y.parts().values()}


@pytest.mark.parametrize("kind, case", PAIRS)
def test_copies_and_files(kind, case):
    t = MAKERS[kind](case)
    file = io.BytesIO()
    torch.save({"t": t}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["t"]
    for other in (t.clone(), copy.deepcopy(t), loaded, pickle.loads(pickle.dumps(t)), t.to(t.dtype, copy=True)):
        assert_same_bytes(other, t)
        assert disjoint(other, t)
        assert torch.equal(other.dequantize(), t.dequantize())
    alias = t.detach()
    assert_same_bytes(alias, t)
    assert not disjoint(alias, t)
    like = torch.empty_like(t)
    assert like.same_structure(t)
    assert disjoint(like, t)
    meta = t.to("meta")
    assert (meta.device.type, meta.shape) == ("meta", t.shape)
    assert meta.same_structure(t)
    assert meta.dequantize().shape == t.shape


class Layer(nn.Module):
    def __init__(self, case, value=1.0):
        super().__init__()
        self.weight = nn.Parameter(tgl.quantize(torch.randn(2, 16, 32) * value, None, **arguments(case)))


@pytest.mark.parametrize("case", CASES)
def test_modules(case):
    layer, other = Layer(case), Layer(case, 3.0)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert isinstance(other.weight, nn.Parameter)
    assert_same_bytes(other.weight.detach(), layer.weight.detach())
    dense = torch.randn(2, 16, 32)
    other.load_state_dict({"weight": dense})  # a checkpoint of dense values
    assert_same_bytes(other.weight.detach(), tgl.quantize(dense, None, **arguments(case)))
    twin = copy.deepcopy(layer)
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.requires_grad
    assert_same_bytes(twin.weight.detach(), layer.weight.detach())
    values = layer.weight.dequantize()
    layer.to(torch.bfloat16)
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight.dequantize(), values.bfloat16())


def test_a_parameter_in_a_file():
    p = nn.Parameter(tgl.quantize(torch.randn(2, 16, 32), None, "nvfp4"), requires_grad=False)
    p.note = "kept"
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, nn.Parameter)
    assert (loaded.requires_grad, loaded.note) == (False, "kept")
    assert_same_bytes(loaded, p)


def test_single_matrices_of_a_state_dict_stack():
    w = tgl.quantize(torch.randn(3, 16, 32), None, "mxfp8", scale_layout="blocked")
    discrete = {f"weight{i}": part for i, part in enumerate(w)}
    file = io.BytesIO()
    torch.save(discrete, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same_bytes(torch.stack([loaded[f"weight{i}"] for i in range(3)]), w)
