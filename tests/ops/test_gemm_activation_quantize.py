"""``grouped_gemm_scaled_activation_quantize`` is the bytes of ``grouped_gemm_scaled``, activation and quantise."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tests.activation_cases import CASES as ACTIVATIONS
from tests.activation_cases import width as width_of
from tests.memory import same_bytes
from tgl import backends
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName
from tgl.testing import ROUTINGS

CASES = OnePerName(
    FORMATS,
    "CASES",
    {
        "mxfp8": [
            {"scale_layout": "blocked"},
            {},
            {"dtype": torch.float8_e5m2, "scaling": "floor", "rowwise": False},
            {"columnwise": False, "scaling": "even"},
        ],
        "nvfp4": [{"scale_layout": "blocked", "rht": True}, {"rowwise": False}],
        "mxfp4": [{"scale_layout": "blocked"}, {"rowwise": False, "scaling": "floor"}],
        "fp8_tensor": [{}, {"power_of_two": True, "eps": 0.5}],
        "fp8_block": [{}, {"power_of_two": False}],
    },
)
K, I = 64, 48


def inputs(routing, form, kind, layout="compact", columnwise=False):
    """Operands, ends, bias and probabilities by name; NaN in every tail."""
    generator = torch.Generator().manual_seed(0)
    width, groups = width_of(kind, I), len(routing.sizes)
    x = torch.randn(routing.rows, K, generator=generator).bfloat16()
    w = torch.randn(groups, *((K, width) if columnwise else (width, K)), generator=generator).bfloat16()
    probs = torch.rand(routing.rows, generator=generator)
    x[routing.routed :] = probs[routing.routed :] = float("nan")
    names = {"format": form, "scale_layout": layout}
    offs = routing.ends()
    a = tgl.group_quantize(x, offs, **names)[:3]
    b = tgl.group_quantize(w, None, **names, block_2d=form == "fp8_block")[3 if columnwise else 0 :][:3]
    a[0][routing.routed :].view(torch.uint8).fill_(0x7F)
    made = {"a": a[0], "a_scale": a[1], "b": b[0], "b_scale": b[1], "offs": offs}
    if form == "nvfp4":
        made |= {"a_amax": a[2], "b_amax": b[2]}
    return made, torch.randn(groups, width, generator=generator), probs


def same(got, wanted):
    assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in wanted]
    return [same_bytes(x, y) for x, y in zip(got, wanted)]


def apart(operands, bias, probs, options, quantizing, scale=None):
    names = {"format": quantizing["format"], "scale_layout": quantizing.get("scale_layout", "compact")}
    product = {n: options[n] for n in ("b_direction", "out_dtype") if n in options}
    activation = {n: v for n, v in options.items() if n not in product}
    h = tgl.grouped_gemm_scaled(**operands, bias=bias, **names, **product)
    return h, tgl.grouped_activation_quantize(h, operands["offs"], probs, scale, **activation, **quantizing)


@pytest.mark.cover(1)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_the_same_bytes_as_two_ops(form, activation):
    for name, routing in ROUTINGS.items():
        several = name == "ragged_tail"
        for more in CASES[form] if several else CASES[form][:1]:
            for out_dtype in (None, torch.float32) if several else (None,):
                quantizing = {"format": form, **more}
                operands, bias, probs = inputs(routing, form, activation["kind"], more.get("scale_layout", "compact"))
                bias, probs = (None, None) if name == "even" else (bias, probs)
                options = {**activation, "out_dtype": out_dtype}
                h, made = tgl.grouped_gemm_scaled_activation_quantize(
                    **operands, bias=bias, probs=probs, **options, **quantizing
                )
                wanted = apart(operands, bias, probs, options, quantizing)
                assert all(same((h, *made), (wanted[0], *wanted[1]))), (name, more)
                assert not h[routing.routed :].any()


@pytest.mark.parametrize("form", FORMATS)
def test_columnwise_weights(form):
    operands, bias, probs = inputs(ROUTINGS["ragged_tail"], form, "swiglu", columnwise=True)
    options, quantizing = {"b_direction": "columnwise"}, {"format": form}
    h, made = tgl.grouped_gemm_scaled_activation_quantize(**operands, bias=bias, probs=probs, **options, **quantizing)
    wanted = apart(operands, bias, probs, options, quantizing)
    assert all(same((h, *made), (wanted[0], *wanted[1])))


def test_a_given_scale():
    operands, bias, probs = inputs(ROUTINGS["ragged_tail"], "fp8_tensor", "swiglu")
    scale, quantizing = torch.tensor([1.0, 2.0, 4.0, 8.0]), {"format": "fp8_tensor"}
    h, made = tgl.grouped_gemm_scaled_activation_quantize(**operands, bias=bias, probs=probs, scale=scale, **quantizing)
    wanted = apart(operands, bias, probs, {}, quantizing, scale)
    assert all(same((h, *made), (wanted[0], *wanted[1])))


@pytest.mark.parametrize("form", FORMATS)
def test_opcheck(form):
    for options in CASES[form]:
        layout = options.get("scale_layout", "compact")
        operands, bias, probs = inputs(ROUTINGS["ragged_tail"], form, "swiglu", layout)
        torch.library.opcheck(
            torch.ops.tgl.grouped_gemm_scaled_activation_quantize.default,
            (),
            {**operands, "bias": bias, "probs": probs, "format": form, **options},
            test_utils=("test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"),
        )


def test_explain_names_the_implementation():
    operands, *_ = inputs(ROUTINGS["ragged_tail"], "mxfp8", "swiglu")
    report = str(tgl.explain("grouped_gemm_scaled_activation_quantize", **operands, format="mxfp8"))
    assert "runs GEMM, then activation and quantise" in report


def test_warming_up_two_ops_prepares_all_that_they_are_made_of():
    seen, added = [], []
    for op in ("grouped_gemm_scaled", "grouped_activation", "group_quantize"):
        prepare = functools.partial(lambda name, *_, **__: seen.append(name), op)
        made = backends.Implementation(op, "prepared", "cpu", lambda *_, **__: None, priority=99, prepare=prepare)
        added.append(backends.add(made))
    try:
        operands, bias, probs = inputs(ROUTINGS["ragged_tail"], "fp8_block", "swiglu")
        call = {**operands, "bias": bias, "probs": probs, "format": "fp8_block"}
        tgl.warmup("grouped_gemm_scaled_activation_quantize", **call)
    finally:
        for made in added:
            backends.remove(made)
    assert seen == ["grouped_gemm_scaled", "grouped_activation", "group_quantize"]


def cut(t):
    return t[1:].contiguous()


@pytest.mark.parametrize(
    "form, change, error, message",
    [
        ("mxfp8", {"a": lambda t: t.float()}, TypeError, "`a` must be torch.float8_e4m3fn or torch.float8_e5m2"),
        ("mxfp8", {"b_scale": cut}, ValueError, r"`b_scale` must be of shape \[G, N, ceil\(K/32\)\]"),
        ("mxfp8", {"bias": cut}, ValueError, r"`bias` must be of shape \[G, N\] = \(4, 96\), but got"),
        ("mxfp8", {"probs": cut}, ValueError, r"`probs` must be of shape \[T\] = \(13,\), but got"),
        ("mxfp8", {"probs": torch.Tensor.half}, TypeError, "`probs` must be torch.bfloat16 or torch.float32, but"),
        ("mxfp8", {"scale": lambda t: torch.ones(4)}, ValueError, "`scale` must be None for mxfp8, but got a tensor"),
        ("mxfp8", {"kind": lambda t: "no_such"}, ValueError, "`kind` must be one of .*, but got 'no_such'"),
        ("mxfp8", {"b": lambda t: t[:, 1:].contiguous(), "b_scale": lambda t: t[:, 1:].contiguous(),
                   "bias": lambda t: None}, ValueError, "`b` must be such that N = 2 I is even, but got"),
        ("nvfp4", {"b": lambda t: t[:, :42].contiguous(), "b_scale": lambda t: t[:, :42].contiguous(),
                   "bias": lambda t: None}, ValueError, r"`b` must be such that I is even \(two elements share"),
        ("mxfp8", {"rowwise": lambda t: False, "columnwise": lambda t: False}, ValueError, "`rowwise` must be True"),
        ("mxfp8", {"out_dtype": lambda t: torch.float64}, TypeError, "`out_dtype` must be float32, bfloat16 or"),
        ("fp8_tensor", {"scale": lambda t: torch.ones(2)}, ValueError, r"`scale` must be of shape \[G\] = \(4,\)"),
        ("mxfp8", {"format": lambda t: "int8"}, ValueError, "`format` must be one of mxfp8, nvfp4, mxfp4, fp8_tensor,"),
        ("mxfp8", {"bias": lambda t: t.requires_grad_()}, RuntimeError, r"no derivative.* GroupedLinear\(recipe"),
    ],
)  # fmt: skip
def test_bad_arguments(form, change, error, message):
    """Bad arguments raise the same error, eager and faked."""
    operands, bias, probs = inputs(ROUTINGS["ragged_tail"], form, "swiglu")
    call = {**operands, "bias": bias, "probs": probs, "format": form}
    call |= {name: spoil(call.get(name)) for name, spoil in change.items()}
    with pytest.raises(error, match=message) as real:
        tgl.grouped_gemm_scaled_activation_quantize(**call)
    assert "tgl::grouped_gemm_scaled_activation_quantize: " in str(real.value)
    if error is RuntimeError:
        return
    with FakeTensorMode() as mode, pytest.raises(error) as fake:
        fakes = {n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in call.items()}
        tgl.grouped_gemm_scaled_activation_quantize(**fakes)
    assert str(fake.value).splitlines()[0] == str(real.value).splitlines()[0]
