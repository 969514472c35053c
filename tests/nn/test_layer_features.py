"""Caller buffers, discrete parameters, main_grad and delayed gradients: errors, and forms of use."""

import copy
import io
import mmap
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import tgl

G, K, N, T = 3, 4, 5, 6
SPLITS = torch.tensor([2, 0, 3])


def other_memory(shape, source):
    """A tensor on memory that torch has not allocated."""
    count = int(np.prod(shape))
    if source == "numpy":
        return torch.from_numpy(np.full(shape, 7.0, dtype=np.float32))
    if source == "mmap":
        return torch.frombuffer(mmap.mmap(-1, 4 * count), dtype=torch.float32).view(shape).fill_(7)
    return torch.full((count + 64,), 7.0)[64:].view(shape)


# --- caller buffers ---------------------------------------------------------------------------------------------------

BAD_BUFFERS = {
    "no tensor": (lambda s: [0.0], TypeError, "must be a tensor, but got list"),
    "rows": (lambda s: torch.zeros(s[0] - 1, s[1]), ValueError, r"must be of shape \(6, \d\), but got shape \(5, \d\)"),
    "columns": (lambda s: torch.zeros(s[0], s[1] + 1), ValueError, r"must be of shape \(6, \d\), but got shape"),
    "rank": (lambda s: torch.zeros(1, *s), ValueError, r"must be of shape \(6, \d\), but got shape \(1, 6"),
    "dtype": (lambda s: torch.zeros(s).bfloat16(), TypeError, "must be torch.float32, but got torch.bfloat16"),
    "device": (lambda s: torch.zeros(s, device="meta"), ValueError, "must be on cpu, but got meta"),
    "padded rows": (lambda s: torch.zeros(s[0], s[1] + 1)[:, :-1], ValueError, r"must be contiguous, but got strides"),
    "column-major": (
        lambda s: torch.zeros(s[1], s[0]).t(),
        ValueError,
        r"must be contiguous, but got strides \(1, 6\)",
    ),
    "misaligned": (
        lambda s: torch.zeros(s[0] * s[1] + 1)[1:].view(s),
        ValueError,
        "must be aligned to 16 bytes, but got",
    ),
    "requires grad": (lambda s: torch.zeros(s).requires_grad_(), ValueError, "must be a buffer that requires no grad"),
}
LAYERS = {"linear": lambda: tgl.GroupedLinear(G, K, N), "mlp": lambda: tgl.GroupedMLP(G, K, 3)}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("argument", ["out", "dgrad_out"])
@pytest.mark.parametrize("what", BAD_BUFFERS)
def test_bad_buffers(layer, argument, what):
    """One error names the bad buffer; the good one keeps its bytes."""
    module = LAYERS[layer]()
    shapes = {"out": (T, N if layer == "linear" else K), "dgrad_out": (T, K)}
    make, error, message = BAD_BUFFERS[what]
    buffers = {name: torch.full(shape, 7.0) for name, shape in shapes.items()}
    buffers[argument] = make(shapes[argument])
    with pytest.raises(error, match=rf"^`{argument}` {message}"):
        module(torch.randn(T, K), SPLITS, **buffers)
    good = next(b for name, b in buffers.items() if name != argument)
    assert (good == 7).all()


@pytest.mark.parametrize("argument", ["out", "dgrad_out"])
@pytest.mark.parametrize("what", sorted(set(BAD_BUFFERS) - {"misaligned"}))  # an address is known at run time alone
def test_bad_buffers_compiled(argument, what, fresh_compiler):
    """The same message inside Dynamo's error."""
    layer, (make, _, message) = tgl.GroupedLinear(G, K, N), BAD_BUFFERS[what]
    buffer = make({"out": (T, N), "dgrad_out": (T, K)}[argument])
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"`{argument}` {message}"):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(T, K), SPLITS, **{argument: buffer})


@pytest.mark.cover(1)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("argument", ["out", "dgrad_out"])
def test_misaligned_buffers_compiled(backend, argument, fresh_compiler):
    layer, width = tgl.GroupedLinear(G, K, N), {"out": N, "dgrad_out": K}[argument]
    room = torch.full((T * width + 1,), 7.0)
    with pytest.raises(ValueError, match="`out` must be aligned to 16 bytes"):
        x = torch.randn(T, K, requires_grad=True)
        y = torch.compile(layer, backend=backend, fullgraph=True)(x, SPLITS, **{argument: room[1:].view(T, width)})
        y.sum().backward()
    assert (room == 7).all()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_two_routes_to_one_buffer(layer, compiled, fresh_compiler):
    module = tgl.GroupedLinear(G, K, K) if layer == "linear" else tgl.GroupedMLP(G, K, 3)
    call = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    error = torch._dynamo.exc.Unsupported if compiled else ValueError
    one, x = torch.full((T, K), 7.0), torch.randn(T, K)
    for out, dgrad_out, message in (
        (one, one, "`dgrad_out` must be disjoint from `out`"),
        (x, None, "`out` must be disjoint from `inp`"),
        (None, x, "`dgrad_out` must be disjoint from `inp`"),
    ):
        before = x.clone()
        with pytest.raises(error, match=message):
            call(x, SPLITS, out=out, dgrad_out=dgrad_out)
        assert torch.equal(x, before)
        assert (one == 7).all()


def test_overlapping_buffers():
    layer, room = tgl.GroupedLinear(G, K, K), torch.full((T * K + 4,), 7.0)
    with pytest.raises(ValueError, match="`dgrad_out` must be disjoint from `out`, but got overlapping memory"):
        layer(torch.randn(T, K), SPLITS, out=room[: T * K].view(T, K), dgrad_out=room[4:].view(T, K))
    assert (room == 7).all()


def test_dgrad_out_under_autocast():
    """The gradient of a float32 input would be a cast copy of the buffer."""
    layer, x = tgl.GroupedLinear(G, K, N), torch.randn(T, K)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match="`dgrad_out` must be None where autocast casts the input"):
            layer(x, SPLITS, dgrad_out=torch.zeros(T, K))
        out = torch.full((T, N), 7.0, dtype=torch.bfloat16)
        layer(x, SPLITS, out=out)
        assert torch.equal(out[:5], layer(x, SPLITS)[:5])
        assert (out[5:] == 7).all()


@pytest.mark.parametrize("source", ["numpy", "mmap", "slice of another tensor"])
def test_buffers_of_any_allocator(source):
    layer, x = tgl.GroupedLinear(G, K, N), torch.randn(T, K, requires_grad=True)
    expected = layer(x, SPLITS)
    dy = torch.randn(T, N)
    (dx,) = torch.autograd.grad(expected, x, dy)
    out, dgrad_out = other_memory((T, N), source), other_memory((T, K), source)
    y = layer(x, SPLITS, out=out, dgrad_out=dgrad_out)
    assert y.data_ptr() == out.data_ptr()
    (mine,) = torch.autograd.grad(y, x, dy)
    assert mine.data_ptr() == dgrad_out.data_ptr()
    assert torch.equal(out[:5], expected[:5])
    assert torch.equal(dgrad_out[:5], dx[:5])
    assert (out[5:] == 7).all()
    assert (dgrad_out[5:] == 7).all()


@pytest.mark.parametrize("shape", [(2, 3), (1, 6), (6,)], ids=str)
def test_buffers_of_leading_dimensions(shape):
    layer, x = tgl.GroupedLinear(G, K, N), torch.randn(*shape, K, requires_grad=True)
    out, dgrad_out = torch.zeros(*shape, N), torch.zeros(*shape, K)
    y = layer(x, SPLITS, out=out, dgrad_out=dgrad_out)
    y.sum().backward()
    assert torch.equal(y, layer(x, SPLITS))
    assert y.shape == out.shape == (*shape, N)
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(x.grad, dgrad_out)


@pytest.mark.parametrize("bias", [False, True])
def test_buffers_of_an_mlp(bias):
    mlp, x = tgl.GroupedMLP(G, K, 3, bias=bias), torch.randn(T, K, requires_grad=True)
    probs = torch.rand(T, requires_grad=True)
    out, dgrad_out = torch.full((T, K), 7.0), torch.full((T, K), 7.0)
    leaves, dy = [x, probs, *mlp.parameters()], torch.randn(T, K)
    expected = mlp(x, SPLITS, probs)
    y = mlp(x, SPLITS, probs, out=out, dgrad_out=dgrad_out)
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(y[:5], expected[:5])
    want, have = torch.autograd.grad(expected, leaves, dy), torch.autograd.grad(y, leaves, dy)
    assert have[0].data_ptr() == dgrad_out.data_ptr()
    assert torch.equal(have[0][:5], want[0][:5])
    for a, b in zip(have[1:], want[1:]):
        assert torch.equal(a, b)
    assert (out[5:] == 7).all()
    assert (dgrad_out[5:] == 7).all()


# --- recomputing the activation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["swiglu", "srelu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("with_probs", [False, True])
def test_recompute_activation_saves_less_and_changes_no_bit(activation, bias, with_probs):
    results, saved = [], []
    for recompute in (False, True):
        torch.manual_seed(3)
        mlp = tgl.GroupedMLP(G, 16, 8, activation=activation, bias=bias, recompute_activation=recompute)
        x = torch.randn(T, 16, requires_grad=True)
        probs = torch.rand(T, requires_grad=True) if with_probs else None
        leaves = [x, *mlp.parameters()] + [probs] * with_probs
        held = {}

        def pack(t, held=held):
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = mlp(x, SPLITS, probs)
        saved.append(sum(held.values()))
        results.append((y, *torch.autograd.grad(y, leaves, torch.ones_like(y))))
    for plain, recomputed in zip(*results):
        assert torch.equal(plain, recomputed)
    assert saved[0] - saved[1] == 4 * T * 8  # the activation's result


# --- main_grad --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [True, False], ids=["packed", "discrete"])
@pytest.mark.parametrize(
    "main_grad, error, message",
    [
        (None, ValueError, r"main_grad` must be "),
        (
            lambda: torch.zeros(G, N, K + 1),
            ValueError,
            r"main_grad` must be of shape \[(G, )?N, K\] = \((3, )?5, 4\), but got",
        ),
        (lambda: torch.zeros(G, N, K).double(), TypeError, "main_grad` must be torch.float32, but got torch.float64"),
        (lambda: torch.zeros(G, N, K).half(), TypeError, "main_grad` must be torch.float32, but got torch.float16"),
        (lambda: torch.zeros(G, N, K, requires_grad=True), ValueError, "main_grad` must require no grad"),
    ],
    ids=["missing", "shape", "float64", "float16", "requires grad"],
)
def test_bad_main_grad(single, main_grad, error, message):
    layer = tgl.GroupedLinear(G, K, N, single_grouped_weight=single, fuse_wgrad_accumulation=True)
    if main_grad is not None:
        packed = main_grad()
        for weight, part in zip(layer.group_parameters("weight"), [packed] if single else packed):
            weight.main_grad = part
    with pytest.raises(error, match=message):
        layer(torch.randn(T, K), SPLITS)


def test_main_grad_is_not_read_without_grad():
    layer = tgl.GroupedLinear(G, K, N, fuse_wgrad_accumulation=True)
    with torch.no_grad():
        layer(torch.randn(T, K), SPLITS)
    layer.requires_grad_(False)
    layer(torch.randn(T, K, requires_grad=True), SPLITS).sum().backward()


# --- delayed gradients ------------------------------------------------------------------------------------------------


def test_delayed_gradients_notice_a_changed_input():
    layer, x = tgl.GroupedLinear(G, K, N, delay_wgrad_compute=True), torch.randn(T, K)
    layer(x, SPLITS).sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified in place after its backward"):
        layer.backward_dw()


def test_delayed_gradients_of_copied_inputs_allow_changes():
    layer, x = tgl.GroupedLinear(G, K, N, delay_wgrad_compute=True), torch.randn(T, K)
    layer.reserve_delayed_wgrad(T)
    plain = copy.deepcopy(layer)
    layer(x, SPLITS).sum().backward()
    plain(x, SPLITS).sum().backward()
    plain.backward_dw()
    x.zero_()
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert layer.weight.grad.any()


@pytest.mark.parametrize("recipe", [None, *tgl.recipes.RECIPES])
def test_fewer_rows_than_reserved(recipe):
    """Features and rows in several tiles of scales, whose order depends on how many rows there are."""
    features, rows = 192, 256
    splits = torch.tensor([130, 0, 100])
    layer = tgl.GroupedLinear(G, features, features, recipe=recipe, delay_wgrad_compute=True)
    copied = copy.deepcopy(layer)
    copied.reserve_delayed_wgrad(2 * rows, microbatches=2)
    copied = pickle.loads(pickle.dumps(copied))
    for count in (rows, rows - 26):
        x = torch.randn(count, features)
        for one in (layer, copied):
            one(x, splits).square().sum().backward()
    for one in (layer, copied):
        one.backward_dw()
    assert layer.weight.grad.any()
    for (name, p), q in zip(layer.named_parameters(), copied.parameters()):
        assert torch.equal(p.grad, q.grad), name


def test_reserving_and_moving_at_the_wrong_time():
    with pytest.raises(RuntimeError, match="needs a layer with delay_wgrad_compute=True"):
        tgl.GroupedLinear(G, K, N).reserve_delayed_wgrad(T)
    layer = tgl.GroupedLinear(G, K, N, delay_wgrad_compute=True)
    for reserve in (False, True):
        if reserve:
            layer.reserve_delayed_wgrad(T)
        layer(torch.randn(T, K), SPLITS).sum().backward()
        with pytest.raises(RuntimeError, match="must come before a microbatch's forward, or after backward_dw"):
            layer.reserve_delayed_wgrad(2 * T)
        with pytest.raises(RuntimeError, match="cannot be moved or cast; call backward_dw first"):
            layer.double()
        layer.backward_dw()
    layer.reserve_delayed_wgrad(2 * T)
    layer.double()


def test_backward_dw_without_delay_does_nothing():
    layer = tgl.GroupedLinear(G, K, N)
    layer(torch.randn(T, K), SPLITS).sum().backward()
    before = layer.weight.grad.clone()
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, before)


def test_delayed_gradients_are_added_to_what_is_there():
    layer = tgl.GroupedLinear(G, K, N, delay_wgrad_compute=True)
    x = torch.randn(T, K)
    gradients = []
    for _ in range(2):
        layer(x, SPLITS).sum().backward()
        layer.backward_dw()
        gradients.append((layer.weight.grad.clone(), layer.bias.grad.clone()))
    for once, twice in zip(*gradients):
        assert torch.equal(twice, 2 * once)


def test_frozen_parameters_get_no_delayed_gradient():
    layer = tgl.GroupedLinear(G, K, N, single_grouped_weight=False, delay_wgrad_compute=True)
    layer.weight1.requires_grad_(False)
    layer.bias2.requires_grad_(False)
    layer(torch.randn(T, K), SPLITS).sum().backward()
    layer.backward_dw()
    without = {name for name, p in layer.named_parameters() if p.grad is None}
    assert without == {"weight1", "bias2"}


# --- discrete parameters ----------------------------------------------------------------------------------------------


def discrete(**options):
    torch.manual_seed(0)
    return tgl.GroupedLinear(G, K, N, single_grouped_weight=False, **options)


def shares_memory(layer):
    return all(
        layer.packed(name)[g].data_ptr() == p.data_ptr()
        for name in ("weight", "bias")
        for g, p in enumerate(layer.group_parameters(name))
    )


def test_names_and_values_are_those_of_the_packed_form():
    layer = discrete()
    torch.manual_seed(0)
    packed = tgl.GroupedLinear(G, K, N)
    assert [n for n, _ in layer.named_parameters()] == [f"{p}{i}" for p in ("weight", "bias") for i in range(G)]
    assert set(layer.state_dict()) == {f"{p}{i}" for p in ("weight", "bias") for i in range(G)}
    for i in range(G):
        assert torch.equal(getattr(layer, f"weight{i}"), packed.weight[i])
    x = torch.randn(T, K)
    assert torch.equal(layer(x, SPLITS), packed(x, SPLITS))
    assert repr(layer) == repr(packed)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.double().float(),
        lambda layer: copy.deepcopy(layer),
        lambda layer: torch.load(saved(layer), weights_only=False),
        lambda layer: (layer.load_state_dict(discrete().state_dict(), assign=True), layer)[1],
        lambda layer: (layer.to("meta").to_empty(device="cpu").reset_parameters(), layer)[1],
        lambda layer: (layer.load_state_dict(tgl.GroupedLinear(G, K, N).state_dict()), layer)[1],
    ],
    ids=["cast", "deepcopy", "pickle", "assign", "to_empty", "load packed"],
)
def test_parameters_stay_side_by_side(change):
    """After any move of the parameters the GEMMs read their memory."""
    layer = change(discrete())
    assert shares_memory(layer)
    x = torch.randn(T, K)
    before = layer(x, SPLITS)
    with torch.no_grad():
        layer.weight0.add_(1)
    assert not torch.equal(layer(x, SPLITS)[:2], before[:2])


def saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return file


def test_optimizers_see_the_parameters():
    layer = discrete()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight0.detach().clone()
    layer(torch.randn(T, K), SPLITS).sum().backward()
    optimizer.step()
    assert torch.equal(layer.packed("weight")[0], before - layer.weight0.grad)


@pytest.mark.parametrize("form", ["packed", "discrete"])
def test_state_dict_format_of_discrete_parameters(form):
    state = discrete(state_dict_format=form).state_dict()
    assert set(state) == (
        {"weight", "bias"} if form == "packed" else {f"{p}{i}" for p in ("weight", "bias") for i in "012"}
    )
    for single in (True, False):
        layer = tgl.GroupedLinear(G, K, N, single_grouped_weight=single)
        layer.load_state_dict(state)
        assert torch.equal(layer.packed("weight"), discrete().packed("weight"))


def test_discrete_needs_a_group():
    with pytest.raises(ValueError, match="`num_gemms` must be at least 1 without `single_grouped_weight`, but got 0"):
        tgl.GroupedLinear(0, K, N, single_grouped_weight=False)


# --- Sequential -------------------------------------------------------------------------------------------------------


def experts():
    torch.manual_seed(0)
    fc1, act, fc2 = tgl.GroupedLinear(G, K, 6), tgl.GroupedActivation("swiglu"), tgl.GroupedLinear(G, 3, K)
    return tgl.Sequential(fc1, act, nn.Identity(), fc2)


def test_sequential_is_the_mlp():
    net, mlp = experts(), tgl.GroupedMLP(G, K, 3, bias=True)
    mlp.load_state_dict({k.replace("0.", "fc1.").replace("3.", "fc2."): v for k, v in net.state_dict().items()})
    x, probs = torch.randn(T, K), torch.rand(T)
    assert torch.equal(net(x, SPLITS), mlp(x, SPLITS))
    assert torch.equal(net(x, SPLITS, probs), mlp(x, SPLITS, probs))
    assert torch.equal(tgl.Sequential(net, nn.Identity())(x, SPLITS, probs), mlp(x, SPLITS, probs)), "nested"
    assert torch.equal(tgl.Sequential(mlp)(x, SPLITS, probs), mlp(x, SPLITS, probs))


@pytest.mark.cover(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("by", ["index", "module"])
def test_sequential_hands_out_buffers(backend, by, fresh_compiler):
    net, x = experts(), torch.randn(T, K)
    plain_x, mine = x.clone().requires_grad_(), (x.clone().requires_grad_() * 1)
    expected = net(plain_x, SPLITS)
    expected.sum().backward()
    shapes = {0: {"output": (T, 6), "grad_input": (T, K)}, 3: {"output": (T, K), "grad_input": (T, 3)}}
    buffers = {i: {k: torch.full(s, 7.0) for k, s in given.items()} for i, given in shapes.items()}
    op_kwargs = buffers if by == "index" else {net[i]: given for i, given in buffers.items()}
    call = net if backend == "eager" else torch.compile(net, backend=backend, fullgraph=True)
    upstream = []
    mine.register_hook(upstream.append)
    y = call(mine, SPLITS, op_kwargs=op_kwargs)
    y.sum().backward()
    assert torch.equal(y[:5], expected[:5])
    assert torch.equal(upstream[0][:5], plain_x.grad[:5])
    assert torch.equal(buffers[3]["output"], y)
    assert torch.equal(buffers[0]["grad_input"], upstream[0])
    for given in buffers.values():
        for buffer in given.values():
            assert (buffer[5:] == 7).all()
            assert (buffer[:5] != 7).all()
    if backend != "aot_eager":
        assert y.data_ptr() == buffers[3]["output"].data_ptr()
        assert upstream[0].data_ptr() == buffers[0]["grad_input"].data_ptr()


def bad_routes():
    net = experts()
    good, wide = torch.full((T, K), 7.0), torch.full((T, 6), 7.0)
    shared = tgl.GroupedLinear(G, K, K)
    twice = tgl.Sequential(shared, shared)
    bare = tgl.Sequential(net[0], net[1], net[3])
    return {
        "index": (net, {4: {"output": good}}, KeyError, "indices from -4 to 3, but got 4"),
        "negative": (net, {-5: {"output": good}}, KeyError, "indices from -4 to 3, but got -5"),
        "name": (net, {"3": {"output": good}}, KeyError, "indices from -4 to 3, but got '3'"),
        "bool": (net, {True: {"output": good}}, KeyError, "indices from -4 to 3, but got True"),
        "foreign": (
            net,
            {nn.Identity(): {"output": good}},
            KeyError,
            "modules of this Sequential, but got another Ident",
        ),
        "keyword": (
            net,
            {3: {"out": good}},
            KeyError,
            "must hold 'output' and 'grad_input', but got 'out' for module 3",
        ),
        "activation": (
            net,
            {1: {"output": good}},
            ValueError,
            "can take 'output', but got module 1, a GroupedActivation",
        ),
        "torch module": (
            net,
            {2: {"grad_input": good}},
            ValueError,
            "can take 'grad_input', but got module 2, a Identity",
        ),
        "two keys": (net, {3: {"output": good}, net[3]: {"grad_input": wide}}, ValueError, "module 3 .* twice"),
        "one buffer": (
            net,
            {0: {"grad_input": good}, 3: {"output": good}},
            ValueError,
            r"op_kwargs\[3\]\['output'\]` must",
        ),
        "two places": (twice, {shared: {"output": good}}, KeyError, "comes up several times by its index"),
        "bad shape": (
            bare,
            {0: {"output": wide}, 2: {"output": wide}},
            ValueError,
            r"\[2\]\['output'\]` must be of shape",
        ),
        "bad dtype": (bare, {0: {"output": wide}, 2: {"output": good.half()}}, TypeError, "must be torch.float32, but"),
        "bad gradient": (
            bare,
            {0: {"output": wide, "grad_input": good[1:]}},
            ValueError,
            r"\['grad_input'\]` must be of",
        ),
    }


@pytest.mark.parametrize("what", bad_routes())
def test_bad_op_kwargs(what):
    net, op_kwargs, error, message = bad_routes()[what]
    with pytest.raises(error, match=message):
        net(torch.randn(T, K), SPLITS, op_kwargs=op_kwargs)
    for given in op_kwargs.values():
        assert all((buffer == 7).all() for buffer in given.values()), "nothing is written"


def test_an_index_from_the_end_and_a_buffer_of_none():
    net, out = experts(), torch.zeros(T, K)
    x = torch.randn(T, K)
    y = net(x, SPLITS, op_kwargs={-1: {"output": out, "grad_input": None}, 0: {"output": None}})
    assert y.data_ptr() == out.data_ptr()
    assert torch.equal(y, net(x, SPLITS))


def test_sequential_without_splits():
    with pytest.raises(ValueError, match="`m_splits` must be given, as GroupedLinear works on groups of rows"):
        experts()(torch.randn(T, K))
    assert tgl.Sequential(nn.Linear(K, N))(torch.randn(T, K)).shape == (T, N)


def test_sequential_backward_dw():
    net = tgl.Sequential(tgl.GroupedLinear(G, K, N, delay_wgrad_compute=True), tgl.GroupedActivation("srelu"))
    net(torch.randn(T, K), SPLITS).sum().backward()
    assert net[0].weight.grad is None
    net.backward_dw()
    assert net[0].weight.grad.any()
