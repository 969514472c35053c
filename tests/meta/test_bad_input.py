"""Bad arguments get one error that names the argument, eager, faked and compiled, and nothing is written."""

import re

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tgl.testing import SIGNATURES, GroupSizes
from tgl.testing.samples import SampleInput
from tgl.testing.signatures import overload

ROUTING = GroupSizes("small", (2, 0, 3), 6)


def arguments(name):
    """Good arguments of the op by name, every optional one present."""
    signature = SIGNATURES[name][0]
    return SampleInput(signature, ROUTING, given=max(signature.presence(), key=len)).tensors(tail=0.0)


def column_major(t):
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def misaligned(t):
    return torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)


def overlapping_rows(t):
    return torch.zeros(t.numel(), dtype=t.dtype).as_strided(t.shape, (*t.stride()[:-2], t.shape[-1] - 1, 1))


RANK = "must be [123]-D"
CASES = [
    # op, argument, change, exception, message
    ("splits_to_offsets", "m_splits", lambda t: t[None], ValueError, RANK),
    ("splits_to_offsets", "m_splits", torch.Tensor.float, TypeError, "must be an integer tensor, but got"),
    ("splits_to_offsets", "m_splits", torch.Tensor.bool, TypeError, "must be an integer tensor, but got torch.bool"),
    ("grouped_gemm", "a", lambda t: t[0], ValueError, r"must be 2-D \[T, K\], but got"),
    ("grouped_gemm", "a", torch.Tensor.int, TypeError, "must be float64, float32, bfloat16 or float16, but"),
    ("grouped_gemm", "a", lambda t: t.to(torch.complex64), TypeError, "must be float64, float32, bfloat16 or float16"),
    ("grouped_gemm", "b", lambda t: t[0], ValueError, r"must be 3-D \[G, K, N\]"),
    ("grouped_gemm", "b", torch.Tensor.double, TypeError, "must be torch.float32 like `a`, but got torch.float64"),
    ("grouped_gemm", "b", lambda t: t[:, 1:], ValueError, r"must be \[G, K, N\] with K = 8 like `a`"),
    ("grouped_gemm", "b", lambda t: t.to("meta"), ValueError, "must be on cpu like `a`, but got"),
    ("grouped_gemm", "offs", lambda t: t.to("meta"), ValueError, "must be on cpu like `a`, but got"),
    ("grouped_gemm", "offs", torch.Tensor.long, TypeError, r"must be int32 \(cumulative group ends\), but got"),
    ("grouped_gemm", "offs", lambda t: t[1:], ValueError, r"must be of length 3 \(one end per group\), but got"),
    ("grouped_gemm", "offs", lambda t: t[None], ValueError, RANK),
    ("grouped_gemm", "offs", lambda t: torch.stack([t, t], 1)[:, 0], ValueError, "must be contiguous, but got"),
    ("grouped_gemm", "bias", lambda t: t[0], ValueError, r"must be of shape \[G, N\] = \(3, 16\), but got"),
    ("grouped_gemm", "bias", lambda t: t[:, 1:], ValueError, r"must be of shape \[G, N\] = \(3, 16\)"),
    ("grouped_gemm", "bias", torch.Tensor.half, TypeError, "must be torch.float32, but got torch.float16"),
    ("grouped_gemm", "bias", lambda t: t.to("meta"), ValueError, "must be on cpu"),
    ("grouped_gemm", "bias_scale", lambda t: t[1:], ValueError, r"must be of shape \[T\] = \(6,\), but got"),
    ("grouped_gemm", "bias_scale", torch.Tensor.double, TypeError, "must be torch.float32, but got torch.float64"),
    ("grouped_gemm", "bias_scale", lambda t: t.to("meta"), ValueError, "must be on cpu"),
    ("grouped_gemm_low_rank", "a", torch.Tensor.long, TypeError, "must be float64, float32, bfloat16 or float16"),
    ("grouped_gemm_low_rank", "b", lambda t: t[:, 1:], ValueError, r"must be \[G, K, N\] with K = 8 like `a`"),
    ("grouped_gemm_low_rank", "low", lambda t: t[0], ValueError, r"must be 2-D \[T, R\], but got"),
    ("grouped_gemm_low_rank", "low", lambda t: t[1:], ValueError, r"must be \[T, R\] with T = 6 like `a`, but got"),
    ("grouped_gemm_low_rank", "low", torch.Tensor.half, TypeError, "must be torch.float32 like `a`"),
    ("grouped_gemm_low_rank", "low", lambda t: t.to("meta"), ValueError, "must be on cpu like `a`"),
    ("grouped_gemm_low_rank", "up", lambda t: t[:, 1:], ValueError, r"must be of shape \[G, R, N\] = \(3, 4, 16\)"),
    ("grouped_gemm_low_rank", "up", lambda t: t[1:], ValueError, r"must be of shape \[G, R, N\] = \(3, 4, 16\)"),
    ("grouped_gemm_low_rank", "up", torch.Tensor.half, TypeError, "must be torch.float32 like `a`"),
    ("grouped_gemm_low_rank", "up", lambda t: t.to("meta"), ValueError, "must be on cpu like `a`"),
    ("grouped_gemm_low_rank", "bias", lambda t: t[0], ValueError, r"must be of shape \[G, N\] = \(3, 16\), but got"),
    ("grouped_gemm_low_rank", "offs", torch.Tensor.long, TypeError, "must be int32"),
    ("grouped_gemm_wgrad", "a", lambda t: t[0], ValueError, RANK),
    ("grouped_gemm_wgrad", "b", lambda t: t[1:], ValueError, r"must be \[T, N\] with T = 6 like `a`"),
    ("grouped_gemm_wgrad", "b", torch.Tensor.half, TypeError, "must be torch.float32 like `a`"),
    ("grouped_gemm_wgrad", "offs", torch.Tensor.short, TypeError, "must be int32"),
    ("grouped_gemm_wgrad", "offs", lambda t: t.to("meta"), ValueError, "must be on cpu"),
    ("grouped_gemm_wgrad", "offs", lambda t: t[None], ValueError, RANK),
    ("grouped_dbias", "dy", torch.Tensor.long, TypeError, "must be float64, float32, bfloat16 or float16"),
    ("grouped_dbias", "dy", lambda t: t[0], ValueError, RANK),
    ("grouped_dbias", "offs", torch.Tensor.long, TypeError, "must be int32"),
    ("grouped_dbias_dscales", "bias", lambda t: t[1:], ValueError, r"must be of shape \[G, N\]"),
    ("grouped_dbias_dscales", "bias", torch.Tensor.double, TypeError, "must be torch.float32"),
    ("grouped_dbias_dscales", "bias_scale", lambda t: t[1:], ValueError, r"must be of shape \[T\]"),
    ("grouped_activation", "x", lambda t: t[:, 1:], ValueError, r"must be \[T, 2 I\] with an even number"),
    ("grouped_activation", "probs", torch.Tensor.half, TypeError, "must be torch.float32, but got torch.float16"),
    ("grouped_activation", "probs", lambda t: t[:, None], ValueError, r"must be of shape \[T\] = \(6,\), but got"),
    ("grouped_activation", "offs", lambda t: t.to("meta"), ValueError, "must be on cpu like `x`"),
    ("grouped_activation_backward", "dy", lambda t: t[:, 1:], ValueError, r"must be of shape \[T, I\] = \(6, 8\)"),
    ("grouped_activation_backward", "dy", torch.Tensor.half, TypeError, "must be torch.float32 like `x`"),
    ("grouped_gemm_activation", "a", torch.Tensor.long, TypeError, "must be float64, float32, bfloat16 or float16"),
    ("grouped_gemm_activation", "b", lambda t: t[:, 1:], ValueError, r"must be \[G, K, N\] with K = 8 like `a`"),
    ("grouped_gemm_activation", "bias", lambda t: t[0], ValueError, r"must be of shape \[G, N\] = \(3, 16\), but got"),
    ("grouped_gemm_activation", "probs", torch.Tensor.half, TypeError, "must be torch.float32, but got torch.float16"),
    ("grouped_gemm_activation", "probs", lambda t: t[1:], ValueError, r"must be of shape \[T\] = \(6,\), but got"),
    ("grouped_gemm_activation", "probs", lambda t: t.to("meta"), ValueError, "must be on cpu like `a`"),
    ("grouped_gemm_activation", "offs", torch.Tensor.long, TypeError, "must be int32"),
    (
        "grouped_gemm_low_rank_activation",
        "low",
        lambda t: t[1:],
        ValueError,
        r"must be \[T, R\] with T = 6 like `a`, but got",
    ),
    (
        "grouped_gemm_low_rank_activation",
        "up",
        lambda t: t[:, 1:],
        ValueError,
        r"must be of shape \[G, R, N\] = \(3, 4, 16\)",
    ),
    ("grouped_gemm_low_rank_activation", "up", torch.Tensor.half, TypeError, "must be torch.float32 like `a`"),
    ("grouped_gemm_low_rank_activation", "probs", lambda t: t[1:], ValueError, r"must be of shape \[T\] = \(6,\)"),
    ("grouped_gemm_low_rank_activation", "offs", torch.Tensor.long, TypeError, "must be int32"),
    ("grouped_gemm_dactivation", "dy", lambda t: t[0], ValueError, r"must be 2-D \[T, K\], but got"),
    ("grouped_gemm_dactivation", "dy", torch.Tensor.int, TypeError, "must be float64, float32, bfloat16 or float16"),
    ("grouped_gemm_dactivation", "b", lambda t: t[:, 1:], ValueError, r"must be \[G, K, I\] with K = 8 like `dy`"),
    ("grouped_gemm_dactivation", "b", torch.Tensor.half, TypeError, "must be torch.float32 like `dy`"),
    (
        "grouped_gemm_dactivation",
        "h",
        lambda t: t[:, 1:],
        ValueError,
        r"must be of shape \[T, 2 I\] = \(6, 16\), but got",
    ),
    ("grouped_gemm_dactivation", "h", lambda t: t[1:], ValueError, r"must be of shape \[T, 2 I\] = \(6, 16\)"),
    ("grouped_gemm_dactivation", "h", torch.Tensor.half, TypeError, "must be torch.float32 like `dy`"),
    ("grouped_gemm_dactivation", "h", lambda t: t.to("meta"), ValueError, "must be on cpu like `dy`"),
    ("grouped_gemm_dactivation", "offs", lambda t: t[1:], ValueError, r"must be of length 3 \(one end per group\)"),
    ("grouped_gemm_dactivation", "probs", torch.Tensor.half, TypeError, "must be torch.float32, but got torch.float16"),
    ("grouped_gemm_dactivation", "probs", lambda t: t[1:], ValueError, r"must be of shape \[T\] = \(6,\), but got"),
]
BUFFERS = [
    ("grouped_gemm.out", "out", lambda t: t[1:], ValueError, r"must be of shape \[T, N\] = \(6, 16\), but got"),
    ("grouped_gemm.out", "out", column_major, ValueError, r"must be row-major \(last stride 1\)"),
    ("grouped_gemm.out", "out", overlapping_rows, ValueError, "must be free of overlapping rows, but got"),
    ("grouped_gemm.out", "out", lambda t: t[:1].expand(t.shape), ValueError, "must be free of overlapping rows"),
    ("grouped_gemm.out", "out", torch.Tensor.double, TypeError, "must be float32, bfloat16 or float16, but got"),
    ("grouped_gemm.out", "out", torch.Tensor.int, TypeError, "must be float32, bfloat16 or float16, but got"),
    ("grouped_gemm.out", "out", lambda t: t.to("meta"), ValueError, "must be on cpu like `a`, but got"),
    (
        "grouped_gemm_low_rank.out",
        "out",
        lambda t: t[1:],
        ValueError,
        r"must be of shape \[T, N\] = \(6, 16\), but got",
    ),
    ("grouped_gemm_low_rank.out", "out", torch.Tensor.int, TypeError, "must be float32, bfloat16 or float16, but got"),
    ("grouped_gemm_wgrad.out", "out", lambda t: t[1:], ValueError, r"must be of shape \[G, M, N\] = \(3, 8, 16\)"),
    ("grouped_gemm_wgrad.out", "out", column_major, ValueError, "row-major"),
    ("grouped_gemm_wgrad.out", "out", lambda t: t[:1].expand(t.shape), ValueError, "must be free of overlapping rows"),
    ("grouped_gemm_wgrad_accumulate_", "main_grad", lambda t: t[1:], ValueError, r"must be of shape \[G, M, N\]"),
    ("grouped_gemm_wgrad_accumulate_", "main_grad", torch.Tensor.half, TypeError, "must be torch.float32, but got"),
    ("grouped_gemm_wgrad_accumulate_", "main_grad", overlapping_rows, ValueError, "must be free of overlapping rows"),
]
POINTERS = [
    ("grouped_gemm.out", "out", misaligned, ValueError, "must be aligned to 16 bytes, but got an address 4 bytes"),
    ("grouped_gemm_wgrad.out", "out", misaligned, ValueError, "must be aligned to 16 bytes"),
    ("grouped_gemm_wgrad_accumulate_", "main_grad", misaligned, ValueError, "must be aligned to 16 bytes"),
]
OUT = {
    "grouped_gemm.out": "out",
    "grouped_gemm_low_rank.out": "out",
    "grouped_gemm_wgrad.out": "out",
    "grouped_gemm_wgrad_accumulate_": "main_grad",
}


def with_writers(cases):
    """Bad operands reach the variants that write as well."""
    for name, *case in cases:
        yield name, *case
        for writer in OUT:
            if writer.removesuffix(".out").removesuffix("_accumulate_") == name:
                yield writer, *case


def ids(cases):
    return [f"{i}-{name}-{argument}" for i, (name, argument, *_) in enumerate(cases)]


def call(name, tensors, run=lambda op, *args, **kwargs: op(*args, **kwargs)):
    op = overload(name)
    args, kwargs = SampleInput(SIGNATURES[name][0], ROUTING).call(op, tensors)
    return run(op, *args, **kwargs)


def compiled(backend):
    return torch.compile(lambda op, *args, **kwargs: op(*args, **kwargs), backend=backend, fullgraph=True)


def expected(name, argument, message):
    op = name.removesuffix(".out")
    return rf"tgl::{op}: `{argument}` {message if message.startswith('must') else '.*' + message}"


EAGER = [*with_writers(CASES), *BUFFERS, *POINTERS]


@pytest.mark.parametrize("name, argument, change, error, message", EAGER, ids=ids(EAGER))
def test_eager(name, argument, change, error, message):
    tensors = arguments(name)
    tensors[argument] = change(tensors[argument])
    written = tensors.get(OUT.get(name))
    before = written.clone() if written is not None and written.device.type == "cpu" else None
    with pytest.raises(error, match=expected(name, argument, message)):
        call(name, tensors)
    if before is not None:
        assert torch.equal(written, before)


FAKE = [*with_writers(CASES), *BUFFERS]


@pytest.mark.parametrize("name, argument, change, error, message", FAKE, ids=ids(FAKE))
def test_fake_raises_the_same(name, argument, change, error, message):
    tensors = arguments(name)
    tensors[argument] = change(tensors[argument])
    with pytest.raises(error) as real:
        call(name, tensors)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) if t is not None else None for n, t in tensors.items()}
        with pytest.raises(error) as fake:
            call(name, fakes)
    assert str(fake.value).splitlines()[0] == str(real.value).splitlines()[0]


COMPILED = [CASES[i] for i in (0, 3, 7, 8, 11, 12, 14, 16, 26, 32, 34)] + [BUFFERS[i] for i in (0, 2, 8, 11)]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name, argument, change, error, message", COMPILED, ids=ids(COMPILED))
def test_compiled_carries_the_message(name, argument, change, error, message):
    tensors = arguments(name)
    tensors[argument] = change(tensors[argument])
    with pytest.raises((TorchRuntimeError, error), match=expected(name, argument, message)):
        call(name, tensors, compiled("aot_eager"))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_checks_pointers_when_it_runs():
    run = compiled("inductor")
    tensors = arguments("grouped_gemm.out")
    call("grouped_gemm.out", tensors, run)
    assert tensors["out"].any()
    tensors["out"] = misaligned(tensors["out"])
    with pytest.raises(ValueError, match="`out` must be aligned to 16 bytes"):
        call("grouped_gemm.out", tensors, run)
    assert not tensors["out"].any()


@pytest.mark.parametrize("name", OUT)
def test_a_buffer_that_overlaps_an_operand(name):
    operands = [o.name for o in SIGNATURES[name][0].operands if not o.written]
    buffer = OUT[name]
    for operand in operands:
        tensors = arguments(name)
        victim, out = tensors[operand], tensors[buffer]
        size = max(victim.numel() * victim.element_size(), out.numel() * out.element_size())
        shared = torch.zeros(size, dtype=torch.uint8)
        tensors[buffer] = shared[: out.numel() * out.element_size()].view(out.dtype).view(out.shape)
        tensors[operand] = shared[: victim.numel() * victim.element_size()].view(victim.dtype).view(victim.shape)
        tensors[operand].copy_(victim)
        before = shared.clone()
        op = name.removesuffix(".out")
        message = re.escape(f"tgl::{op}: `{buffer}` must be disjoint from `{operand}`, but got overlapping memory")
        with pytest.raises(ValueError, match=message):
            call(name, tensors)
        assert torch.equal(shared, before)


def test_the_last_stride_of_a_buffer_counts_unless_it_has_one_column():
    a, offs = torch.randn(5, 1), torch.tensor([2, 5], dtype=torch.int32)
    b = torch.randn(5, 4)
    column = torch.zeros(2, 4, 1).as_strided((2, 4, 1), (4, 1, 3))
    torch.ops.tgl.grouped_gemm_wgrad.out(b, a, offs, out=column)
    assert torch.equal(column, tgl.grouped_gemm_wgrad(b, a, offs))
    row = torch.zeros(2, 1, 8)[..., ::2]
    with pytest.raises(ValueError, match=r"`out` must be row-major"):
        torch.ops.tgl.grouped_gemm_wgrad.out(a, b, offs, out=row)


@pytest.mark.parametrize("name", OUT)
def test_no_argument_of_a_writing_op_may_require_grad(name):
    for operand in SIGNATURES[name][0].operands:
        if operand.role == "ends":
            continue
        tensors = arguments(name)
        tensors[operand.name].requires_grad_()
        before = tensors[OUT[name]].detach().clone()
        with pytest.raises(RuntimeError, match=f"but `{operand.name}` does; detach it or use torch.no_grad"):
            call(name, tensors)
        assert torch.equal(tensors[OUT[name]], before)
        with torch.no_grad():
            call(name, tensors)


def test_a_requires_grad_buffer_is_named_when_optional_arguments_are_left_out():
    a, b, offs = torch.ones(6, 8), torch.ones(3, 8, 16), ROUTING.ends()
    with pytest.raises(RuntimeError, match="but `out` does"):
        tgl.grouped_gemm(a, b, offs, out=torch.zeros(6, 16, requires_grad=True))


def test_bias_scale_needs_a_bias():
    tensors = arguments("grouped_gemm")
    tensors["bias"] = None
    with pytest.raises(ValueError, match="`bias_scale` must be None when there is no `bias`"):
        tgl.grouped_gemm(*tensors.values())


def test_out_dtype_that_contradicts_out():
    a, b, offs = torch.ones(6, 8), torch.ones(3, 8, 16), ROUTING.ends()
    out, dw = torch.zeros(6, 16), torch.zeros(3, 8, 16)
    with pytest.raises(TypeError, match=r"`out_dtype` must be torch\.float32 like `out`, but got torch\.bfloat16"):
        tgl.grouped_gemm(a, b, offs, out=out, out_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"`out_dtype` must be torch\.float32 like `out`, but got torch\.bfloat16"):
        tgl.grouped_gemm_wgrad(a, out, offs, out=dw, out_dtype=torch.bfloat16)
    assert not out.any()
    assert not dw.any()


@pytest.mark.parametrize("out_dtype", [torch.int32, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_bad_out_dtype(out_dtype):
    a, b, offs = torch.ones(6, 8), torch.ones(3, 8, 16), ROUTING.ends()
    with pytest.raises(TypeError, match="`out_dtype` must be float32, bfloat16 or float16"):
        tgl.grouped_gemm(a, b, offs, out_dtype=out_dtype)


def test_unknown_activation():
    with pytest.raises(ValueError, match=r"`kind` must be one of .*, but got 'no_such'"):
        tgl.grouped_activation(torch.ones(6, 8), ROUTING.ends(), kind="no_such")
    with pytest.raises(ValueError, match=r"`kind` must be one of .*, but got 'no_such'"):
        tgl.grouped_gemm_activation(torch.ones(6, 8), torch.ones(3, 8, 4), ROUTING.ends(), kind="no_such")


def test_halves_need_an_even_number_of_columns():
    with pytest.raises(ValueError, match=r"`b` must be \[G, K, 2 I\] with an even number of columns, but got"):
        tgl.grouped_gemm_activation(torch.ones(6, 8), torch.ones(3, 8, 5), ROUTING.ends())
