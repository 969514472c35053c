"""Derivatives pass straight through, and what is saved on the way are components."""

import pytest
import torch

import tgl
from tests.tensor.cases import MATRICES, ROWS, arguments, assert_same_bytes, rows
from tgl.tensor import save_for_backward, saved_tensors

NAN = float("nan")


@pytest.mark.parametrize("case", ROWS)
def test_straight_through_rows(case):
    x, offs, _ = rows(case)
    x.requires_grad_()
    t = tgl.quantize(x, offs, **arguments(case))
    gradient = torch.randn(x.shape).to(x.dtype)
    gradient[44:] = NAN
    t.dequantize().backward(gradient)
    assert type(x.grad) is torch.Tensor
    assert torch.equal(x.grad[:44], gradient[:44])
    assert not x.grad[44:].any(), "what the tail of a gradient holds goes nowhere"


@pytest.mark.parametrize("case", MATRICES)
def test_straight_through_matrices(case):
    w = torch.randn(2, 32, 16, requires_grad=True)
    gradient = torch.randn(w.shape)
    tgl.quantize(w, None, **arguments(case)).dequantize(torch.bfloat16).backward(gradient.bfloat16())
    assert torch.equal(w.grad, gradient.bfloat16().float())
    matrices = [torch.randn(n, 16, requires_grad=True) for n in (16, 4)]
    flat = tgl.quantize(matrices, None, **arguments(case)).dequantize()
    flat.backward(torch.arange(320.0))
    assert torch.equal(torch.cat([m.grad.reshape(-1) for m in matrices]), torch.arange(320.0))


def test_through_clone_and_casts():
    x = torch.randn(8, 32, requires_grad=True)
    t = tgl.quantize(x, None, "mxfp8")
    (t.clone().to(torch.bfloat16).dequantize(torch.float32) * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_through_single_matrices():
    w = torch.nn.Parameter(tgl.quantize(torch.randn(3, 4, 32), None, "mxfp8"))
    first, _, last = w.unbind()
    (torch.stack([first, last]).dequantize().sum() + w[2].dequantize().sum()).backward()
    assert w.grad.sum(dim=(1, 2)).tolist() == [128.0, 0.0, 256.0]


def test_second_derivative():
    x = torch.randn(4, 32, requires_grad=True)
    y = tgl.quantize(x, None, "mxfp8").dequantize()
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    first.sum().backward()
    assert torch.equal(x.grad, 6 * y.detach())


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_row_scale(scale_dtype):
    x, offs, _ = rows("mxfp8")
    x.requires_grad_()
    probs = torch.rand(48).to(scale_dtype).requires_grad_()
    t = tgl.quantize(x, offs, "mxfp8", row_scale=probs)
    with torch.no_grad():
        for actual, part in zip(t.components(), tgl.group_quantize(x, offs, row_scale=probs, format="mxfp8")):
            assert_same_bytes(actual, part)
    gradient = torch.randn(x.shape).bfloat16()
    t.dequantize().backward(gradient)
    a, b = x.detach()[:44].float().requires_grad_(), probs.detach()[:44].float().requires_grad_()
    (a * b[:, None]).backward(gradient[:44].float())
    torch.testing.assert_close(x.grad[:44].float(), a.grad, rtol=0.008, atol=0)
    torch.testing.assert_close(probs.grad[:44].float(), b.grad, rtol=0.008, atol=1e-5)
    assert not x.grad[44:].any()
    assert not probs.grad[44:].any()


def test_a_parameter_gets_a_dense_gradient():
    p = torch.nn.Parameter(tgl.quantize(torch.randn(2, 16, 32), None, "mxfp8"))
    assert isinstance(p, torch.nn.Parameter)
    assert isinstance(p, tgl.MXFP8GroupedTensor)
    for count in (1, 2):
        p.dequantize().sum().backward()
        assert type(p.grad) is torch.Tensor
        assert torch.equal(p.grad, torch.full((2, 16, 32), float(count)))


class Scaled(torch.autograd.Function):
    """Values times ``w``, saving what it read."""

    @staticmethod
    def forward(ctx, t, w):
        save_for_backward(ctx, t, None, w)
        return t.dequantize(torch.float32) * w

    @staticmethod
    def backward(ctx, grad):
        t, nothing, w = saved_tensors(ctx)
        assert nothing is None
        return grad * w, (grad * t.dequantize(torch.float32)).sum(0)


@pytest.mark.parametrize("case", ROWS)
def test_saved_by_components(case):
    x, offs, t = rows(case)
    w = torch.randn(96, requires_grad=True)
    packed = []

    def pack(saved):
        packed.append(saved)
        return saved.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = Scaled.apply(t, w)
    assert all(type(saved) is torch.Tensor for saved in packed)
    assert {id(part) for part in t.parts().values()} <= {id(saved) for saved in packed}
    for part in t.parts().values():
        part.zero_()  # the hooks hold copies
    y.sum().backward()
    expected = tgl.quantize(x, offs, **arguments(case)).dequantize(torch.float32).sum(0)
    torch.testing.assert_close(w.grad, expected)


def test_save_on_cpu():
    _, _, t = rows("mxfp8")
    w = torch.randn(96, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = Scaled.apply(t, w)
    y.sum().backward()
    torch.testing.assert_close(w.grad, t.dequantize(torch.float32).sum(0))


def test_writing_into_a_saved_tensor_is_noticed():
    _, _, t = rows("mxfp8")
    w = torch.randn(96, requires_grad=True)
    y = Scaled.apply(t, w)
    t.quantize_(torch.zeros(48, 96))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
