"""Every op on no rows, no columns, no groups: on a CPU with one thread and with two, and as kernels serve it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tgl
from tgl.testing import SIGNATURES, GroupSizes
from tgl.testing.signatures import overload

ROUTINGS = {
    "some": GroupSizes("some", (3, 0, 5, 1), 12),
    "no rows": GroupSizes("no rows", (0, 0, 0), 0),
    "no groups": GroupSizes("no groups", (), 4),
    "nothing": GroupSizes("nothing", (), 0),
}
WIDTH = 64
DTYPE = torch.bfloat16


def samples(name):
    """Yield a call for each size that is 0, and for no rows, no groups and neither; of every signature and format."""
    for signature in SIGNATURES[name]:
        most = max(signature.presence(), key=len)
        sizes = {letter: WIDTH if letter in "KMNI" else size for letter, size in signature.dimensions.items()}
        widths = [letter for letter in sizes if any(letter in dim for o in signature.operands for dim in o.dims)]
        for letter in {"S", "L"} & set(widths):  # rows that an index names, and a history: at least one
            widths.remove(letter)
        cases = [("some", letter) for letter in widths] + [(routing, None) for routing in ROUTINGS if routing != "some"]
        dtype = DTYPE if DTYPE in signature.dtypes else signature.dtypes[0]
        for routing, letter in cases:
            sized = replace(signature, dimensions=sizes if letter is None else {**sizes, letter: 0})
            seen = set()
            for sample in sized.samples(routings=[ROUTINGS[routing]], dtypes=[dtype]):
                form = sample.options.get("format")
                if sample.layout == "row" and sample.given == most and not sample.widened and form not in seen:
                    seen.add(form)
                    yield sample


def run(name, sample):
    op = overload(name)
    args, kwargs = sample.call(op, sample.tensors(tail=0.0))
    result = op(*args, **kwargs)
    written = {o.name for o in sample.signature.operands if o.written}
    given = {**dict(zip((a.name for a in op._schema.arguments), args)), **kwargs}
    returned = result if isinstance(result, (tuple, list)) else () if result is None else (result,)
    return [*returned, *(t for n, t in given.items() if n in written)]


def same(name, found, wanted):
    """Equal, to the byte where nothing is summed; of a rounding, where kernels sum in another order."""
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.shape == b.shape, f"{name}: {i}"
        if a.dtype in (torch.float32, torch.bfloat16) and not name.startswith("group_"):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
        else:
            one, other = (t.contiguous().view(-1).view(torch.uint8) if t.numel() else t for t in (a, b))
            assert torch.equal(one, other), f"{name}: {i}"


@pytest.mark.parametrize("name", SIGNATURES)
def test_empty_calls_on_a_cpu(name, threads):
    """Two threads are tried as well, because some of ATen's kernels divide by the share of a thread."""
    for sample in samples(name):
        torch.set_num_threads(1)
        wanted = run(name, sample)
        torch.set_num_threads(2)
        same(name, run(name, sample), wanted)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("columns, rows", [(0, 4), (3, 0), (0, 0)])
@pytest.mark.parametrize("count", [1, 2])
def test_tokens_to_rows_and_back(columns, rows, count, threads):
    torch.set_num_threads(count)
    tokens = rows // 2
    routing = tgl.route(torch.tensor([[0, 1], [1, 0]])[:tokens], 3)
    weights = torch.rand(tokens, 2, requires_grad=True)
    x = torch.randn(tokens, columns, requires_grad=True)
    y = tgl.dispatch(x, routing)
    assert y.shape == (rows, columns)
    for given in (weights, None):
        back = tgl.combine(y, routing, given)
        assert back.shape == (tokens, columns)
        back.sum().backward(retain_graph=True)
    assert x.grad.shape == x.shape
    assert weights.grad.eq(0).all() if not columns else True


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNATURES)
def test_empty_calls_of_kernels(name, arch):
    emulator = pytest.importorskip("tgl.testing.emulator")
    for sample in samples(name):
        wanted = run(name, sample)
        with emulator.emulate(arch, detect_races=False):
            same(name, run(name, sample), wanted)


RECIPES = (tgl.recipes.Float8CurrentScaling, tgl.recipes.DelayedScaling, tgl.recipes.Float8BlockScaling)


@pytest.mark.cover(1)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_of_no_experts(recipe, arch):
    emulator = pytest.importorskip("tgl.testing.emulator")
    layer = tgl.GroupedLinear(0, 128, 128, params_dtype=torch.bfloat16, recipe=recipe())
    x = torch.randn(4, 128, dtype=torch.bfloat16, requires_grad=True)
    with emulator.emulate(arch, detect_races=False):
        y = layer(x, torch.zeros(0, dtype=torch.int64))
        y.sum().backward()
    assert y.shape == (4, 128)
    assert not y.any()
    assert not x.grad.any()
