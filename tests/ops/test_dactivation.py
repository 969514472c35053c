"""``grouped_gemm_dactivation`` is a grouped GEMM and an activation's backward, bit by bit."""

import pytest
import torch

import tgl
from tests.activation_cases import CASES
from tests.activation_cases import width as width_of
from tgl import backends
from tgl.backends.cpu import activation
from tgl.meta.specs import TensorSpec
from tgl.ops.grouped_activation import Params
from tgl.testing import ROUTINGS

K, I = 24, 40


def inputs(routing, kind, dtype):
    generator = torch.Generator().manual_seed(0)
    dy = torch.randn(routing.rows, K, generator=generator).to(dtype)
    h = torch.randn(routing.rows, width_of(kind, I), generator=generator).to(dtype)
    probs = torch.rand(routing.rows, generator=generator)
    for t in (dy, h, probs):
        t[routing.routed :] = float("nan")
    b = torch.randn(len(routing.sizes), I, K, generator=generator).to(dtype).transpose(1, 2)
    return dy, b, h, routing.ends(), probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_same_bits_as_two_ops(options, dtype):
    for routing in ROUTINGS.values():
        dy, b, h, offs, probs = inputs(routing, options["kind"], dtype)
        for given in (probs, None):
            fused = tgl.grouped_gemm_dactivation(dy, b, h, offs, given, **options)
            da = tgl.grouped_gemm(dy, b, offs)
            apart = torch.ops.tgl.grouped_activation_backward(da, h, offs, given, **options)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(fused, apart, strict=True))


@pytest.mark.cover(2)
@pytest.mark.parametrize("elements", [1 << 20, 200], ids=["one step", "several"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_with_the_activation_again(options, dtype, elements, monkeypatch):
    """The activation of the forward is returned again, with its bits, zero in the tail."""
    monkeypatch.setattr(activation, "_ELEMENTS", elements)
    for routing in ROUTINGS.values():
        dy, b, h, offs, probs = inputs(routing, options["kind"], dtype)
        for given in (probs, None):
            dh, dprobs = tgl.grouped_gemm_dactivation(dy, b, h, offs, given, **options)
            wanted = {"dh": dh, "dprobs": dprobs, "act": tgl.grouped_activation(h, offs, given, **options)}
            made = {name: TensorSpec(tuple(t.shape), t.dtype, t.device) for name, t in wanted.items()}
            found = backends.produce(
                "grouped_gemm_dactivation", h.device, made, [dy, b, h, offs, given], params=Params(**options)
            )
            assert all(torch.equal(found[name], t) for name, t in wanted.items())


def test_it_is_the_gradient_of_a_layer():
    """The gradient of activation and second GEMM by autograd."""
    dy, b, h, offs, probs = inputs(ROUTINGS["ragged_tail"], "swiglu", torch.float32)
    h, probs = h.requires_grad_(), probs.requires_grad_()
    y = tgl.grouped_gemm(tgl.grouped_activation(h, offs, probs), b.transpose(1, 2), offs)
    wanted = torch.autograd.grad(y, (h, probs), dy)
    with torch.no_grad():
        got = tgl.grouped_gemm_dactivation(dy, b, h, offs, probs)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))


def test_autocast():
    dy, b, h, offs, probs = inputs(ROUTINGS["ragged_tail"], "swiglu", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dh, dprobs = tgl.grouped_gemm_dactivation(dy, b, h, offs, probs.half())
    wanted = tgl.grouped_gemm_dactivation(dy.bfloat16(), b.bfloat16(), h.bfloat16(), offs, probs.half().float())
    assert torch.equal(dh, wanted[0])
    assert torch.equal(dprobs, wanted[1])


def test_unknown_kind():
    dy, b, h, offs, probs = inputs(ROUTINGS["ragged_tail"], "swiglu", torch.float32)
    with pytest.raises(ValueError, match=r"`kind` must be one of .*, but got 'no_such'"):
        tgl.grouped_gemm_dactivation(dy, b, h, offs, probs, kind="no_such")
