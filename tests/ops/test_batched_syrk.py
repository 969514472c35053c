"""Symmetric products on a CPU: torch's batched products, and errors."""

import pytest
import torch

import tgl
from tests.kernel_cases import integers
from tgl import optim

BF16 = torch.bfloat16


def symmetric(*shape, dtype):
    values = integers(*shape, dtype=dtype)
    return values.tril() + values.tril(-1).mT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["along K", "along M"])
def test_values(dtype, turned):
    torch.manual_seed(0)
    x = integers(3, 5, 70, dtype=dtype)
    x = x.mT.contiguous().mT if turned else x
    c, product = symmetric(3, 5, 5, dtype=dtype), x.double() @ x.double().mT
    assert torch.equal(tgl.batched_syrk(x), product.to(dtype))
    assert torch.equal(tgl.batched_syrk(x, alpha=0.5), (0.5 * product).to(dtype))
    assert torch.equal(tgl.batched_syrk(x, c), (product + c).to(dtype))
    assert torch.equal(tgl.batched_syrk(x, c, alpha=-2.0, beta=4.0), (4 * c.double() - 2 * product).to(dtype))
    assert torch.equal(tgl.batched_syrk(x, torch.full_like(c, float("nan")), beta=0.0), product.to(dtype))


def test_the_bits_of_a_symmetric_matrix_times_itself():
    """If ``c`` is ``x``, ``x`` is multiplied by itself, not its transpose, even if rounding left it asymmetric."""
    torch.manual_seed(0)
    s = torch.randn(2, 33, 33).bfloat16()
    assert torch.equal(tgl.batched_syrk(s, s, alpha=2.0, beta=-4.0), torch.baddbmm(s, s, s, beta=-4.0, alpha=2.0))
    assert torch.equal(tgl.batched_syrk(s, s.clone()), torch.baddbmm(s, s, s.mT))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_nothing_to_sum(shape):
    groups, rows, _ = shape
    assert torch.equal(tgl.batched_syrk(torch.ones(shape)), torch.zeros(groups, rows, rows))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(3, 4),), ValueError, r"`x` must be 3-D \[G, M, K\], but got shape \(3, 4\)"),
        ((torch.ones(2, 3, 4).int(),), TypeError, "`x` must be float64, float32, bfloat16 or float16"),
        ((torch.ones(2, 3, 4), torch.ones(2, 3, 4)), ValueError, r"`c` must be of shape \[G, M, M\] = \(2, 3, 3\)"),
        ((torch.ones(2, 3, 4), torch.ones(2, 3, 3).half()), TypeError, "`c` must be torch.float32 like `x`"),
        ((torch.ones(2, 3, 4), torch.ones(2, 3, 3, device="meta")), ValueError, "`c` must be on cpu like `x`"),
        ((torch.ones(2, 3, 4, requires_grad=True),), RuntimeError, "has no derivative.*`x` does; it is an optimizer's"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        tgl.batched_syrk(*arguments)


def test_a_step_of_muon_in_one_graph():
    torch.manual_seed(0)
    stack = torch.randn(2, 24, 40)
    compiled = torch.compile(optim.orthogonalized, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(stack), optim.orthogonalized(stack))


def test_muon_needs_no_implementation_of_the_device():
    assert optim.orthogonalized(torch.ones(2, 3, 4, device="meta")).shape == (2, 3, 4)
