"""``moe`` has the bits of dispatch, ``grouped_mlp`` and combine, and holds less for its backward."""

import functools
import itertools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import tgl
from tests.peak_memory import peak_memory
from tgl.meta.activations import TABLE
from tgl.testing.samples import DTYPES

S, K, G, H, I, O = 7, 3, 5, 4, 6, 3
NAMES = ("x", "weights", "w1", "w2", "bias1", "bias2")
CHOSEN = {
    "some": torch.tensor([[0, 2, 4], [2, 4, 0], [2, 0, 0], [4, 4, 2], [0, 1, 2], [1, 2, 2], [2, 2, 2]]),
    "absent": torch.tensor([[0, -1, 4], [2, 4, 5], [9, 9, -1], [4, 4, 2], [0, 5, 2], [5, 2, 2], [2, 2, -3]]),
    "all dropped": torch.full((S, K), G),
}


def leaves(kind="swiglu", dtype=torch.float64, seed=0):
    """Return the leaves by name, in the order of ``NAMES``."""
    generator = torch.Generator().manual_seed(seed)
    width = TABLE[kind].width(I)
    shapes = ((S, H), (S, K), (G, H, width), (G, I, O), (G, width), (G, O))
    made = (torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes)
    return dict(zip(NAMES, made))


def block(routing, x, weights, w1, w2, bias1=None, bias2=None, **options):
    return tgl.moe(x, routing, weights, w1, w2, bias1, bias2, **options)


def pieces(routing, x, weights, w1, w2, bias1=None, bias2=None, **options):
    if isinstance(routing, torch.Tensor):
        routing = tgl.route(routing, w1.shape[0])
    probs = None if weights is None else tgl.dispatch_weights(weights, routing)
    rows = tgl.grouped_mlp(tgl.dispatch(x, routing), w1, w2, routing.offs, probs, bias1, bias2, **options)
    return tgl.combine(rows, routing)


def with_gradients(function, tensors):
    y = function(**tensors)
    dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    wanted = [t for t in tensors.values() if t is not None and t.requires_grad]
    return [y.detach(), *(torch.autograd.grad(y, wanted, dy) if y.requires_grad else ())]


def same(one, other):
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits(dtype, chosen):
    """All combinations of weights and biases, narrow and wide ones, from indices and from a routing."""
    for weights, bias1, bias2 in itertools.product(("none", "own", "wide"), repeat=3):
        tensors = leaves(dtype=dtype)
        for name, how in (("weights", weights), ("bias1", bias1), ("bias2", bias2)):
            if how == "none":
                tensors[name] = None
            elif how == "wide" and dtype != torch.float64:
                tensors[name] = tensors[name].detach().float().requires_grad_()
        expected = with_gradients(functools.partial(pieces, CHOSEN[chosen]), tensors)
        assert same(with_gradients(functools.partial(block, CHOSEN[chosen]), tensors), expected)
        routing = tgl.route(CHOSEN[chosen], G)
        assert same(with_gradients(functools.partial(block, routing), tensors), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_that_are_wider(dtype):
    """Wider results, whose gradient is that of the rounded one, and wider gradients of tokens, by that op alone."""
    tensors, routing = leaves(dtype=dtype), tgl.route(CHOSEN["absent"], G)
    x, weights, w1, w2, *_ = tensors.values()
    operands, top_k = (x, w1, w2, routing.source, routing.position, routing.token, routing.offs, weights), K
    y, h = torch.ops.tgl.moe(*operands, top_k=top_k, out_dtype=torch.float32)
    rows = tgl.grouped_mlp(tgl.dispatch(x, routing), w1, w2, routing.offs, tgl.dispatch_weights(weights, routing))
    places = routing.token, routing.position, top_k
    wide = torch.ops.tgl.combine(rows, *places, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    assert torch.equal(y, wide)
    dy, asked = torch.randn(S, O), (x, weights, w1, w2)
    for second in (False, True):
        found = torch.autograd.grad(y, asked, dy, retain_graph=True, create_graph=second)
        expected = torch.autograd.grad(torch.ops.tgl.moe(*operands, top_k=top_k)[0], asked, dy.to(dtype))
        assert same(found, expected)
    dh = torch.randn(h.shape).to(dtype)
    given = dh, x.detach(), w1.detach(), routing.position, routing.token, routing.offs
    options = {"top_k": top_k, "output_mask": [True, True, False]}
    ours, theirs = (
        torch.ops.tgl.moe_backward_input(*given, **options, **wider) for wider in ({"out_dtype": torch.float32}, {})
    )
    rows = tgl.grouped_gemm(dh, w1.detach().transpose(1, 2), routing.offs)
    assert ours[0].dtype == torch.float32
    assert torch.equal(ours[0], torch.ops.tgl.combine(rows, *places, out_dtype=torch.float32))
    assert torch.equal(ours[1], theirs[1])
    torch.library.opcheck(torch.ops.tgl.moe.default, operands, {"top_k": top_k, "out_dtype": torch.float32})
    options["out_dtype"] = torch.float32
    torch.library.opcheck(torch.ops.tgl.moe_backward_input.default, given, options)
    message = "`out_dtype` must be float32, bfloat16 or float16, but got torch.int32"
    with pytest.raises(TypeError, match=f"tgl::moe: {message}"):
        torch.ops.tgl.moe(*operands, top_k=top_k, out_dtype=torch.int32)
    with pytest.raises(TypeError, match=f"tgl::moe_backward_input: {message}"):
        torch.ops.tgl.moe_backward_input(*given, **{**options, "out_dtype": torch.int32})


@pytest.mark.parametrize("kind", TABLE)
def test_bits_of_every_activation(kind):
    options = {"kind": kind, "interleaved": TABLE[kind].gated, "limit": 0.5, "alpha": 1.2, "offset": 0.3}
    results = [
        with_gradients(functools.partial(f, CHOSEN["absent"], **options), leaves(kind, torch.float32))
        for f in (pieces, block)
    ]
    assert same(*results)


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_in_either_memory_order(transposed):
    tensors = leaves(dtype=torch.float32)
    if transposed:
        for name in ("w1", "w2"):
            stored = tensors[name].detach().transpose(1, 2).contiguous().requires_grad_()
            tensors[name] = stored.transpose(1, 2)
    expected = with_gradients(functools.partial(pieces, CHOSEN["some"]), tensors)
    assert same(with_gradients(functools.partial(block, CHOSEN["some"]), tensors), expected)
    assert expected[3].is_contiguous() != transposed


def test_only_the_gradients_that_are_needed():
    for count in range(len(NAMES)):
        for frozen in itertools.combinations(NAMES, count):
            tensors = {name: t.requires_grad_(name not in frozen) for name, t in leaves(dtype=torch.float32).items()}
            expected = with_gradients(functools.partial(pieces, CHOSEN["some"]), tensors)
            assert same(with_gradients(functools.partial(block, CHOSEN["some"]), tensors), expected), frozen


def test_tensors_held_for_the_backward():
    """The tokens, the pre-activation, the weights and integers: nothing as wide as rows or activations."""
    tensors, routing = leaves(dtype=torch.float32), tgl.route(CHOSEN["some"], G)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        tgl.moe(*(tensors["x"], routing), *(tensors[n] for n in NAMES[1:]))
    parameters = [tensors[n] for n in ("w1", "w2", "bias2")]
    own = [t for t in held if not any(t is p for p in parameters)]
    integers = [t for t in own if not t.is_floating_point()]
    assert {t.data_ptr() for t in integers} == {t.data_ptr() for t in routing if isinstance(t, torch.Tensor)}
    x, h, weights = (t for t in own if t.is_floating_point())
    assert x is tensors["x"]
    assert weights is tensors["weights"]
    assert h.shape == (S * K, 2 * I)


def test_tokens_are_not_held_for_a_frozen_first_weight():
    tensors, held = leaves(dtype=torch.float32), []
    tensors["w1"].requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        tgl.moe(tensors["x"], CHOSEN["some"], *(tensors[n] for n in NAMES[1:]))
    assert any(t is tensors["w2"] for t in held)
    assert not any(t is tensors["x"] for t in held)


def problem(groups, tokens, top_k, width, inner):
    x, w1, w2 = torch.randn(tokens, width), torch.randn(groups, width, 2 * inner), torch.randn(groups, inner, width)
    chosen = torch.arange(tokens * top_k).view(tokens, top_k) % groups
    tensors = [t.requires_grad_() for t in (x, torch.rand(tokens, top_k), w1, w2)]

    def step(function):
        function(chosen, *tensors).square().sum().backward()
        for t in tensors:
            t.grad = None

    return step


def test_peak_of_a_step():
    """At most what is held, and the largest step of the backward: the gradient of h with the rows of one GEMM."""
    groups, tokens, top_k, width, inner = 4, 256, 4, 64, 48
    step, rows = problem(groups, tokens, top_k, width, inner), tokens * top_k
    one, parts = (peak_memory(lambda f=f: step(f)) for f in (block, pieces))
    h, gradients = rows * 2 * inner, groups * 3 * inner * width
    # Either h with its gradient, and the gradient of the answers with the activation's own or then its result again; or
    # dx or dw1 with rows.
    early = 2 * h + rows * (width + inner)
    late = h + rows * width + tokens * width + gradients
    outside = 2 * tokens * width + 16 * rows  # the result and its gradient; places, weights and sums of rows
    assert one <= 4 * (max(early, late) + outside)
    assert one < parts


def test_the_backward_frees_tensors_early():
    """When dx is computed, neither h nor the rows of the output's gradient are held."""
    tensors = leaves(dtype=torch.float32)
    routing = tgl.route(CHOSEN["some"], G)
    operands = (
        tensors["x"],
        tensors["w1"],
        tensors["w2"],
        routing.source,
        routing.position,
        routing.token,
        routing.offs,
    )
    y, h = torch.ops.tgl.moe(*operands, top_k=K)
    stores, seen = [StorageWeakRef(h.untyped_storage())], []
    del h

    def spy(a, b, offs, bias, bias_scale, *, out, zero_tail):
        seen.append([not store.expired() for store in stores])
        stores.append(StorageWeakRef(a.untyped_storage()))
        out.zero_()

    mine = tgl.register_implementation("grouped_gemm", "spy", device="cpu")(spy)
    try:
        y.sum().backward()
    finally:
        tgl.backends.remove(mine)
    assert seen == [[True], [False, False]]


@pytest.mark.parametrize(("kind", "with_weights"), [("swiglu", True), ("clamped_qgeglu", False), ("srelu", True)])
def test_second_order(kind, with_weights):
    tensors = leaves(kind)
    if not with_weights:
        tensors["weights"] = None
    given = [t for t in tensors.values() if t is not None]

    def function(*given):
        rest = iter(given)
        return block(CHOSEN["absent"], *(None if t is None else next(rest) for t in tensors.values()), kind=kind)

    assert torch.autograd.gradcheck(function, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, given, fast_mode=True)


def test_func_grad_and_jvp():
    tensors = {name: t.detach() for name, t in leaves(dtype=torch.float32).items()}
    rest = [tensors[n] for n in NAMES[1:]]
    grad = torch.func.grad(lambda x: block(CHOSEN["some"], x, *rest).sum())(tensors["x"])
    x = tensors["x"].clone().requires_grad_()
    assert torch.equal(grad, torch.autograd.grad(block(CHOSEN["some"], x, *rest).sum(), x)[0])
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: block(CHOSEN["some"], x, *rest), (tensors["x"],), (tensors["x"],))


def test_autocast():
    tensors = {name: t.detach() for name, t in leaves(dtype=torch.float32).items()}
    with torch.autocast("cpu", torch.bfloat16):
        y = block(CHOSEN["some"], **tensors)
    narrow = {name: t if name == "weights" else t.bfloat16() for name, t in tensors.items()}
    assert torch.equal(y, block(CHOSEN["some"], **narrow))


def test_modes_and_autocast_see_the_backward():
    tensors = leaves(dtype=torch.float32)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names, wanted = [], list(tensors.values())
    expected = torch.autograd.grad(block(CHOSEN["some"], **tensors).sum(), wanted)
    y = block(CHOSEN["some"], **tensors).sum()
    with Seen():
        assert same(torch.autograd.grad(y, wanted), expected)
    assert {"tgl.moe_backward_hidden.default", "tgl.moe_backward_input.default"} <= set(names)
    y = block(CHOSEN["some"], **tensors).sum()
    with torch.autocast("cpu", torch.bfloat16):  # what was not cast in the forward is not cast in the backward
        assert same(torch.autograd.grad(y, wanted), expected)


def test_explain_refers_to_the_parts():
    tensors, routing = leaves(dtype=torch.float32), tgl.route(CHOSEN["some"], G)
    places = routing.source, routing.position, routing.token, routing.offs
    operands = (tensors["x"], tensors["w1"], tensors["w2"], *places)
    explanation = tgl.explain(torch.ops.tgl.moe, *operands, top_k=K)
    assert explanation.chosen.name == "composition"
    assert "the implementations of its steps" in str(explanation)
    y, h = torch.ops.tgl.moe(*operands, top_k=K)
    x, w1, w2, *places = operands
    hidden = tgl.explain("moe_backward_hidden", y, w2, *places, h, top_k=K, output_mask=[True, True, False, True])
    assert hidden.chosen.name == "composition"
    backward = tgl.explain("moe_backward_input", h, x, w1, *places[1:], top_k=K, output_mask=[True, True, True])
    assert backward.chosen.name == "composition"


def test_nothing_reads_tokens_and_weights_of_dropped_slots():
    results = []
    for poison in (float("nan"), 3.0):
        tensors = {name: t.detach().clone() for name, t in leaves(dtype=torch.float32).items()}
        tensors["x"][2] = poison  # a token all of whose choices are absent
        tensors["weights"][CHOSEN["absent"] >= G] = poison
        tensors["weights"][CHOSEN["absent"] < 0] = poison
        y = block(CHOSEN["absent"], **{name: t.requires_grad_() for name, t in tensors.items()})
        dy = torch.ones_like(y)
        dy[2] = poison
        results.append([y, *torch.autograd.grad(y, list(tensors.values()), dy)])
    assert same(*results)
    assert not results[0][0][2].any()


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("x", lambda t: t[0], r"`x` must be 2-D \[S, H\]"),
        ("x", lambda t: t[1:], r"`x` must be \[S, H\] with S = 7 like `routing`"),
        ("routing", lambda t: t.tolist(), "`routing` must be a tgl.Routing"),
        ("routing", lambda t: tgl.route(t, G + 1), r"`offs` must be of length 5 \(one end per group\)"),
        ("weights", lambda t: t[:, 1:], r"`weights` must be \[S, k\] with k = 3 like `routing`"),
        ("weights", torch.Tensor.half, "`weights` must be torch.float32"),
        ("w1", lambda t: t[:, 1:], r"`w1` must be \[G, H, N\] with H = 4 like `x`"),
        ("w1", lambda t: t[..., 1:], r"`w1` must be \[G, H, 2 I\] with an even number of columns"),
        ("w1", torch.Tensor.double, "`w1` must be torch.float32 like `x`"),
        ("w2", lambda t: t[1:], r"`w2` must be \[G, I, O\] with G = 5 like `w1`"),
        ("w2", lambda t: t[:, 1:], r"`w2` must be \[G, I, O\] with I = 6 for the `w1` given"),
        ("bias1", lambda t: t[:, 1:], r"`bias1` must be of shape \[G, N\]"),
        ("bias2", torch.Tensor.half, "`bias2` must be torch.float32"),
        ("expected_rows", lambda _: 0, "`expected_rows` must be at least 1, but got 0"),
        ("expected_rows", lambda _: -3, "`expected_rows` must be at least 1, but got -3"),
        ("expected_rows", lambda _: 2.5, "`expected_rows` must be an integer or None, but got 2.5"),
    ],
)
def test_bad_input(argument, change, message):
    tensors = leaves(dtype=torch.float32)
    arguments = {"x": tensors.pop("x"), "routing": CHOSEN["some"], **tensors, "expected_rows": None}
    arguments[argument] = change(arguments[argument])
    with pytest.raises((ValueError, TypeError), match=f"tgl::moe: {message}"):
        tgl.moe(**arguments)


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("source", lambda t: t[1:], r"`source` must be of shape \[T\]"),
        ("source", torch.Tensor.float, "`source` must be int32 or int64"),
        ("position", lambda t: t[1:], r"`position` must be \[S k\] with S = 7 like `x`, k = 3"),
        ("token", lambda t: t[:, None], r"`token` must be 1-D \[T\]"),
        ("offs", torch.Tensor.long, "`offs` must be int32"),
        ("top_k", lambda k: 0, "`top_k` must be at least 1"),
        ("expected_rows", lambda _: 0, "`expected_rows` must be at least 1, but got 0"),
    ],
)
def test_bad_places(argument, change, message):
    tensors, routing = leaves(dtype=torch.float32), tgl.route(CHOSEN["some"], G)
    arguments = {name: tensors[name] for name in ("x", "w1", "w2")} | routing._asdict() | {"expected_rows": None}
    arguments[argument] = change(arguments[argument])
    with pytest.raises((ValueError, TypeError), match=f"tgl::moe: {message}"):
        torch.ops.tgl.moe(**arguments)


def test_debug_checks_look_at_the_places():
    tensors, routing = leaves(dtype=torch.float32), tgl.route(CHOSEN["some"], G)
    wrong = routing._replace(source=routing.source.flip(0))
    with tgl.debug_checks(), pytest.raises(ValueError, match="tgl::moe: `source` must be the inverse of `position`"):
        tgl.moe(tensors["x"], wrong, tensors["weights"], tensors["w1"], tensors["w2"])
