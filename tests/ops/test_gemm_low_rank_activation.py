"""``grouped_gemm_low_rank_activation`` is a ``grouped_gemm_low_rank`` and a ``grouped_activation``, byte by byte."""

import pytest
import torch

import tgl
from tests.activation_cases import CASES
from tests.activation_cases import width as width_of
from tests.memory import same_bytes
from tests.ops.test_gradients import Calls
from tests.peak_memory import peak_memory
from tgl.testing import ROUTINGS

K, R, I = 8, 5, 12
NAMES = ("a", "weight", "low", "up", "bias", "probs")


def inputs(routing, kind, dtype, grad=False):
    """a, b as weights are kept, low, up as adapters are kept, bias and probs; NaN in every tail."""
    torch.manual_seed(0)
    width, groups = width_of(kind, I), len(routing.sizes)
    shapes = (routing.rows, K), (groups, width, K), (routing.rows, R), (groups, width, R), (groups, width)
    a, weight, low, up, bias = (torch.randn(shape).to(dtype) for shape in shapes)
    probs = torch.rand(routing.rows).to(torch.promote_types(dtype, torch.float32))
    for rows in (a, low, probs):
        rows[routing.routed :] = float("nan")
    return [t.requires_grad_(grad) for t in (a, weight, low, up, bias, probs)]


def as_one(offs, a, weight, low, up, bias, probs, out_dtype=None, **options):
    return tgl.grouped_gemm_low_rank_activation(
        a, weight.mT, low, up.mT, offs, bias, probs, out_dtype=out_dtype, **options
    )


def apart(offs, a, weight, low, up, bias, probs, out_dtype=None, **options):
    h = tgl.grouped_gemm_low_rank(a, weight.mT, low, up.mT, offs, bias, out_dtype=out_dtype)
    return tgl.grouped_activation(h, offs, probs, **options), h


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_same_bytes_as_two_ops(options, dtype):
    for name, routing in ROUTINGS.items():
        operands, offs = inputs(routing, options["kind"], dtype), routing.ends()
        for out_dtype in (None, torch.float32) if dtype == torch.bfloat16 and name == "ragged_tail" else (None,):
            found = as_one(offs, *operands, out_dtype=out_dtype, **options)
            assert all(map(same_bytes, found, apart(offs, *operands, out_dtype=out_dtype, **options))), name


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("through", [(True, False), (False, True), (True, True)], ids=["y", "h", "both"])
def test_the_same_gradients_as_two_ops(options, through):
    routing, results = ROUTINGS["ragged_tail"], []
    for op in (as_one, apart):
        leaves = inputs(routing, options["kind"], torch.bfloat16, grad=True)
        outputs = op(routing.ends(), *leaves, **options)
        generator = torch.Generator().manual_seed(1)
        cotangents = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in outputs]
        ends, seeds = zip(*((t, c) for t, c, chosen in zip(outputs, cotangents, through) if chosen))
        results.append(torch.autograd.grad(ends, leaves, seeds, allow_unused=True))
    for mine, theirs in zip(*results, strict=True):
        assert (mine is None and theirs is None) or same_bytes(mine, theirs)


def test_frozen_operands_cost_nothing():
    routing, wgrad = ROUTINGS["ragged_tail"], "grouped_gemm_wgrad"
    for wanted, op in zip(NAMES, ("grouped_gemm", wgrad, "grouped_gemm", wgrad, "grouped_dbias", None)):
        operands = dict(zip(NAMES, inputs(routing, "swiglu", torch.float32)))
        operands[wanted].requires_grad_()
        y, _ = as_one(routing.ends(), *operands.values())
        with Calls() as calls:
            y.backward(torch.ones_like(y))
        assert sorted(calls.names) == sorted(filter(None, ["grouped_activation_backward", op])), wanted
        assert operands[wanted].grad.is_contiguous()


def test_a_backward_frees_tensors_that_it_has_read():
    """The gradient of ``a`` is computed in memory that ``a`` had, unless the graph is kept for another backward."""
    x, weight, low, up = (torch.randn(s, requires_grad=True) for s in ((512, 64), (1, 24, 64), (512, R), (1, 24, R)))
    offs = torch.tensor([512], dtype=torch.int32)

    def step(retain_graph):
        y = as_one(offs, x * 1, weight, low, up, None, None)[0]
        y.sum().backward(retain_graph=retain_graph)
        for t in (x, weight, low, up):
            t.grad = None

    assert peak_memory(lambda: step(True)) - peak_memory(lambda: step(False)) >= x.nbytes


def test_autocast_keeps_probabilities():
    routing = ROUTINGS["ragged_tail"]
    *operands, probs = inputs(routing, "swiglu", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = as_one(routing.ends(), *operands, probs)
    wanted = as_one(routing.ends(), *(t.bfloat16() for t in operands), probs)
    assert all(map(same_bytes, found, wanted))


def test_explain_names_the_implementation():
    routing = ROUTINGS["ragged_tail"]
    a, weight, low, up, *_ = inputs(routing, "swiglu", torch.float32)
    report = tgl.explain(tgl.grouped_gemm_low_rank_activation, a, weight.mT, low, up.mT, routing.ends())
    assert [part.op for part in report.parts] == ["grouped_gemm_low_rank", "grouped_activation"]
