"""Bad operands of the scaled GEMMs get one error that names the argument, eager and faked, and nothing is written."""

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tgl.testing import SIGNATURES, GroupSizes

ROUTING = GroupSizes("small", (2, 0, 3), 6)
GEMM, WGRAD, ACCUMULATE = "grouped_gemm_scaled", "grouped_gemm_scaled_wgrad", "grouped_gemm_scaled_wgrad_accumulate_"
E4M3 = torch.float8_e4m3fn


def arguments(name, form, layout="compact", direction="rowwise"):
    """Good arguments and options."""
    for sample in SIGNATURES[name][0].samples(routings=(ROUTING,), dtypes=(torch.float32,)):
        options = sample.options
        fits = options["format"] == form and options["scale_layout"] == layout
        complete = len(sample.given) == 2 or "bias" not in SIGNATURES[name][0].text
        if fits and complete and options.get("b_direction", direction) == direction:
            return sample.tensors(tail=0.0, layout="row"), dict(options)
    raise AssertionError


def cut(dim):
    return lambda t: t.narrow(dim, 0, t.shape[dim] - 1).contiguous()


def call(name, tensors, options):
    return getattr(tgl, name)(**tensors, **options)


CASES = [
    # op, format, layout, argument, change, exception, message
    (GEMM, "mxfp8", "compact", "a", lambda t: t.float(), TypeError, "must be torch.float8_e4m3fn or torch.float8_e5m2"),
    (GEMM, "nvfp4", "compact", "a", lambda t: t.view(E4M3), TypeError, "must be torch.uint8 for nvfp4, but"),
    (GEMM, "fp8_tensor", "compact", "b", lambda t: t.view(torch.uint8), TypeError, "must be torch.float8_e4m3fn or"),
    (GEMM, "mxfp8", "compact", "a", lambda t: t[None], ValueError, r"must be 2-D \[T, K\], but got"),
    (GEMM, "nvfp4", "compact", "a", lambda t: t[None], ValueError, r"must be 2-D \[T, K/2\], but got"),
    (GEMM, "mxfp8", "compact", "a", lambda t: t.repeat(1, 2)[:, ::2], ValueError, "must be contiguous, but got"),
    (GEMM, "mxfp8", "compact", "b", cut(2), ValueError, r"must be \[G, N, K\] with K = 40 like `a`, but got"),
    (GEMM, "nvfp4", "compact", "b", cut(2), ValueError, r"must be \[G, N, K/2\] with K/2 = 20 like `a`, but got"),
    (GEMM, "fp8_block", "compact", "b", lambda t: t.to("meta"), ValueError, "must be on cpu like `a`, but got meta"),
    (GEMM, "mxfp8", "compact", "a_scale", lambda t: t.float(), TypeError, "must be torch.uint8 for mxfp8, but"),
    (GEMM, "mxfp8", "compact", "a_scale", cut(1), ValueError, r"\[T, ceil\(K/32\)\] \(compact\) = \(6, 2\)"),
    (GEMM, "nvfp4", "compact", "a_scale", cut(0), ValueError, r"\[T, ceil\(K/16\)\] \(compact\) = \(6, 3\)"),
    (GEMM, "fp8_tensor", "compact", "a_scale", cut(0), ValueError, r"\[G\] \(one per group\) = \(3,\), but"),
    (GEMM, "fp8_block", "compact", "a_scale", cut(1), ValueError, r"must be of shape \[T, ceil\(K/128\)\] \(compact\)"),
    (GEMM, "fp8_block", "compact", "b_scale", lambda t: t.repeat(1, 2, 1), ValueError, r"\[G, ceil\(N/128\), ceil\(K"),
    (GEMM, "mxfp8", "compact", "b_scale", lambda t: t.to("meta"), ValueError, "must be on cpu like `a`, but got meta"),
    (GEMM, "mxfp8", "blocked", "a_scale", cut(0), ValueError, r"\[bytes of blocked scales, .*\] = \(1536,\), but got"),
    (GEMM, "mxfp8", "blocked", "b_scale", cut(1), ValueError, r"\[bytes of blocked scales, .*\] = \(3, 512\), but got"),
    (GEMM, "nvfp4", "compact", "a_amax", lambda t: None, ValueError, "must be given for nvfp4, but got None"),
    (GEMM, "nvfp4", "compact", "b_amax", cut(0), ValueError, r"must be of shape \[G\] = \(3,\), but got"),
    (GEMM, "nvfp4", "compact", "b_amax", lambda t: t.half(), TypeError, "must be torch.float32, but got"),
    (GEMM, "mxfp8", "compact", "a_amax", lambda t: torch.ones(3), ValueError, "must be None for mxfp8, but"),
    (GEMM, "mxfp8", "compact", "offs", lambda t: t[1:], ValueError, r"must be of length 3 \(one end per"),
    (GEMM, "mxfp8", "compact", "bias", lambda t: t[:, 1:], ValueError, r"must be of shape \[G, N\] = \(3, 24\)"),
    (GEMM, "mxfp8", "compact", "bias", lambda t: t.double(), TypeError, "must be torch.float32 or torch.bfloat16 or"),
    (GEMM, "mxfp8", "compact", "bias_scale", lambda t: t[1:], ValueError, r"must be of shape \[T\] = \(6,\), but got"),
    (WGRAD, "mxfp8", "compact", "b", cut(0), ValueError, r"`b_scale` .*|must be of T = 6 like `a`"),
    (WGRAD, "mxfp8", "compact", "a_scale", cut(0), ValueError, r"\[Tp/32, M\] \(compact\) = \(12, 40\)"),
    (WGRAD, "mxfp8", "blocked", "b_scale", cut(0), ValueError, r"\[bytes of blocked scales, N rows\]"),
    (WGRAD, "nvfp4", "compact", "a", cut(1), ValueError, r"must be \[M, Tp/2\], Tp a multiple of 64, but got shape"),
    (WGRAD, "nvfp4", "compact", "a", lambda t: t[:, :32].contiguous(), ValueError, r"Tp at least 64 \(G - 1\)"),
    (WGRAD, "nvfp4", "compact", "b_scale", cut(1), ValueError, r"\[N, Tp/16\] \(compact\) = \(24, 12\)"),
    (WGRAD, "fp8_tensor", "compact", "b", cut(1), ValueError, r"must be \[N, Tp\], Tp a multiple of 32, but got"),
    (WGRAD, "fp8_tensor", "compact", "b", lambda t: t.repeat(1, 2), ValueError, "must be of Tp = 96 like `a`, but got"),
    (WGRAD, "fp8_block", "compact", "a_scale", cut(0), ValueError, r"\[Tp/128, M\] \(compact\) = \(3, 40\)"),
    (WGRAD, "fp8_block", "compact", "offs", lambda t: t.long(), TypeError, "must be int32"),
    (ACCUMULATE, "mxfp8", "compact", "main_grad", cut(1), ValueError, r"must be of shape \[G, M, N\] = \(3, 40, 24\)"),
    (ACCUMULATE, "mxfp8", "compact", "main_grad", lambda t: t.double(), TypeError, "must be torch.float32 or"),
]


@pytest.mark.parametrize("name, form, layout, argument, change, error, message", CASES)
def test_one_error_that_names_the_argument(name, form, layout, argument, change, error, message):
    tensors, options = arguments(name, form, layout)
    tensors[argument] = change(tensors[argument])
    with pytest.raises(error) as real:
        call(name, tensors, options)
    real.match(message)
    text = str(real.value).splitlines()[0]
    assert text.startswith(f"tgl::{name}: `")
    if argument != "b" or name == GEMM:
        assert f"`{argument}`" in text
    if "main_grad" in tensors and argument == "main_grad":
        assert torch.equal(tensors["main_grad"], change(arguments(name, form, layout)[0]["main_grad"]))
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) if t is not None else None for n, t in tensors.items()}
        with pytest.raises(error) as fake:
            call(name, fakes, options)
    assert str(fake.value).splitlines()[0] == text


def test_options_that_do_not_exist():
    tensors, options = arguments(GEMM, "mxfp8")
    for change, message in (
        ({"format": "int8"}, "`format` must be one of mxfp8, nvfp4, mxfp4, fp8_tensor, fp8_block, but got 'int8'"),
        ({"b_direction": "up"}, "`b_direction` must be one of rowwise, columnwise, but got 'up'"),
        ({"scale_layout": "tiled"}, "`scale_layout` must be 'compact' or 'blocked' for mxfp8, but got 'tiled'"),
        ({"format": "fp8_block", "scale_layout": "blocked"}, "`scale_layout` must be 'compact' for fp8_block, but got"),
    ):
        with pytest.raises(ValueError, match=message):
            call(GEMM, tensors, {**options, **change})
    with pytest.raises(TypeError, match="`out_dtype` must be float32, bfloat16 or float16, but got"):
        call(GEMM, tensors, {**options, "out_dtype": torch.float64})


def test_layouts_that_are_confused():
    """Compact scales where blocked ones are declared, and the other way round."""
    for name in (GEMM, WGRAD):
        tensors, options = arguments(name, "mxfp8")
        with pytest.raises(ValueError, match=r"`a_scale` must be of shape \[bytes of blocked scales, .* but got shape"):
            call(name, tensors, {**options, "scale_layout": "blocked"})
        tensors, options = arguments(name, "mxfp8", "blocked")
        with pytest.raises(ValueError, match=r"`a_scale` must be of shape \[.*\] \(compact\) = \(.*\), but got shape"):
            call(name, tensors, {**options, "scale_layout": "compact"})


def test_a_direction_that_is_confused():
    """The two components of a weight are distinguished by their shapes wherever these differ."""
    for form in ("mxfp8", "nvfp4", "fp8_block"):
        tensors, options = arguments(GEMM, form)
        with pytest.raises(ValueError, match=r"`b(_scale)?` must be"):
            call(GEMM, {**tensors, "b": tensors["b"].transpose(1, 2).contiguous()}, options)


def test_buffers():
    tensors, options = arguments(GEMM, "mxfp8")
    del options["out_dtype"]
    for out, error, message in (
        (torch.zeros(5, 24), ValueError, r"`out` must be of shape \[T, N\] = \(6, 24\)"),
        (torch.zeros(24, 6).t(), ValueError, "`out` must be row-major"),
        (torch.zeros(6, 24, dtype=torch.float64), TypeError, "`out` must be float32, bfloat16 or float16"),
        (torch.zeros(145)[1:].view(6, 24), ValueError, "`out` must be aligned to 16 bytes"),
        (tensors["bias"].view(torch.uint8).view(torch.float32)[:1].expand(6, 24), ValueError, "`out` must be free of"),
    ):
        with pytest.raises(error, match=message):
            tgl.grouped_gemm_scaled(**tensors, **options, out=out)
    shared = torch.zeros(6 * 24)
    tensors["bias"] = shared[:72].view(3, 24)
    with pytest.raises(ValueError, match="`out` must be disjoint from `bias`, but got overlapping memory"):
        tgl.grouped_gemm_scaled(**tensors, **options, out=shared.view(6, 24))
    assert not shared.any()


@pytest.mark.parametrize("name", [GEMM, WGRAD])
def test_no_derivative(name):
    tensors, options = arguments(name, "fp8_tensor")
    tensors["a_scale"].requires_grad_()
    message = r"has no derivative, so no argument may require grad, but `a_scale` does; GroupedLinear\(recipe=...\) is"
    with pytest.raises(RuntimeError, match=message):
        call(name, tensors, options)
    with torch.no_grad():
        call(name, tensors, options)


def test_compiled_carries_the_message():
    tensors, options = arguments(GEMM, "mxfp8")
    tensors["a_scale"] = tensors["a_scale"][:, 1:].contiguous()
    compiled = torch.compile(lambda **t: tgl.grouped_gemm_scaled(**t, **options), backend="aot_eager", fullgraph=True)
    with pytest.raises((TorchRuntimeError, ValueError), match=r"`a_scale` must be of shape \[T, ceil\(K/32\)\]"):
        compiled(**tensors)


def test_explain():
    for name in (GEMM, WGRAD):
        tensors, options = arguments(name, "nvfp4", "blocked")
        found = tgl.explain(name, **tensors, **options)
        assert found.chosen.name == "decode and mm"
    tensors, options = arguments(GEMM, "mxfp8")
    on_meta = {n: t.to("meta") if t is not None else None for n, t in tensors.items()}
    assert tgl.explain(GEMM, **on_meta, **options).chosen is None
