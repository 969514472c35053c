"""Calls of routing that nothing observes take one node and no op; everything that observes calls sees the ops."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import tgl
from tgl.nn.routing import dispatch_both


def problem(tokens=6, top_k=2, experts=4, columns=8, **options):
    routing = tgl.route(torch.randint(0, experts, (tokens, top_k)), experts)
    return routing, torch.randn(tokens, columns, **options), torch.rand(tokens, top_k, **options)


def there_and_back(routing, x, weights):
    rows, probs = dispatch_both(x, weights, routing)
    return tgl.combine(rows * probs[:, None], routing)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(op.name())
        return op(*args, **(kwargs or {}))


class SeenAbove(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_both_dispatches_are_one_node():
    routing, x, weights = problem(requires_grad=True)
    rows, probs = dispatch_both(x, weights, routing)
    assert rows.grad_fn is probs.grad_fn


@pytest.mark.parametrize("observed", ["forward", "backward"])
def test_a_dispatch_mode_sees_the_ops(observed):
    routing, x, weights = problem(requires_grad=True)
    seen = Seen()
    if observed == "forward":
        with seen:
            there_and_back(routing, x, weights)
        assert [n for n in seen.names if n.startswith("tgl::")] == ["tgl::dispatch", "tgl::dispatch", "tgl::combine"]
    else:
        loss = there_and_back(routing, x, weights).sum()
        with seen:
            loss.backward()
        assert [n for n in seen.names if n.startswith("tgl::")] == ["tgl::dispatch", "tgl::combine", "tgl::combine"]


def test_a_function_mode_sees_the_ops():
    routing, x, weights = problem()
    with SeenAbove() as seen:
        there_and_back(routing, x, weights)
    assert sum("tgl" in name for name in seen.names) == 3


def test_a_profile_names_the_ops():
    routing, x, weights = problem()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        there_and_back(routing, x, weights)
    assert {"tgl::dispatch", "tgl::combine"} <= {event.key for event in found.key_averages()}


class Named(torch.Tensor):
    """A subclass without a dispatch of its own."""


def test_a_subclass_of_tensor_is_kept():
    routing, x, weights = problem()
    rows, _ = dispatch_both(x.as_subclass(Named), weights, routing)
    assert type(rows) is Named
    assert type(tgl.combine(rows, routing)) is Named


def test_tangents_are_refused():
    routing, x, weights = problem()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            dispatch_both(dual, weights, routing)


def test_values_are_checked():
    routing, x, weights = problem()
    wrong = routing._replace(position=routing.position.flip(0))
    with tgl.debug_checks():
        for call in (lambda: tgl.dispatch(x, wrong), lambda: dispatch_both(x, weights, wrong)):
            with pytest.raises(ValueError, match="`token` must be the inverse of `position`"):
                call()


def test_gradients_are_those_of_the_ops():
    """Second derivatives too, and a batch in which some slots are dropped."""
    routing, x, weights = problem(requires_grad=True, dtype=torch.float64)
    for index in (routing.source.view(6, 2) % 4, routing.source.view(6, 2) % 5):
        found, wanted = [], []
        routing = tgl.route(index, 4)
        for results, mode in ((found, torch.enable_grad()), (wanted, Seen())):
            with mode:
                loss = there_and_back(routing, x, weights).pow(3).sum()
                first = torch.autograd.grad(loss, (x, weights), create_graph=True)
                results += [*first, *torch.autograd.grad(sum(g.pow(2).sum() for g in first), (x, weights))]
        for ours, op in zip(found, wanted, strict=True):
            assert torch.equal(ours, op)
