"""``MoE`` is dispatch, ``GroupedMLP`` and combine: as one op where that serves it, else as these."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tgl
from tests.nn.seen import Ops, same

G, H, I, S, K = 4, 32, 48, 9, 2
CHOSEN = torch.tensor([[0, 2], [2, 3], [3, 0], [2, 2], [0, 4], [-1, 3], [3, 2], [0, 3], [4, 9]])


def tokens(*shape):
    return torch.randn(*(shape or (S,)), H, requires_grad=True), torch.rand(S, K, requires_grad=True)


def by_pieces(mlp, x, chosen, weights, **options):
    """Run the block step by step with the module's own experts, whose parameters' gradients are compared."""
    routing = tgl.route(chosen, mlp.num_gemms)
    probs = None if weights is None else tgl.dispatch_weights(weights, routing)
    rows = mlp.forward_offsets(tgl.dispatch(x, routing), routing.offs, probs, **options)
    return tgl.combine(rows, routing)


def step(function, module, x, weights):
    y = function()
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    wanted = [t for t in (x, weights, *module.parameters()) if t is not None and t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


def ops(function):
    with Ops() as seen:
        function()
    return seen.names


PLAIN = ({}, {"bias": True}, {"activation": "srelu"}, {"activation": "clamped_qgeglu", "interleaved": True})


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("options", PLAIN)
@pytest.mark.parametrize("with_weights", [False, True])
def test_a_plain_block_is_one_op(options, recompute, with_weights):
    block = tgl.MoE(G, H, I, recompute_activation=recompute, **options)
    x, weights = tokens()
    weights = weights if with_weights else None
    expected = step(lambda: by_pieces(block, x, CHOSEN, weights), block, x, weights)
    assert same(step(lambda: block(x, CHOSEN, weights), block, x, weights), expected)
    assert same(step(lambda: block(x, tgl.route(CHOSEN, G), weights), block, x, weights), expected)
    assert ops(lambda: block(x, CHOSEN, weights)) == ["route", "moe"]


def call(x, weights, *parameters, chosen=CHOSEN, **options):
    w1, w2, *biases = parameters
    return tgl.moe(x, chosen, weights, w1.transpose(1, 2), w2.transpose(1, 2), *biases, **options)


@pytest.mark.parametrize("options", [{}, {"kind": "clamped_qgeglu", "limit": 0.5}])
def test_bypassing_the_dispatcher_changes_no_bit(options):
    module, (x, weights) = tgl.MoE(G, H, I, bias=True), tokens()
    parameters = module.fc1.weight, module.fc2.weight, module.fc1.bias, module.fc2.bias

    def forward():
        return call(x, weights, *parameters, **options)

    with Ops() as seen:
        expected = step(forward, module, x, weights)
    assert [name for name in seen.names if "moe" in name] == ["moe", "moe_backward_hidden", "moe_backward_input"]
    assert all(torch.equal(*pair) for pair in zip(step(forward, module, x, weights), expected, strict=True))
    with torch.no_grad():
        assert torch.equal(forward(), expected[0])


def test_a_profile_names_the_ops():
    block, (x, weights) = tgl.MoE(G, H, I), tokens()
    for function in (
        lambda: block(x, CHOSEN, weights),
        lambda: call(x, weights, block.fc1.weight, block.fc2.weight),
    ):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            function()
        assert {"tgl::route", "tgl::moe"} <= {event.key for event in found.key_averages()}


def test_arguments_that_are_no_tensors_are_named():
    block, (x, weights) = tgl.MoE(G, H, I), tokens()
    with pytest.raises(RuntimeError, match="argument 'bias1'"):
        call(x, weights, block.fc1.weight, block.fc2.weight, [1.0])
    with pytest.raises(TypeError, match=r"`routing` must be a tgl\.Routing, but got list"):
        call(x, weights, block.fc1.weight, block.fc2.weight, chosen=CHOSEN.tolist())


def test_hooks_of_the_layers_fire():
    block, (x, weights) = tgl.MoE(G, H, I), tokens()
    expected = step(lambda: block(x, CHOSEN, weights), block, x, weights)
    fired = []
    block.fc2.register_forward_hook(lambda *_: fired.append("fc2"))
    for result, reference in zip(step(lambda: block(x, CHOSEN, weights), block, x, weights), expected, strict=True):
        torch.testing.assert_close(result, reference)
    assert fired == ["fc2"]


def test_state_dicts_are_those_of_a_grouped_mlp():
    for options in ({"bias": True}, {"bias": True, "state_dict_format": "discrete"}):
        mlp, block = tgl.GroupedMLP(G, H, I, **options), tgl.MoE(G, H, I, bias=True)
        block.load_state_dict(mlp.state_dict())
        assert all(torch.equal(*pair) for pair in zip(block.parameters(), mlp.parameters(), strict=True))
        mlp.load_state_dict(block.state_dict())


def test_tokens_of_more_dimensions():
    block, (x, weights) = tgl.MoE(G, H, I), tokens(3, 3)
    assert torch.equal(block(x, CHOSEN, weights), block(x.flatten(0, 1), CHOSEN, weights).view(3, 3, H))


def test_autocast():
    block, (x, weights) = tgl.MoE(G, H, I, bias=True), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x, CHOSEN, weights)
        expected = by_pieces(block, x, CHOSEN, weights)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    y.float().sum().backward()
    assert {p.grad.dtype for p in block.parameters()} == {torch.float32}


def test_is_first_microbatch_reaches_the_layers():
    block, (x, weights) = tgl.MoE(G, H, I, recipe=tgl.recipes.MXFP8BlockScaling()), tokens()
    first = block(x, CHOSEN, weights, is_first_microbatch=True)
    with torch.no_grad():
        block.fc1.weight.zero_()
    assert torch.equal(block(x, CHOSEN, weights, is_first_microbatch=False), first)


FITTING = CHOSEN.masked_fill((CHOSEN < 0) | (CHOSEN >= G), -1)  # 15 choices of experts
DROPPED = FITTING.masked_fill(FITTING == 3, -1)  # the 9 choices that lie before those of the last expert


@pytest.mark.cover(2)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{"bias": True}, {"recipe": tgl.recipes.MXFP8BlockScaling()}])
@pytest.mark.parametrize(("num_rows", "chosen"), [(15, FITTING), (40, FITTING), (9, DROPPED)])
def test_other_numbers_of_rows(num_rows, chosen, options, compiled):
    """Rows beyond the slots change nothing, and slots beyond the capacity are dropped."""
    block, (x, weights) = tgl.MoE(G, H, I, **options), tokens()

    def result(routing):
        return block(x, routing, weights)

    def call():
        return result(tgl.route(CHOSEN, G, num_rows))

    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(step(call, block, x, weights), step(lambda: result(chosen), block, x, weights), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    block, (x, weights) = tgl.MoE(G, H, I, bias=True), tokens()
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    expected = step(lambda: block(x, CHOSEN, weights), block, x, weights)
    for result, reference in zip(step(lambda: compiled(x, CHOSEN, weights), block, x, weights), expected, strict=True):
        torch.testing.assert_close(result, reference)


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("x", lambda t: t[1:], r"tgl::MoE: `x` must be \[S, H\] with S = 9 like `routing`"),
        ("x", lambda t: t[:, 1:], r"`w1` must be \[G, H, N\] with H = 31 like `x`"),
        ("x", torch.Tensor.double, "`x` must be torch.float32 like the layer's weight, but got torch.float64"),
        ("routing", lambda t: t.float(), "`top_k_index` must be"),
        ("routing", lambda t: None, "tgl::MoE: `routing` must be a tgl.Routing, but got NoneType"),
        ("weights", lambda t: t[:, 1:], r"tgl::MoE: `weights` must be \[S, k\] with k = 2 like `routing`"),
    ],
)
def test_bad_input(argument, change, message):
    x, weights = tokens()
    arguments = {"x": x, "routing": CHOSEN, "weights": weights}
    arguments[argument] = change(arguments[argument])
    with pytest.raises((ValueError, TypeError), match=message):
        tgl.MoE(G, H, I)(**arguments)
