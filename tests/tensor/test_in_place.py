"""Writing into the buffers of a GroupedTensor."""

import pytest
import torch

import tgl
from tests.tensor.cases import CASES, MATRICES, ROWS, arguments, assert_same_bytes, rows
from tgl.tensor import GroupedTensor


def addresses(t):
    return {name: part.data_ptr() for name, part in t.parts().items()}


@pytest.mark.parametrize("case", ROWS)
def test_rows(case):
    _, offs, t = rows(case)
    before = addresses(t)
    x = torch.randn(t.shape, dtype=torch.float32)
    assert t.quantize_(x) is t
    assert addresses(t) == before
    for actual, expected in zip(
        t.components(),
        tgl.quantize(x.to(t.dtype if case == "dense" else x.dtype), offs, **arguments(case)).components(),
    ):
        assert_same_bytes(actual, expected)


@pytest.mark.parametrize("case", ROWS)
def test_a_new_routing(case):
    """Buffers of one capacity serve every routing: nothing of the old one stays."""
    _, _, t = rows(case)
    for sizes in ((48, 0, 0, 0), (0, 0, 1, 0), (12, 12, 12, 12)):
        x, offs, expected = rows(case, sizes, 48 - sum(sizes))
        t.quantize_(x, offs=offs)
        assert_same_bytes(t, expected)
    assert t.offs.data_ptr() != offs.data_ptr()


@pytest.mark.parametrize("case", MATRICES)
def test_a_parameter_after_an_optimizer_step(case):
    master = torch.randn(2, 32, 48)
    weight = torch.nn.Parameter(tgl.quantize(master, None, **arguments(case)))
    before = addresses(weight)
    weight.dequantize().square().sum().backward()
    with torch.no_grad():
        master -= 0.1 * weight.grad
        weight.quantize_(master)
    assert addresses(weight) == before
    assert_same_bytes(weight.detach(), tgl.quantize(master, None, **arguments(case)))


@pytest.mark.parametrize("case", MATRICES)
def test_a_list(case):
    matrices = [torch.randn(n, k) for n, k in ((32, 64), (6, 130))]
    t = tgl.quantize([torch.zeros_like(m) for m in matrices], None, **arguments(case))
    t.quantize_(matrices)
    assert_same_bytes(t, tgl.quantize(matrices, None, **arguments(case)))


@pytest.mark.parametrize("flag", [torch.ones(1), torch.tensor(True), torch.tensor([True]), torch.tensor(2.0)])
@pytest.mark.parametrize("case", CASES)
def test_noop(case, flag):
    w = torch.randn(2, 32, 64)
    t = tgl.quantize(w, None, **arguments(case))
    expected = t.clone()
    t.quantize_(torch.randn(2, 32, 64), flag)
    assert_same_bytes(t, expected)
    t[1].quantize_(torch.randn(32, 64), flag)
    assert_same_bytes(t, expected)
    new = torch.randn(2, 32, 64)
    t.quantize_(new, torch.zeros_like(flag))
    assert_same_bytes(t, tgl.quantize(new, None, **arguments(case)))


def test_noop_keeps_the_groups():
    x, offs, t = rows("mxfp8")
    expected = t.clone()
    t.quantize_(x, torch.ones(1), offs=torch.zeros_like(offs))
    assert_same_bytes(t, expected)


def test_delayed_scaling():
    x, offs, _ = rows("fp8_tensor")
    scale = torch.tensor([1.0, 2.0, 4.0, 8.0])
    t = tgl.quantize(x, offs, "fp8_tensor", scale=scale)
    assert torch.equal(t.rowwise_scale, 1 / scale)
    t.quantize_(x, scale=scale / 2)
    assert_same_bytes(t, tgl.quantize(x, offs, "fp8_tensor", scale=scale / 2))
    matrices = [torch.randn(4, 8), torch.randn(2, 6)]
    t = tgl.quantize(matrices, None, "fp8_tensor", scale=scale[:2])
    assert [float(part.rowwise_scale) for part in t.split()] == [1.0, 0.5]


def test_stochastic_rounding():
    x, offs, _ = rows("nvfp4")
    rng = torch.tensor([1, 2])
    t = tgl.quantize(x, offs, "nvfp4", rng=rng)
    for actual, expected in zip(t.components(), tgl.group_quantize(x, offs, rng=rng, format="nvfp4")):
        assert_same_bytes(actual, expected)
    t.quantize_(x, rng=rng + 1)
    assert_same_bytes(t, tgl.quantize(x, offs, "nvfp4", rng=rng + 1))


@pytest.mark.parametrize("case", ["dense", "mxfp8", "nvfp4-blocked", "fp8_tensor"])
def test_copy(case):
    x, offs, t = rows(case)
    buffer = GroupedTensor.empty(t.shape, num_groups=4, source_dtype=t.dtype, **arguments(case))
    assert_same_bytes(buffer.copy_(t), t)  # the same structure: the components
    buffer.copy_(x[:44].new_zeros(x.shape))  # values: quantised
    assert_same_bytes(buffer, tgl.quantize(torch.zeros_like(x), offs, **arguments(case)))
    other = tgl.quantize(x, offs, "fp8_block")
    buffer.copy_(other)  # another format: the values that it stands for
    assert_same_bytes(buffer, tgl.quantize(other.dequantize(), offs, **arguments(case)))
    dense = torch.empty(t.shape)
    assert torch.equal(dense.copy_(t), t.dequantize(torch.float32))


def test_copy_is_differentiable():
    x = torch.randn(2, 4, 32, requires_grad=True)
    t = tgl.quantize(torch.zeros(2, 4, 32), None, "mxfp8").copy_(x * 2)
    t.dequantize().sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_in_inference_mode():
    w = torch.randn(2, 4, 32)
    t = tgl.quantize(torch.zeros_like(w), None, "mxfp8")
    with torch.inference_mode():
        t.quantize_(w)  # made outside
        inside = tgl.quantize(w, None, "mxfp8").quantize_(w)
        for other in (t, t.detach(), torch.stack(t.unbind()), inside.detach(), t.clone()):
            assert torch.equal(other.dequantize(), inside.dequantize())
    assert_same_bytes(t, tgl.quantize(w, None, "mxfp8"))
