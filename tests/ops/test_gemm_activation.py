"""``grouped_gemm_activation`` is a ``grouped_gemm`` and a ``grouped_activation``, byte by byte, both ways."""

import pytest
import torch

import tgl
from tests.activation_cases import CASES
from tests.activation_cases import width as width_of
from tests.ops.test_gradients import Calls
from tgl.testing import ROUTINGS

K, I = 8, 12


def inputs(routing, kind, dtype, grad=False):
    """a, b as weights are kept, bias and probs; NaN in every tail."""
    generator = torch.Generator().manual_seed(0)
    width, groups = width_of(kind, I), len(routing.sizes)
    a = torch.randn(routing.rows, K, generator=generator).to(dtype)
    weight = torch.randn(groups, width, K, generator=generator).to(dtype)
    bias = torch.randn(groups, width, generator=generator).to(dtype)
    probs = torch.rand(routing.rows, generator=generator).to(torch.promote_types(dtype, torch.float32))
    a[routing.routed :] = probs[routing.routed :] = float("nan")
    return [t.requires_grad_(grad) for t in (a, weight, bias, probs)]


def apart(a, b, offs, bias, probs, out_dtype, options):
    h = tgl.grouped_gemm(a, b, offs, bias, out_dtype=out_dtype)
    return tgl.grouped_activation(h, offs, probs, **options), h


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_same_bytes_as_two_ops(options, dtype):
    for name, routing in ROUTINGS.items():
        a, weight, bias, probs = inputs(routing, options["kind"], dtype)
        offs, b = routing.ends(), weight.transpose(1, 2)
        out_dtypes = (None, torch.float32) if dtype == torch.bfloat16 and name == "ragged_tail" else (None,)
        for out_dtype in out_dtypes:
            y, h = tgl.grouped_gemm_activation(a, b, offs, bias, probs, out_dtype=out_dtype, **options)
            wanted = apart(a, b, offs, bias, probs, out_dtype, options)
            assert same(y, wanted[0]), name
            assert same(h, wanted[1]), name


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("through", [(True, False), (False, True), (True, True)], ids=["y", "h", "both"])
def test_the_same_gradients_as_two_ops(options, through):
    routing, results = ROUTINGS["ragged_tail"], []
    offs = routing.ends()
    for op in (lambda *args: tgl.grouped_gemm_activation(*args, **options), lambda *args: apart(*args, None, options)):
        a, weight, bias, probs = leaves = inputs(routing, options["kind"], torch.bfloat16, grad=True)
        outputs = op(a, weight.transpose(1, 2), offs, bias, probs)
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in outputs]
        ends, seeds = zip(*((t, c) for t, c, chosen in zip(outputs, cotangents, through) if chosen))
        results.append(torch.autograd.grad(ends, leaves, seeds, allow_unused=True))
    for mine, theirs in zip(*results, strict=True):
        assert (mine is None and theirs is None) or same(mine, theirs)


def test_a_backward_through_y_alone_adds_nothing_up():
    """Four ops, and no zeros made for the gradient of h, which is undefined."""
    routing = ROUTINGS["ragged_tail"]
    a, weight, bias, probs = inputs(routing, "swiglu", torch.float32, grad=True)
    y, _ = tgl.grouped_gemm_activation(a, weight.transpose(1, 2), routing.ends(), bias, probs)
    with Calls() as calls:
        y.backward(torch.ones_like(y))
    wanted = ["grouped_activation_backward", "grouped_dbias", "grouped_gemm", "grouped_gemm_wgrad"]
    assert sorted(calls.names) == wanted
    assert weight.grad.is_contiguous()


def test_frozen_operands_cost_nothing():
    routing = ROUTINGS["ragged_tail"]
    for wanted, ops in (("a", "grouped_gemm"), ("weight", "grouped_gemm_wgrad"), ("bias", "grouped_dbias")):
        operands = dict(zip(("a", "weight", "bias", "probs"), inputs(routing, "swiglu", torch.float32)))
        operands[wanted].requires_grad_()
        a, weight, bias, probs = operands.values()
        y, _ = tgl.grouped_gemm_activation(a, weight.transpose(1, 2), routing.ends(), bias, probs)
        with Calls() as calls:
            y.backward(torch.ones_like(y))
        assert sorted(calls.names) == sorted(["grouped_activation_backward", ops])


def test_autocast_keeps_probabilities():
    routing = ROUTINGS["ragged_tail"]
    a, weight, bias, probs = inputs(routing, "swiglu", torch.float32)
    b, offs = weight.transpose(1, 2), routing.ends()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, h = tgl.grouped_gemm_activation(a, b, offs, bias, probs)
    narrow = [t.to(torch.bfloat16) for t in (a, b, bias)]
    wanted = tgl.grouped_gemm_activation(*narrow[:2], offs, narrow[2], probs)
    assert same(y, wanted[0])
    assert same(h, wanted[1])


def test_explain_names_the_implementation():
    a, weight, *_ = inputs(ROUTINGS["ragged_tail"], "swiglu", torch.float32)
    report = str(tgl.explain("grouped_gemm_activation", a, weight.transpose(1, 2), ROUTINGS["ragged_tail"].ends()))
    assert "GEMM, then activation" in report
