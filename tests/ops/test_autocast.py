"""Autocast casts operands and biases, and leaves float64, routing probabilities and main gradients alone."""

import pytest
import torch

import tgl

OFFS = torch.tensor([2, 5], dtype=torch.int32)


def operands(dtype=torch.float32):
    return torch.randn(6, 4, dtype=dtype), torch.randn(2, 4, 3, dtype=dtype), torch.randn(2, 3, dtype=dtype)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_operands_are_cast(narrow):
    a, b, bias = operands()
    probs = torch.rand(6)
    with torch.autocast("cpu", dtype=narrow):
        y = tgl.grouped_gemm(a, b, OFFS, bias, probs)
        dw = tgl.grouped_gemm_wgrad(a, y.float(), OFFS)
    assert torch.equal(y, tgl.grouped_gemm(a.to(narrow), b.to(narrow), OFFS, bias.to(narrow), probs))
    assert torch.equal(dw, tgl.grouped_gemm_wgrad(a.to(narrow), y, OFFS))
    assert y.dtype == dw.dtype == narrow


def test_probabilities_keep_float32():
    """1 + 2^-12 is 1 in bfloat16, so a cast of the scale would show."""
    a, b = torch.zeros(6, 4), torch.zeros(2, 4, 3)
    scale = torch.full((6,), 1 + 2**-12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tgl.grouped_gemm(a, b, OFFS, torch.full((2, 3), 4096.0), scale, out_dtype=torch.float32)
    assert (y[:5] == 4097).all()


def test_a_scale_of_another_narrow_dtype_is_widened_rather_than_refused():
    a, b, bias = operands()
    scale = torch.rand(6).to(torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tgl.grouped_gemm(a, b, OFFS, bias, scale)
    narrow = (t.to(torch.bfloat16) for t in (a, b, bias))
    a, b, bias = narrow
    assert torch.equal(y, tgl.grouped_gemm(a, b, OFFS, bias, scale.float()))


def test_float64_is_untouched():
    a, b, bias = operands(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tgl.grouped_gemm(a, b, OFFS, bias)
    assert y.dtype == torch.float64
    assert torch.equal(y, tgl.grouped_gemm(a, b, OFFS, bias))


def test_mixed_dtypes_meet_in_the_autocast_dtype():
    a, b, _ = operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tgl.grouped_gemm(a.to(torch.bfloat16), b, OFFS)
    assert torch.equal(y, tgl.grouped_gemm(a.to(torch.bfloat16), b.to(torch.bfloat16), OFFS))


def test_out_dtype_holds():
    a, b, _ = operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tgl.grouped_gemm(a, b, OFFS, out_dtype=torch.float32).dtype == torch.float32


def test_main_grad_keeps_its_dtype():
    a, _, _ = operands()
    dy, main = torch.randn(6, 3), torch.zeros(2, 4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tgl.grouped_gemm_wgrad_accumulate_(a, dy, OFFS, main)
    narrow = (a.to(torch.bfloat16), dy.to(torch.bfloat16))
    assert torch.equal(main, tgl.grouped_gemm_wgrad(*narrow, OFFS, out_dtype=torch.float32))


def test_gradients_have_the_dtypes_of_the_leaves():
    a, b, bias = (t.requires_grad_() for t in operands())
    scale = torch.rand(6, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = tgl.grouped_gemm(a, b, OFFS, bias, scale)
    y.float().pow(2).sum().backward()
    assert {t.grad.dtype for t in (a, b, bias, scale)} == {torch.float32}


def test_the_expert_layer_runs_in_the_autocast_dtype():
    mlp = tgl.GroupedMLP(2, 8, 16, bias=True)
    x, probs, splits = torch.randn(6, 8), torch.rand(6, requires_grad=True), torch.tensor([2, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mlp(x, splits, probs)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert probs.grad.dtype == torch.float32
    assert {p.grad.dtype for p in mlp.parameters()} == {torch.float32}
