"""``torch.set_default_dtype`` and default devices, which change no byte of an op's or a layer's result."""

import ast
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

import tgl
from tests import covers
from tests.memory import same_bytes
from tgl.backends.cpu import scratch as _scratch
from tgl.meta.formats import FORMATS
from tgl.meta.scale_layout import LAYOUTS
from tgl.meta.table import OnePerName
from tgl.testing import ROUTINGS, SIGNATURES, sample_inputs
from tgl.testing.signatures import overload


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


DEFAULTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: default_device("meta"),
}
SAMPLED = ("above_tile", "ragged_tail")


DTYPE_AND_DEVICE = ("empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")
DEVICE = (
    "arange",
    "as_tensor",
    "asarray",
    "empty_strided",
    "randint",
    "randperm",
)  # their dtype follows from arguments


def test_every_allocation_states_device_and_dtype():
    """Every allocation of the package, by its source: code for a GPU does not run here."""
    silent = []
    for path in sorted(Path(tgl.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("torch."):
                continue
            name = ast.unparse(node.func).removeprefix("torch.")
            needed = {"dtype", "device"} if name in DTYPE_AND_DEVICE else {"device"} if name in DEVICE else set()
            missing = needed - {k.arg for k in node.keywords}
            silent += [f"{path}:{node.lineno}: {name} without {', '.join(missing)}"] if missing else []
    assert not silent


def forget():
    """Tables and buffers that calls leave to later ones: every run makes its own."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tgl":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    _scratch._kept.buffers, _scratch._kept.lent = {}, {}


@pytest.fixture(autouse=True)
def nothing_remembered():
    forget()
    yield
    forget()


def compare(run):
    """``run`` yields names and tensors, which must be the plain run's under every default."""
    plain = dict(run())
    for default, context in DEFAULTS.items():
        forget()
        with context():
            other = dict(run())
        assert plain.keys() == other.keys()
        for name, t in plain.items():
            assert (t.dtype, t.device) == (other[name].dtype, other[name].device), (default, name)
            assert same_bytes(t, other[name]), (default, name)


def listed(returned):
    return [] if returned is None else [returned] if isinstance(returned, torch.Tensor) else list(returned)


def of_sample(op, sample):
    """Arguments, outputs, what was written, and gradients."""
    tensors = sample.tensors()
    for name, t in tensors.items():
        if t is not None:
            yield f"{sample.name} {name}", t.clone()
    differentiable = sample.signature.differentiable and not sample.signature.written
    if differentiable:
        tensors = {
            n: t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for n, t in tensors.items()
        }
    args, kwargs = sample.call(op, tensors)
    outputs = listed(op(*args, **kwargs))
    for name, t in zip(sample.signature.outputs, outputs):
        yield f"{sample.name} -> {name.name}", t
    for operand in sample.signature.written:
        yield f"{sample.name} -> {operand.name}", tensors[operand.name]
    if differentiable:
        pairs = [(o, t) for o, t in zip(sample.signature.outputs, outputs) if t.requires_grad]
        leaves = {n: t for n, t in tensors.items() if t is not None and t.requires_grad}
        cotangents = [sample.cotangent(t, o) for o, t in pairs]
        grads = torch.autograd.grad([t for _, t in pairs], list(leaves.values()), cotangents, allow_unused=True)
        for name, grad in zip(leaves, grads):
            if grad is not None:
                yield f"{sample.name} d {name}", grad


@pytest.mark.parametrize("name", SIGNATURES)
def test_ops(name):
    op = overload(name)
    samples = list(sample_inputs(name, routings=SAMPLED))
    few = covers.covering(
        samples, lambda sample: {**covers.form(sample), "dtype": sample.dtype, "routing": sample.routing.name}, 1
    )
    compare(lambda: (pair for sample in few for pair in of_sample(op, sample)))


def numbered(name, tensors):
    return ((f"{name} {i}", t) for i, t in enumerate(listed(tensors)))


X = torch.randn(ROUTINGS["above_tile"].rows, 96, generator=torch.Generator().manual_seed(0))
W = torch.randn(3, 96, 96, generator=torch.Generator().manual_seed(1))
OFFS = ROUTINGS["above_tile"].ends()
CONVERTED = OnePerName(
    FORMATS,
    "CONVERTED",
    {
        "mxfp8": LAYOUTS,
        "nvfp4": LAYOUTS,
        "mxfp4": tuple(layout for layout in LAYOUTS if layout != "te"),
        "fp8_tensor": (),
        "fp8_block": ("te",),
    },
)


def without_signatures():
    """The ops that have no entry among the signatures."""
    yield "allocate_wgrad", tgl.allocate_wgrad(2, (3, 5), torch.float16, device="cpu").zero_()
    yield "after", torch.ops.tgl.after(X, OFFS)
    yield "offload", torch.ops.tgl.offload(X)
    yield "reload", torch.ops.tgl.reload(X, torch.device("cpu"))
    state, room = torch.zeros(2, dtype=torch.int64, device="cpu"), X.new_zeros(2, *X.shape)
    tgl.wgrad_stash_([X], state, [room])
    yield from {"state": state, "room": room}.items()
    for form in FORMATS:
        for interleaved in (False, True):
            made = tgl.grouped_activation_quantize(X, OFFS, X[:, 0], format=form, interleaved=interleaved)
            yield from numbered(f"{form} activation {interleaved}", made)
        a, b = (
            tgl.group_quantize(X, OFFS, format=form),
            tgl.group_quantize(W, None, format=form, block_2d=FORMATS[form].square_scales),
        )
        amax = {"a_amax": a.amax, "b_amax": b.amax} if FORMATS[form].decodes_with_amax else {}
        made = torch.ops.tgl.grouped_gemm_scaled_activation_quantize(
            a.data, a.scale, b.data, b.scale, OFFS, **amax, format=form, kind="swiglu"
        )
        yield from numbered(f"{form} product activation", made)
    for form in FORMATS:
        scale = tgl.group_quantize(X, OFFS, format=form).scale
        for layout in CONVERTED[form]:
            options = {"shape": X.shape, "layout": layout, "format": form}
            there = torch.ops.tgl.scale_to_layout(scale, OFFS, **options)
            yield f"{form} {layout}", there
            yield f"{form} {layout} back", torch.ops.tgl.scale_from_layout(there, OFFS, **options)


def test_ops_without_signatures():
    compare(without_signatures)


def routed():
    """Routing and both ways, with weights."""
    index = torch.tensor([[0, 2], [3, 1], [2, 0]], device="cpu")
    weights = X[:3, :2].clone().requires_grad_()
    routing = tgl.route(index, 3)
    x = X[:3].clone().requires_grad_()
    rows, probs = tgl.dispatch(x, routing), tgl.dispatch_weights(weights, routing)
    y = tgl.combine(rows * probs[:, None], routing)
    z = tgl.combine(rows, routing, weights)
    yield from numbered("routing", (*routing[:3], routing.token, rows, probs, y, z))
    yield from numbered("gradients", torch.autograd.grad(y.sum() + z.sum(), (x, weights)))


def test_routing():
    compare(routed)


RECIPES = {
    "none": None,
    "mxfp8": tgl.recipes.MXFP8BlockScaling(),
    "nvfp4": tgl.recipes.NVFP4BlockScaling(),
    "current": tgl.recipes.Float8CurrentScaling(),
    "delayed": tgl.recipes.DelayedScaling(),
    "block": tgl.recipes.Float8BlockScaling(),
}


def through(make, inp, **options):
    """Two steps of a new layer: results, gradients, state."""
    layer = make()
    for step in range(2):
        x = inp.clone().requires_grad_()
        y = layer(x, [129, 0, 127], **options)
        y.backward(gradient=inp[:, : y.shape[1]])
        if getattr(layer, "delay_wgrad_compute", False):
            layer.backward_dw()
        yield from {f"{step} y": y, f"{step} dx": x.grad}.items()
    yield from layer.state_dict().items()
    yield from ((f"d {n}", p.grad) for n, p in layer.named_parameters())


def new_layer(cls, **options):
    torch.manual_seed(3)
    return cls(3, 96, 64, params_dtype=torch.bfloat16, device="cpu", **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers(recipe):
    inp = X.bfloat16()
    linear = {"bias": True, "recipe": RECIPES[recipe]}
    ways = [
        (tgl.GroupedLinear, linear, {"is_first_microbatch": True if RECIPES[recipe] else None}),
        (tgl.GroupedLinear, {**linear, "single_grouped_weight": False, "delay_wgrad_compute": True}, {}),
        (tgl.GroupedMLP, {"recipe": RECIPES[recipe]}, {"probs": X[:, 0]}),
    ]
    for cls, options, call in ways:
        compare(partial(through, partial(new_layer, cls, **options), inp, **call))


@pytest.mark.parametrize("form", ["dense", *FORMATS])
def test_grouped_tensors(form):
    def run():
        made = tgl.quantize(X, OFFS, format=form)
        yield "values", made.dequantize()
        yield from made.parts().items()

    compare(run)
