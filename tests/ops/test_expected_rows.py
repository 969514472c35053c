"""``expected_rows`` of a block changes no bit, and reaches what takes it in the forward and in the backward."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import tgl
from tgl import backends
from tgl.meta import moe as specs
from tgl.nn import _expert_path

S, K, G, H, I, ROOM = 7, 3, 5, 4, 6, 30
NAMES = ("moe", "moe_backward_hidden", "moe_backward_input")
VALUES = (None, 1, S * K, ROOM, 10 * ROOM)


def leaves(dtype=torch.float64):
    """Tokens, weights of choices, w1 and w2."""
    made = torch.Generator().manual_seed(0)
    shapes = (S, H), (S, K), (G, H, 2 * I), (G, I, H)
    return [torch.randn(s, generator=made, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def block(expected, x, weights, w1, w2, chosen=None, room=ROOM):
    chosen = torch.arange(S * K).view(S, K) % (G + 1) if chosen is None else chosen
    return tgl.moe(x, tgl.route(chosen, G, room), weights, w1, w2, expected_rows=expected)


def step(expected, tensors, function=block):
    y = function(expected, *tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, torch.ones_like(y))]


class Hints(TorchDispatchMode):
    """``expected_rows`` of every op of a block, by name."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("tgl::")
        if name in NAMES:
            self.found.append((name, (kwargs or {}).get("expected_rows")))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_results_on_a_cpu_do_not_depend_on_the_hint(dtype):
    first, *others = (step(value, leaves(dtype)) for value in VALUES)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("value", [None, 9])
def test_both_ops_of_the_backward_get_the_hint(value):
    with Hints() as seen:
        step(value, leaves())
    assert seen.found == [(name, value) for name in NAMES]


@pytest.mark.parametrize("observed", [False, True])
def test_implementations_without_the_hint_serve_without_it(observed):
    """The ops get the hint if it is below the capacity, whether or not they pass the dispatcher."""
    found = []

    def spy(name, takes):
        def register(op):
            def supports(*args, **kwargs):
                found.append((name, op, kwargs.get("expected_rows")))
                return "only looks"

            options = {"device": "cpu", "expects": takes, "rows": True, "supports": supports}
            return tgl.register_implementation(op, name, **options)(lambda *_, **__: None)

        return list(map(register, OPS))

    registered = spy("takes it", True) + spy("takes none", False)
    try:
        for value in (9, ROOM):
            if observed:
                with Hints():
                    step(value, leaves())
            else:
                step(value, leaves())
    finally:
        for one in registered:
            backends.remove(one)
    assert {value for name, _, value in found if name == "takes none"} == {None}
    given = [(op, value) for name, op, value in found if name == "takes it"]
    # Of the products: FC1's, FC2's, that of a CPU's way back through the activation, which has no use for it, and dx.
    of_gemms = [value for op, value in given if op == "grouped_gemm"]
    assert of_gemms == [9, 9, None, 9] + [None] * 4
    others = [value for op, value in given if op != "grouped_gemm"]
    assert others == [9] * 4 + [None] * 4


def test_reports_leave_the_hint_out_for_others():
    """Functions of an implementation that takes no hint get none: copies, batch_invariant, prepare and tiling."""
    asked = []

    def note(what, answer):
        return lambda *_, **kwargs: asked.append((what, "expected_rows" in kwargs)) or answer

    mine = tgl.backends.Implementation(
        "moe",
        "mine",
        "cpu",
        note("run", None),
        note("supports", None),
        priority=99,
        copies=note("copies", {"x": 1}),
        batch_invariant=note("batch_invariant", True),
        prepare=note("prepare", None),
        tiling=note("tiling", None),
    )
    backends.add(mine)
    given, options = calls()["moe"]
    try:
        asked.clear()
        tgl.warmup("moe", *given, **options, expected_rows=9)
        torch.ops.tgl.moe(*given, **options, expected_rows=9)
    finally:
        backends.remove(mine)
    assert {what for what, _ in asked} == {"run", "supports", "copies", "batch_invariant", "prepare", "tiling"}
    assert not any(hinted for _, hinted in asked)


OPS = ("grouped_gemm_activation", "grouped_gemm", "grouped_gemm_dactivation", "grouped_gemm_wgrad")


def test_one_graph_takes_any_number():
    """A hint may be a symbol; the ops stay in a graph, as in one for a GPU."""
    counter = CompileCounterWithBackend("aot_eager")

    def of_tokens(chosen, x, weights, w1, w2):
        return block(x.shape[0] * 2, x, weights, w1, w2, chosen, x.shape[0] * K + 9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_expert_path, "compiled_without_kernels", lambda _: False)
        compiled = torch.compile(of_tokens, fullgraph=True, dynamic=True, backend=counter)
        torch._dynamo.reset()
        for tokens in (7, 12, 5):
            x, weights, w1, w2 = leaves()
            x, weights = (torch.randn(tokens, n, dtype=torch.float64, requires_grad=True) for n in (H, K))
            given = [x, weights, w1, w2]
            chosen = torch.randint(0, G + 1, (tokens, K))
            for a, b in zip(step(chosen, given, compiled), step(chosen, given, of_tokens), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert counter.frame_count == 1
    graph = "\n".join(str(node) + str(node.kwargs) for g in counter.graphs for node in g.graph.nodes)
    assert "expected_rows" in graph


def test_a_graph_for_a_cpu_checks_the_hint():
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for a, b in zip(step(9, leaves(), compiled), step(9, leaves()), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(Exception, match="`expected_rows` must be at least 1, but got 0"):
        compiled(0, *leaves())


def test_second_order_and_transforms():
    tensors = leaves()
    assert torch.autograd.gradgradcheck(lambda *given: block(9, *given), tensors, fast_mode=True)
    x, *rest = [t.detach() for t in tensors]
    grads = [torch.func.grad(lambda t, n=n: block(n, t, *rest).sum())(x) for n in (None, 9)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("value", [0, -1])
def test_bad_values_of_every_op(op, value):
    """Bad hints raise, for fake tensors as well."""
    with pytest.raises(ValueError, match=f"tgl::{op}: `expected_rows` must be at least 1, but got {value}"):
        specs.check_expected(op, value)
    given, options = calls()[op]
    for device in ("cpu", "meta"):
        moved = [t if t is None else t.to(device) for t in given]
        with pytest.raises(ValueError, match=f"tgl::{op}: `expected_rows` must be at least 1, but got {value}"):
            getattr(torch.ops.tgl, op)(*moved, **options, expected_rows=value)
    with pytest.raises(ValueError, match=f"tgl::{op}: `expected_rows`"):
        tgl.explain(op, *given, **options, expected_rows=value)
    with pytest.raises((TypeError, RuntimeError), match="expected_rows"):
        getattr(torch.ops.tgl, op)(*given, **options, expected_rows=2.5)


def calls():
    """Operands and options of every op."""
    x, weights, w1, w2 = (t.detach() for t in leaves())
    routing = tgl.route(torch.arange(S * K).view(S, K) % G, G)
    places = routing.source, routing.position, routing.token, routing.offs
    y, h = torch.ops.tgl.moe(x, w1, w2, *places, weights, top_k=K)
    return {
        "moe": ((x, w1, w2, *places, weights), {"top_k": K}),
        "moe_backward_hidden": ((y, w2, *places, h, weights), {"top_k": K, "output_mask": [True] * 3 + [False]}),
        "moe_backward_input": ((h, x, w1, *places[1:]), {"top_k": K, "output_mask": [True, True, False]}),
    }


@pytest.mark.parametrize("op", NAMES)
def test_opcheck(op):
    given, options = calls()[op]
    torch.library.opcheck(getattr(torch.ops.tgl, op).default, given, {**options, "expected_rows": 9})
