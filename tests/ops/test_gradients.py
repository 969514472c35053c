"""First and second derivatives in float64, and what a backward computes and keeps."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tgl
from tests import oracle
from tgl.meta.activations import TABLE
from tgl.testing import SIGNATURES, GroupSizes
from tgl.testing.samples import SampleInput

ROUTING = GroupSizes("small", (2, 0, 1), 4)
OFFS = ROUTING.ends()
DIFFERENTIABLE = [n for n, s in SIGNATURES.items() if s[0].differentiable and not s[0].written]
CASES = [
    (name, signature, given, dict(zip(signature.options, values)))
    for name in DIFFERENTIABLE
    for signature in SIGNATURES[name]
    if signature.differentiable
    for given in signature.presence()
    for values in itertools.product(*signature.options.values())
]


def random_operands(signature, given, options):
    """float64 leaves off the grid of integers; the tail holds ordinary numbers, whose derivative must be zero."""
    few = {"K": 2, "M": 2, "N": 3, "I": 2}
    small = dataclasses.replace(signature, dimensions={**signature.dimensions, **few})
    made = SampleInput(small, ROUTING, torch.float64, given=given, options=options).tensors()
    generator = torch.Generator().manual_seed(3)
    for operand in small.operands:
        if operand.role == "derived":
            yield made[operand.name]
        elif operand.role == "ends":
            yield OFFS
        elif operand.optional and operand.name not in given:
            yield None
        else:
            shape = small.shape(operand, ROUTING)
            yield torch.randn(shape, dtype=torch.float64, generator=generator).mul_(1.5).requires_grad_()


def function_and_leaves(name, signature, given, options):
    """The op of a case as a function of what has derivatives, and values of these."""
    op = getattr(torch.ops.tgl, name).default
    if options.get("kind") in TABLE:
        given_constants = {"limit": 1.25, "alpha": 1.3, "offset": 0.5}  # a limit that the samples cross
        options = {**options, **{k: v for k, v in given_constants.items() if k in TABLE[options["kind"]].constants}}
    operands = dict(zip([o.name for o in signature.operands], random_operands(signature, given, options)))
    leaves = [t for t in operands.values() if t is not None and t.requires_grad]

    def function(*values):
        values = iter(values)
        changed = {n: next(values) if t is not None and t.requires_grad else t for n, t in operands.items()}
        results = op(**changed, **options)
        return tuple(r for r in results if r.numel()) if isinstance(results, tuple) else results

    return function, leaves


@pytest.mark.cover(2)
@pytest.mark.parametrize("name, signature, given, options", CASES, ids=[f"{n}-{g}-{o}" for n, _, g, o in CASES])
def test_gradcheck_and_gradgradcheck(name, signature, given, options):
    """Every first derivative, and the second ones along random directions, which a wrong element changes as well."""
    function, leaves = function_and_leaves(name, signature, given, options)
    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("name, signature, given, options", CASES, ids=[f"{n}-{g}-{o}" for n, _, g, o in CASES])
def test_every_second_derivative(name, signature, given, options):
    assert gradgradcheck(*function_and_leaves(name, signature, given, options))


class Calls(TorchDispatchMode):
    """Records the tgl ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tgl":
            self.names.append(func.name().removeprefix("tgl::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("given", [(), ("bias",), ("bias", "bias_scale")])
def test_a_backward_computes_only_what_is_needed(given):
    names = ("a", "b", *given)
    for wanted in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(1, len(names) + 1)):
        signature = SIGNATURES["grouped_gemm"][0]
        operands = dict(zip([o.name for o in signature.operands], random_operands(signature, given, {})))
        for name in names:
            operands[name].requires_grad_(name in wanted)
        y = tgl.grouped_gemm(*operands.values())
        with Calls() as calls:
            y.backward(torch.ones_like(y))
        sums = {"grouped_dbias_dscales" if "bias_scale" in given else "grouped_dbias"}
        expected = {"grouped_gemm"} & {"grouped_gemm" for n in wanted if n == "a"}
        expected |= {"grouped_gemm_wgrad" for n in wanted if n == "b"}
        expected |= sums if {"bias", "bias_scale"} & set(wanted) else set()
        assert sorted(calls.names) == sorted(expected), wanted
        assert {n for n in names if operands[n].grad is not None} == set(wanted)


@pytest.mark.parametrize("frozen, kept", [("a", "a"), ("b", "b")])
def test_a_frozen_operand_spares_the_other_one_from_being_kept(frozen, kept):
    """dW needs ``a`` and dX needs ``b``: with one frozen, the tensor that only its gradient needs is not saved."""
    operands = {"a": torch.randn(4, 2, requires_grad=True), "b": torch.randn(3, 2, 5, requires_grad=True)}
    operands[frozen].requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        tgl.grouped_gemm(operands["a"], operands["b"], OFFS)
    other = "b" if kept == "a" else "a"
    assert operands[kept].data_ptr() in saved
    assert operands[other].data_ptr() not in saved


def test_the_weight_gradient_has_the_memory_order_of_the_weight():
    a = torch.randn(4, 2)
    for transposed in (False, True):
        b = torch.randn(3, 5, 2).transpose(1, 2) if transposed else torch.randn(3, 2, 5)
        b = b.detach().requires_grad_()
        (grad,) = torch.autograd.grad(tgl.grouped_gemm(a, b, OFFS).sum(), b)
        assert grad.stride() == b.stride()


@pytest.mark.parametrize("shape", [(), (5,), (4, 1)], ids=["scalar", "row", "column"])
def test_expanded_gradients(shape):
    """A gradient with stride 0 along rows, columns or both, as ``sum`` and broadcasting make them."""
    signature = SIGNATURES["grouped_gemm"][0]
    given = ("bias", "bias_scale")
    small = type(signature)(signature.text, dimensions={"K": 2, "N": 5})
    grads = []
    for dense in (False, True):
        operands = list(random_operands(small, given, {}))
        operands[1] = torch.randn(
            3, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
        ).requires_grad_()
        operands[3] = torch.randn(
            3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(6)
        ).requires_grad_()
        y = tgl.grouped_gemm(*operands)
        dy = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).expand(y.shape)
        assert 0 in dy.stride()
        grads.append(torch.autograd.grad(y, [t for t in operands if t.requires_grad], dy.contiguous() if dense else dy))
    torch.testing.assert_close(*grads)


def test_a_saved_tensor_overwritten_through_an_out_variant_is_noticed():
    a, b = torch.randn(4, 3), torch.randn(3, 3, 3, requires_grad=True)
    y = tgl.grouped_gemm(a, b, OFFS)
    tgl.grouped_gemm(torch.ones(4, 3), b.detach(), OFFS, out=a)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_implementation_that_writes_past_pytorch_is_noticed_too():
    """A foreign kernel stores through a pointer, which bumps no version counter: the op itself has to."""
    a, b = torch.randn(4, 3), torch.randn(3, 3, 3, requires_grad=True)
    y = tgl.grouped_gemm(a, b, OFFS)

    @tgl.register_implementation("grouped_gemm", "numpy", device="cpu")
    def through_numpy(a, b, offs, bias, bias_scale, *, out, zero_tail):
        out.numpy()[:] = 1

    try:
        tgl.grouped_gemm(torch.ones(4, 3), b.detach(), OFFS, out=a)
    finally:
        tgl.backends.remove(through_numpy)
    assert (a == 1).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("with_probs", [False, True])
def test_activation_and_its_gradients_against_autograd_of_the_oracle(kind, interleaved, with_probs):
    x = (torch.randn(4, 6, dtype=torch.float64) * 5).requires_grad_()
    probs = torch.rand(4, dtype=torch.float64).requires_grad_() if with_probs else None
    leaves = [x] + [probs] * with_probs
    results = []
    for function in (tgl.grouped_activation, oracle.activation):
        y = function(x, OFFS, probs, kind=kind, interleaved=interleaved)
        results.append((y, torch.autograd.grad(y, leaves, torch.full_like(y, 0.7))))
    torch.testing.assert_close(*results)


class Clamp(torch.autograd.Function):
    """``clamp`` with the derivative of the inside on its bounds; that of ``torch.clamp`` depends on the version."""

    @staticmethod
    def forward(ctx, x, least, most):
        ctx.save_for_backward((x >= least) & (x <= most))
        return x.clamp(least, most)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


def test_activation_at_the_clamps_and_at_zero():
    """At its kinks the derivative is that of the inside for the clamps, and zero for the square."""
    x = torch.tensor([[7.0, 7.0], [8.0, -7.0], [0.0, 7.5], [-9.0, -8.0]], requires_grad=True)
    offs = torch.tensor([4], dtype=torch.int32)
    y = tgl.grouped_activation(x, offs, kind="clamped_qgeglu")
    (grad,) = torch.autograd.grad(y.sum(), x)
    leaf = x.detach().clone().requires_grad_()
    gate, linear = Clamp.apply(leaf[:, :1], -math.inf, 7.0), Clamp.apply(leaf[:, 1:], -7.0, 7.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), leaf)[0])

    zero = torch.zeros(1, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(
        tgl.grouped_activation(zero, torch.tensor([1], dtype=torch.int32), kind="srelu").sum(), zero
    )
    assert not grad.any()


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("with_probs", [False, True])
def test_wide_rows_take_several_steps_on_a_cpu(dtype, kind, interleaved, with_probs):
    """So wide that a step holds a few rows and the last one fewer: no step may see another's leftovers."""
    rows, width = 12, 10_000
    x = torch.randn(rows, TABLE[kind].width(width)).mul_(4).to(dtype).requires_grad_()
    probs = torch.rand(rows).to(dtype).requires_grad_() if with_probs else None
    offs = torch.tensor([3, 3, rows - 1], dtype=torch.int32)
    results = []
    for function, wide in ((tgl.grouped_activation, dtype), (oracle.activation, torch.float64)):
        leaves = [t.detach().to(wide).requires_grad_() for t in (x, probs) if t is not None]
        options = {"kind": kind, "interleaved": interleaved, "limit": 6.3}  # which no sample equals
        y = function(leaves[0], offs, leaves[1] if with_probs else None, **options)
        grads = torch.autograd.grad(y, leaves, torch.full_like(y, 0.75))
        results.append([t.to(dtype) for t in (y, *grads)])
    torch.testing.assert_close(results[0][:2], results[1][:2])
    if with_probs:  # a sum of terms of either sign: its error is relative to the sum of their magnitudes
        magnitude = (y.detach() * 0.75 / leaves[1][:, None]).abs().sum(1)
        (_, _, have), (_, _, want) = results
        allowed = 8 * torch.finfo(torch.float32).eps * magnitude + torch.finfo(dtype).eps * want.abs()
        assert ((have.double() - want.double()).abs() <= allowed).all()


@pytest.mark.cover(2)
@pytest.mark.parametrize("name, signature, given, options", CASES, ids=[f"{n}-{g}-{o}" for n, _, g, o in CASES])
def test_second_derivatives_never_read_a_tail(name, signature, given, options):
    """NaN in the tails of the inputs, of the gradient and of its gradient changes nothing."""
    op = getattr(torch.ops.tgl, name).default
    results = []
    for tail in (float("nan"), 77.0):

        def poison(t, role, tail=tail):
            t = t.detach().clone()
            if role.by_row:
                t[ROUTING.routed :] = tail
            return t

        operands = []
        for role, t in zip(signature.operands, random_operands(signature, given, options)):
            floating = t is not None and t.is_floating_point()
            operands.append(poison(t, role).requires_grad_() if floating else t)
        leaves = [t for t in operands if t is not None and t.requires_grad]
        roles = [r for r, t in zip(signature.operands, operands) if t is not None and t.requires_grad]
        outputs = op(**dict(zip([o.name for o in signature.operands], operands)), **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        shaped = [(y, r) for y, r in zip(outputs, signature.outputs) if y.numel()]
        seeds = [poison(torch.ones_like(y), r).requires_grad_() for y, r in shaped]
        grads = torch.autograd.grad([y for y, _ in shaped], leaves, seeds, create_graph=True)
        pairs = [(g, r) for g, r in zip(grads, roles) if g.requires_grad]
        cotangents = [poison(torch.ones_like(g), r) for g, r in pairs]
        second = torch.autograd.grad([g for g, _ in pairs], [*leaves, *seeds], cotangents, allow_unused=True)
        assert all(g.isfinite().all() for g in second if g is not None)
        results.append(second)
    assert any(g is not None and g.any() for g in results[0])
    for first, second in zip(*results):
        assert (first is None and second is None) or torch.equal(first, second)
