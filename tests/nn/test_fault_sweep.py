"""An error at every op of a step: what a layer leaves behind is whole or untouched, and the step can be repeated.

Eagerly every op that the dispatcher sees raises in turn, ATen's among them; in a compiled layer every node of its two
graphs. Afterwards a parameter has its whole gradient of the step, or what it had before.
"""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nn.test_faults import OPTIONS, T, assert_same, gradients, make, recover


class Faults:
    """Counts events, and raises at the one whose number is ``at``."""

    def __init__(self):
        self.at = self.count = 0

    def event(self):
        self.count += 1
        if self.count == self.at:
            raise torch.OutOfMemoryError("no memory, on purpose")

    def run(self, call, at=0):
        self.at, self.count = at, 0
        try:
            return call()
        finally:
            self.at = 0


class EveryOp(TorchDispatchMode):
    def __init__(self, faults):
        super().__init__()
        self.faults = faults

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.faults.event()
        return op(*args, **(kwargs or {}))


def every_node(faults):
    """A backend that runs graphs node by node."""

    class Runner(torch.fx.Interpreter):
        def run_node(self, node):
            if node.op == "call_function":
                faults.event()
            return super().run_node(node)

    def compiler(graph, inputs):
        return make_boxed_func(Runner(graph).run)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def eagerly(mlp, faults):
    def forward_and_backward(x, splits, probs):
        with EveryOp(faults):
            # A gradient of the input alone, and then all of them.
            torch.autograd.grad(mlp(x, splits, probs).sum(), x)
            mlp(x, splits, probs).sum().backward()

    return forward_and_backward


def compiled(mlp, faults):
    forward = torch.compile(mlp, backend=every_node(faults), fullgraph=True)

    def forward_and_backward(x, splits, probs):
        torch.autograd.grad(forward(x, splits, probs).sum(), x)
        forward(x, splits, probs).sum().backward()

    return forward_and_backward


def taken(mlp):
    """The gradients of all parameters, zeros where there are none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in mlp.named_parameters()} | {
        name: p.main_grad for name, p in mlp.named_parameters() if getattr(p, "main_grad", None) is not None
    }


HOW = (eagerly, compiled)
# One option with each way of running in the usual tests; all of them in the long ones.
SOME = [("none", "discrete", eagerly), ("current", "delayed into main_grad", eagerly), ("none", "main_grad", compiled)]
SOME += [("block", "delayed", compiled)]
ALL = [(recipe, name, how) for recipe in ("none", "current", "block", "mxfp8") for name in OPTIONS for how in HOW]
CASES = [
    pytest.param(*case, id=f"{case[2].__name__}-{case[0]}-{case[1]}", marks=() if case in SOME else pytest.mark.slow)
    for case in ALL
]


@pytest.mark.parametrize("recipe, name, how", CASES)
def test_an_error_at_every_op(recipe, name, how, fresh_compiler):
    faults = Faults()
    mlp, (x, splits, probs) = make(recipe, name, "cpu")
    if mlp.fc1.delay_wgrad_compute and how is compiled:
        mlp.reserve_delayed_wgrad(T, microbatches=1)
    run = how(mlp, faults)
    x, probs = x.requires_grad_(), probs.requires_grad_()

    def step():
        x.grad = probs.grad = None
        run(x, splits, probs)
        mlp.backward_dw()
        return {"x": x.grad, "probs": probs.grad} | gradients(mlp)

    faults.run(step)  # compiles
    recover(mlp)
    wanted = {key: t.clone() for key, t in faults.run(step).items()}
    points = faults.count
    assert points > 10
    recover(mlp)
    for at in range(1, points + 1):
        with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
            faults.run(step, at)
        mlp.backward_dw()
        for key, t in taken(mlp).items():
            assert not t.any() or torch.equal(t, wanted[key]), (at, key)
        recover(mlp)
        if at % 5 == 0 or at == points:
            assert_same(faults.run(step), wanted)
            recover(mlp)
