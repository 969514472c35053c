"""From tokens to tokens, products of a recipe that stay inside write nothing past the last group's rows.

New memory holds NaN, and does so behind the products: results without NaN, of the bits that they have where those rows
are zeros, say that it is never read.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tgl
from tests.memory import new_memory_is_nan
from tests.nn.seen import same
from tests.nn.test_moe_options import CHOSEN, EVERY, RECIPES, G, by_pieces, inputs, make, steps
from tests.zero_tails import zero_tails_asked
from tgl.nn._scaled_gemms import ScaledGemms

ROOM = 57  # more than there are choices, and of no unit
SCALED = [(recipe, option) for recipe, option in EVERY if recipe != "none"]
IN_GRAPHS = [("mxfp8", "delayed"), ("block", "plain"), ("current", "discrete"), ("nvfp4", "original")]


class Products(TorchDispatchMode):
    """The rows past the last group in the result of every scaled product of rows."""

    def __init__(self):
        super().__init__()
        self.tails = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.tgl.grouped_gemm_scaled.default:
            offs = args[4] if len(args) > 4 else kwargs["offs"]
            self.tails.append(made[int(offs[-1]) :].clone())
        return made

    def unwritten(self):
        return [bool(t.isnan().all()) for t in self.tails]


def zeros_are_written(monkeypatch):
    """Make every GEMM of a layer zero its tail."""
    for name in ("fprop", "dgrad"):
        ours = getattr(ScaledGemms, name)

        def written(self, *args, ours=ours):
            return ours(self, *args[:-1], {**args[-1], "zero_tail": True})

        monkeypatch.setattr(ScaledGemms, name, written)


def of_tokens(block, chosen, room=ROOM):
    return lambda x, w: block(x, tgl.route(chosen, G, num_rows=room), w)


@pytest.mark.parametrize(("recipe", "option"), SCALED)
def test_results_have_the_bits_of_written_rows(recipe, option, monkeypatch):
    one, other = make(recipe, option), make(recipe, option)
    with new_memory_is_nan(), Products() as seen:
        ours = steps(of_tokens(one, CHOSEN[2]), one)
    assert all(t.isfinite().all() for t in ours)
    # Of a step FC1's, FC2's and both gradients'; MXFP8's first product is of an op that writes zeros.
    assert seen.unwritten() == [True] * (2 * (3 if recipe == "mxfp8" else 4))
    zeros_are_written(monkeypatch)
    with new_memory_is_nan(), Products() as seen:
        theirs = steps(of_tokens(other, CHOSEN[2]), other)
    assert not any(seen.unwritten())
    assert not any(t.any() for t in seen.tails)
    assert same(ours, theirs)


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "none"])
def test_results_of_rows_end_in_zeros(recipe):
    """``GroupedMLP`` hands rows to its caller: those of its result, and of the gradient of its input."""
    block = make(recipe, "discrete")
    routing = tgl.route(CHOSEN[2], G, num_rows=ROOM)
    end = int(routing.offs[-1])
    x, weights, _ = inputs()
    rows = tgl.dispatch(x.detach(), routing).requires_grad_()
    with new_memory_is_nan(), Products() as seen:
        y = block.forward_offsets(rows, routing.offs, tgl.dispatch_weights(weights.detach(), routing))
        y.backward(torch.ones_like(y))
    assert not y[end:].any()
    assert not rows.grad[end:].any()
    assert all(t.isfinite().all() for t in (y, rows.grad))
    of_hidden, of_gradient = [True] * (recipe != "mxfp8"), True
    assert seen.unwritten() == [*of_hidden, False, of_gradient, False]


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "none"])
def test_without_gradients(recipe):
    block = make(recipe, "discrete").eval()
    x, weights, _ = inputs()
    with torch.inference_mode():
        wanted = block(x, CHOSEN[2], weights)
        with new_memory_is_nan(), Products() as seen:
            y = of_tokens(block, CHOSEN[2])(x, weights)
    assert torch.equal(y, wanted)
    assert seen.tails
    assert all(seen.unwritten())


def test_all_slots_are_dropped():
    """If no expert has a row, only unused rows exist, and every token gets zeros."""
    block = make("block", "discrete")
    x, weights, dy = inputs()
    with new_memory_is_nan(), Products() as seen:
        y = of_tokens(block, torch.full_like(CHOSEN[2], -1))(x, weights)
        y.backward(dy)
    assert seen.tails
    assert all(seen.unwritten())
    for t in (y, x.grad, weights.grad, *(p.grad for p in block.parameters())):
        assert not t.any()


def compiled_step(recipe, option, backend):
    one, other = make(recipe, option, torch.float32), make(recipe, option, torch.float32)
    if one.fc1.delay_wgrad_compute:
        for block in (one, other):
            block.reserve_delayed_wgrad(ROOM, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(of_tokens(one, CHOSEN[2]), fullgraph=True, backend=backend)
    with new_memory_is_nan(), zero_tails_asked() as found:
        ours = steps(compiled, one, dtype=torch.float32)
    # Of MXFP8's first product, which is of another op, implementations are asked more than once.
    assert found.count(False) == 2 * (3 if recipe == "mxfp8" else 4)
    assert (True in found) == (recipe == "mxfp8")
    routing = tgl.route(CHOSEN[2], G, num_rows=ROOM)
    theirs = steps(lambda x, w: by_pieces(other, x, routing, w), other, dtype=torch.float32)
    assert all(t.isfinite().all() for t in ours)
    return ours, theirs


@pytest.mark.parametrize(("recipe", "option"), IN_GRAPHS)
def test_one_graph(recipe, option):
    """Compiled ahead of time, the bits of the pieces, whose rows end in zeros."""
    assert same(*compiled_step(recipe, option, "aot_eager"))


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "option"), IN_GRAPHS)
def test_one_graph_of_inductor(recipe, option):
    """Code that Inductor generates around the products does not read the unwritten rows either."""
    for ours, theirs in zip(*compiled_step(recipe, option, "inductor"), strict=True):
        torch.testing.assert_close(ours, theirs)
