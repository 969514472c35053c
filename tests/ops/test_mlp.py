"""``grouped_mlp`` has the bits of its three ops, forward and backward."""

import functools
import itertools

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import tgl
from tests.covers import covering, form
from tests.peak_memory import peak_memory
from tgl.meta.activations import TABLE
from tgl.testing import ROUTINGS, GroupSizes, sample_inputs
from tgl.testing.samples import DTYPES

NAMES = ("x", "w1", "w2", "probs", "bias1", "bias2")
MANY_TURNS = GroupSizes("many_turns", (700, 0, 900, 1, 1500, 40), 3200)


def composed(x, w1, w2, offs, probs, bias1, bias2, **options):
    h = tgl.grouped_gemm(x, w1, offs, bias1)
    act = tgl.grouped_activation(h, offs, probs, **options)
    return tgl.grouped_gemm(act, w2, offs, bias2, None if bias2 is None else probs)


def noise(t):
    """The values of a sample made uneven, so that sums depend on their order and products are rounded."""
    generator = torch.Generator().manual_seed(t.numel())
    return t + torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)


def with_gradients(function, tensors, frozen=()):
    """Output and gradients of the floating arguments, leaves in the memory order of ``tensors``."""
    leaves = {}
    for name, t in tensors.items():
        if t is not None and t.is_floating_point():
            t = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) if 0 not in t.stride() else t.clone()
            t.requires_grad_(name not in frozen)
        leaves[name] = t
    y = function(*leaves.values())
    dy = noise(torch.ones(y.shape, dtype=y.dtype)) - 1
    grads = torch.autograd.grad(y, [leaves[n] for n in NAMES if leaves[n] is not None and n not in frozen], dy)
    return [y.detach(), *grads]


def same(one, other):
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(one, other, strict=True))


def few(samples):
    """Return samples that hold every routing, layout and choice of arguments."""
    return covering(samples, lambda sample: {**form(sample), "routing": sample.routing.name}, 1)


@pytest.mark.parametrize("some", [few, pytest.param(list, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_samples(dtype, some):
    for sample in some(list(sample_inputs("grouped_mlp", dtypes=(dtype,)))):
        tensors = {n: noise(t) if n in NAMES and t is not None else t for n, t in sample.tensors().items()}
        for options in ({"kind": "srelu"}, {"kind": "swiglu", "interleaved": True}):
            narrow = {**tensors, "w2": tensors["w2"][:, : tensors["w1"].shape[2] // 2]}
            given = tensors if options["kind"] == "srelu" else narrow
            expected = with_gradients(functools.partial(composed, **options), given)
            for recompute in (False, True):
                function = functools.partial(tgl.grouped_mlp, **options, recompute=recompute)
                assert same(with_gradients(function, given), expected), (sample.name, options, recompute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("stored", "kind"), [(False, "swiglu"), (True, "swiglu"), (True, "clamped_qgeglu")])
def test_bits_of_groups_that_are_taken_in_turn(dtype, stored, kind):
    """More rows than are taken together, a group that is more than that alone, and weights stored as ``[G, N, K]``."""
    x, w1, w2 = (torch.randn(s) for s in ((MANY_TURNS.rows, 32), (6, 32, 384), (6, 192, 48)))
    if stored:
        w1, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))
    tensors = dict(zip(("x", "w1", "w2"), (t.to(dtype) for t in (x, w1, w2))))
    tensors |= {"offs": MANY_TURNS.ends(), "probs": torch.rand(MANY_TURNS.rows), "bias1": None, "bias2": None}
    tensors["x"][MANY_TURNS.routed :] = float("nan")
    tensors["probs"][MANY_TURNS.routed :] = float("nan")
    expected = with_gradients(functools.partial(composed, kind=kind), tensors)
    assert all(t.isfinite().all() for t in expected)
    for recompute in (False, True):
        result = with_gradients(functools.partial(tgl.grouped_mlp, kind=kind, recompute=recompute), tensors)
        assert same(result, expected)


def test_only_the_gradients_that_are_needed():
    sample = next(s for s in sample_inputs("grouped_mlp", dtypes=(torch.float32,)) if len(s.given) == 3)
    tensors = {n: noise(t) if n in NAMES else t for n, t in sample.tensors().items()}
    for count in range(len(NAMES)):
        for frozen in itertools.combinations(NAMES, count):
            expected = with_gradients(functools.partial(composed, kind="srelu"), tensors, frozen)
            function = functools.partial(tgl.grouped_mlp, kind="srelu")
            assert same(with_gradients(function, tensors, frozen), expected), frozen


def test_nothing_is_saved_for_a_frozen_first_weight():
    """Its input is not needed then."""
    x, w2 = torch.randn(5, 4, requires_grad=True), torch.randn(2, 6, 4, requires_grad=True)
    offs, saved = torch.tensor([2, 5], dtype=torch.int32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        tgl.grouped_mlp(x, torch.randn(2, 4, 12), w2, offs)
    assert w2.data_ptr() in saved
    assert x.data_ptr() not in saved


def test_memory():
    """Peak memory is that of the parts, though the gradient of the result is held to the end of the backward."""
    groups, rows, width = 16, 500, 64  # the activation is smaller than its weight, so it is what waits
    x, w1, w2 = torch.randn(rows, width), torch.randn(groups, width, 2 * width), torch.randn(groups, width, width)
    tensors = [t.requires_grad_() for t in (x, w1, w2)]
    offs = (torch.arange(groups) + 1).mul(rows // groups).int()

    def step(function):
        function(*tensors).square().sum().backward()
        for t in tensors:
            t.grad = None

    one = peak_memory(lambda: step(lambda *t: tgl.grouped_mlp(*t, offs)))
    parts = peak_memory(lambda: step(lambda *t: composed(*t, offs, None, None, None)))
    assert one <= parts + 1024  # of what is a row or less


# Second derivatives of the activations are those of their own op.
@pytest.mark.cover(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in ("clamped_qgeglu", "srelu") else pytest.mark.slow) for k in TABLE]
)
def test_second_order(kind, recompute):
    torch.manual_seed(0)
    width = TABLE[kind].width(4)
    shapes = ((6, 3), (2, 3, width), (2, 4, 3), (6,), (2, width), (2, 3))
    x, w1, w2, *rest = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    offs = torch.tensor([2, 5], dtype=torch.int32)

    def function(x, w1, w2, *rest):
        return tgl.grouped_mlp(x, w1, w2, offs, *rest, kind=kind, recompute=recompute)

    assert torch.autograd.gradcheck(function, (x, w1, w2, *rest))
    assert torch.autograd.gradgradcheck(function, (x, w1, w2, *rest))


def test_func_grad_and_jvp():
    x, w1, w2 = torch.randn(5, 4), torch.randn(2, 4, 12), torch.randn(2, 6, 4)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    grad = torch.func.grad(lambda x: tgl.grouped_mlp(x, w1, w2, offs).sum())(x)
    x.requires_grad_()
    assert torch.equal(grad, torch.autograd.grad(tgl.grouped_mlp(x, w1, w2, offs).sum(), x)[0])
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: tgl.grouped_mlp(x, w1, w2, offs), (x.detach(),), (x.detach(),))


def test_autocast():
    x, w1, w2 = torch.randn(5, 4), torch.randn(2, 4, 12), torch.randn(2, 6, 4)
    offs, probs = torch.tensor([2, 5], dtype=torch.int32), torch.rand(5)
    with torch.autocast("cpu", torch.bfloat16):
        y = tgl.grouped_mlp(x, w1, w2, offs, probs)
    assert torch.equal(y, tgl.grouped_mlp(*(t.bfloat16() for t in (x, w1, w2)), offs, probs))


def test_explain_refers_to_the_parts():
    x, w1, w2 = torch.randn(5, 4), torch.randn(2, 4, 12), torch.randn(2, 6, 4)
    explanation = tgl.explain(tgl.grouped_mlp, x, w1, w2, ROUTINGS["one_group"].ends().repeat(2))
    assert explanation.chosen.name == "composition"
    assert "the implementations of its steps" in str(explanation)


@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("x", lambda t: t[0], r"`x` must be 2-D \[T, H\]"),
        ("w1", lambda t: t[:, 1:], r"`w1` must be \[G, H, N\] with H = 4 like `x`"),
        ("w1", lambda t: t[..., 1:], r"`w1` must be \[G, H, 2 I\] with an even number of columns"),
        ("w1", torch.Tensor.double, "`w1` must be torch.float32 like `x`"),
        ("w2", lambda t: t[1:], r"`w2` must be \[G, I, O\] with G = 2 like `w1`"),
        ("w2", lambda t: t[:, 1:], r"`w2` must be \[G, I, O\] with I = 6 for the `w1` given"),
        ("offs", torch.Tensor.long, "`offs` must be int32"),
        ("probs", lambda t: t[1:], r"`probs` must be of shape \[T\]"),
        ("bias1", lambda t: t[:, 1:], r"`bias1` must be of shape \[G, N\]"),
        ("bias2", torch.Tensor.half, "`bias2` must be torch.float32"),
    ],
)
def test_bad_input(argument, change, message):
    arguments = {
        "x": torch.randn(5, 4),
        "w1": torch.randn(2, 4, 12),
        "w2": torch.randn(2, 6, 4),
        "offs": torch.tensor([2, 5], dtype=torch.int32),
        "probs": torch.rand(5),
        "bias1": torch.randn(2, 12),
        "bias2": torch.randn(2, 4),
    }
    arguments[argument] = change(arguments[argument])
    with pytest.raises((ValueError, TypeError), match=f"tgl::grouped_mlp: {message}"):
        tgl.grouped_mlp(**arguments)


@pytest.mark.parametrize(("rows", "held"), [(16, [[1, 1], [1, 0], [0, 0]]), (6, [[1, 1], [1, 1], [0, 1]])])
def test_the_backward_frees_tensors_early(rows, held):
    """When dx is computed, h is not held, and the activation's result only if it is smaller than w2."""
    x, w1, w2 = (torch.randn(*shape, requires_grad=True) for shape in ((rows, 4), (2, 4, 8), (2, 4, 4)))
    y, *between = torch.ops.tgl.grouped_mlp(x, w1, w2, torch.tensor([2, rows], dtype=torch.int32))
    stores = [StorageWeakRef(t.untyped_storage()) for t in between]
    del between
    seen = [[not store.expired() for store in stores]]

    def spy(a, b, offs, bias, bias_scale, *, out, zero_tail):
        seen.append([not store.expired() for store in stores])
        out.zero_()

    mine = tgl.register_implementation("grouped_gemm", "spy", device="cpu")(spy)
    try:
        y.sum().backward()
    finally:
        tgl.backends.remove(mine)
    assert seen == held  # before, for the gradient of the activation's result, for that of x


def test_modes_and_autocast_see_the_backward():
    x, w1, w2 = (torch.randn(*shape, requires_grad=True) for shape in ((6, 4), (2, 4, 8), (2, 4, 4)))
    offs = torch.tensor([2, 6], dtype=torch.int32)

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names = []
    expected = torch.autograd.grad(tgl.grouped_mlp(x, w1, w2, offs).sum(), (x, w1, w2))
    y = tgl.grouped_mlp(x, w1, w2, offs).sum()
    with Seen():
        assert same(torch.autograd.grad(y, (x, w1, w2)), expected)
    assert "tgl.grouped_mlp_backward.default" in names
    y = tgl.grouped_mlp(x, w1, w2, offs).sum()
    with torch.autocast("cpu", torch.bfloat16):  # what was not cast in the forward is not cast in the backward
        assert same(torch.autograd.grad(y, (x, w1, w2)), expected)
