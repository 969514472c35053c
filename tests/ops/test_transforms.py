"""Function transforms: ``torch.func.grad`` and ``vmap`` work at any depth; forward mode raises, never a silent zero."""

import pytest
import torch
from torch.autograd import forward_ad

import tgl

T, K, N, G = 6, 4, 3, 2
OFFS = torch.tensor([2, 5], dtype=torch.int32)
MEMBERS = torch.zeros(T, G, dtype=torch.float64)
MEMBERS[0:2, 0] = MEMBERS[2:5, 1] = 1


def operands():
    generator = torch.Generator().manual_seed(1)
    shapes = ((T, K), (G, K, N), (G, N), (T,))
    return tuple(torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)


def loss(a, b, bias, scale):
    hidden = tgl.grouped_gemm(a, b, OFFS, bias, scale)
    return tgl.grouped_activation(hidden[:, :2], OFFS, scale, kind="swiglu").pow(2).sum() + hidden.pow(3).sum()


def reference(a, b, bias, scale):
    hidden = torch.einsum("tk,gkn,tg->tn", a, b, MEMBERS) + (MEMBERS @ bias) * scale[:, None]
    y = torch.nn.functional.silu(hidden[:, :1]) * hidden[:, 1:2] * scale[:, None] * MEMBERS.sum(1, keepdim=True)
    return y.pow(2).sum() + hidden.pow(3).sum()


ARGNUMS = (0, 1, 2, 3)


def test_grad():
    args = operands()
    torch.testing.assert_close(torch.func.grad(loss, ARGNUMS)(*args), torch.func.grad(reference, ARGNUMS)(*args))


def test_grad_of_grad():
    args = operands()

    def twice(f):
        return torch.func.grad(lambda *x: sum(g.pow(2).sum() for g in torch.func.grad(f, ARGNUMS)(*x)), ARGNUMS)

    torch.testing.assert_close(twice(loss)(*args), twice(reference)(*args))


def test_grad_inside_ordinary_autograd():
    args = operands()
    results = []
    for f in (loss, reference):
        leaf = args[1].clone().requires_grad_()
        torch.func.grad(f)(args[0], leaf, *args[2:]).pow(2).sum().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_jacrev_of_jacrev_is_the_hessian():
    args = operands()
    hessian = torch.func.jacrev(torch.func.jacrev(loss))(*args)
    torch.testing.assert_close(hessian, torch.func.jacrev(torch.func.jacrev(reference))(*args))
    assert hessian.abs().sum() > 1


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_and_per_sample_gradients():
    _, b, bias, scale = operands()
    batch = torch.randn(3, T, K, dtype=torch.float64)
    for transform in (lambda f: f, torch.func.grad):
        results = [
            torch.vmap(transform(f), in_dims=(0, None, None, None))(batch, b, bias, scale) for f in (loss, reference)
        ]
        torch.testing.assert_close(*results)


def test_vmap_of_an_out_variant_raises():
    _, b, _, _ = operands()
    batch, out = torch.randn(3, T, K, dtype=torch.float64), torch.zeros(3, T, N, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"Batching rule not implemented for tgl::grouped_gemm\.out"):
        torch.vmap(lambda x, y: tgl.grouped_gemm(x, b, OFFS, out=y))(batch, out)
    assert not out.any()


def calls():
    a, b, bias, scale = operands()
    dy = torch.ones(T, N, dtype=torch.float64)
    return {
        "grouped_gemm": lambda x: tgl.grouped_gemm(x, b, OFFS, bias, scale),
        "grouped_gemm bias": lambda x: tgl.grouped_gemm(a, b, OFFS, bias * x.sum()),
        "grouped_gemm.out": lambda x: tgl.grouped_gemm(x, b, OFFS, out=torch.zeros(T, N, dtype=torch.float64)),
        "grouped_gemm_activation": lambda x: tgl.grouped_gemm_activation(x, b, OFFS, bias, scale, kind="srelu"),
        "grouped_gemm_low_rank_activation": lambda x: tgl.grouped_gemm_low_rank_activation(
            x, b, x, b, OFFS, bias, scale, kind="srelu"
        ),
        "grouped_gemm_low_rank": lambda x: tgl.grouped_gemm_low_rank(x, b, x, b, OFFS, bias, scale),
        "grouped_gemm_wgrad": lambda x: tgl.grouped_gemm_wgrad(x, dy, OFFS),
        "grouped_gemm_wgrad.out": lambda x: tgl.grouped_gemm_wgrad(x, dy, OFFS, out=torch.zeros_like(b)),
        "grouped_gemm_wgrad_accumulate_": lambda x: tgl.grouped_gemm_wgrad_accumulate_(
            x, dy, OFFS, torch.zeros_like(b)
        ),
        "grouped_dbias": lambda x: tgl.grouped_dbias(x, OFFS),
        "grouped_dbias_dscales": lambda x: tgl.grouped_dbias_dscales(x, x[:G], scale, OFFS),
        "grouped_activation": lambda x: tgl.grouped_activation(x, OFFS, scale),
        "grouped_activation_backward": lambda x: torch.ops.tgl.grouped_activation_backward(x[:, :2], x, OFFS),
        "grouped_gemm_dactivation": lambda x: tgl.grouped_gemm_dactivation(x, b, torch.cat([dy, dy], 1), OFFS, scale),
    }


@pytest.mark.parametrize("name", calls())
def test_forward_mode_raises(name):
    call, a = calls()[name], operands()[0]
    with pytest.raises(RuntimeError, match=r"has no forward-mode derivative \(jvp\)"):
        torch.func.jvp(call, (a,), (torch.ones_like(a),))
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(a, torch.ones_like(a))
        with pytest.raises(RuntimeError, match=r"has no forward-mode derivative \(jvp\)"):
            call(dual)


def test_forward_over_reverse_raises():
    """A hessian by jacfwd(jacrev) needs the tangent that the outer level carries through the inner one."""
    with pytest.raises(RuntimeError, match=r"has no forward-mode derivative \(jvp\)"):
        torch.func.hessian(loss)(*operands())


def test_a_tangent_of_another_input_does_not_matter():
    a, b, _, _ = operands()
    value, tangent = torch.func.jvp(
        lambda x: tgl.grouped_gemm(a, b, OFFS).sum() * x, (torch.tensor(2.0).double(),), (torch.tensor(1.0).double(),)
    )
    torch.testing.assert_close(value, 2 * tangent)
