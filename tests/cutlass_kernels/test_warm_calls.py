"""What is remembered of calls changes nothing but their price: not which kernel runs, on what, nor what is refused."""

import importlib

import pytest
import torch

import tgl
from tgl import backends
from tgl.cutlass_kernels.runtime import device, launcher
from tgl.meta.components import sized_components
from tgl.meta.placement import ROW_UNIT, blocked_size, padded_rows
from tgl.meta.quantized import OUT_NAMES, Options

BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
T, G, K, N = 6, 2, 64, 128  # half as many columns get other tiles

OPS = [
    importlib.import_module(f"tgl.ops.{name}")
    for name in (
        "batched_syrk",
        "group_dequantize",
        "group_quantize",
        "group_requantize",
        "grouped_activation",
        "grouped_activation_quantize",
        "grouped_dbias",
        "grouped_gemm",
        "grouped_gemm_activation",
        "grouped_gemm_dactivation",
        "grouped_gemm_low_rank",
        "grouped_gemm_low_rank_activation",
        "grouped_gemm_packed",
        "grouped_gemm_row_scaled",
        "grouped_gemm_scaled",
        "grouped_gemm_scaled_activation_quantize",
        "grouped_gemm_scaled_wgrad",
        "grouped_gemm_wgrad",
    )
]
CHECKS = [
    (op, name)
    for op in OPS
    for name, check in vars(op).items()
    if name.startswith(("_checked", "_spec")) and hasattr(check, "__wrapped__")
]
SM100_ONLY = "grouped_gemm_scaled_activation_quantize"
OF_ONE = (SM100_ONLY, "batched_syrk")  # architecture


def rows(*shape, dtype=BF16):
    return torch.randint(-1, 2, shape).to(dtype)


def _scaled_rows(groups, *operands):
    return [t for rows in operands for t in (rows, torch.ones(groups, rows.shape[0]))]


def bases(groups=G, depth=K, columns=N, dtype=BF16):
    """Calls that a kernel serves: operands and options."""
    offs = torch.arange(1, groups + 1, dtype=torch.int32) * 2
    ones, probs, bias = torch.ones(groups), torch.ones(T), rows(groups, columns, dtype=dtype)
    a, dy, w = rows(T, depth, dtype=dtype), rows(T, columns, dtype=dtype), rows(groups, depth, columns, dtype=dtype)
    wide, wide_bias = rows(T, 2 * columns, dtype=dtype), rows(groups, 2 * columns, dtype=dtype)
    fp8, fp8_w = rows(T, depth, dtype=F8), rows(groups, columns, depth, dtype=F8)
    turned = [rows(n, 32 * (groups + 1), dtype=F8) for n in (depth, columns)]
    swiglu, tensor, mxfp8 = {"kind": "swiglu"}, {"format": "fp8_tensor"}, {"format": "mxfp8", "scale_layout": "blocked"}
    across = -(-depth // 32)
    scales = torch.zeros(blocked_size(padded_rows(T, groups, ROW_UNIT), across), dtype=torch.uint8)
    w_scales = torch.zeros(groups, blocked_size(2 * columns, across), dtype=torch.uint8)
    quantized = Options("mxfp8", scale_layout="blocked").resolved("group_quantize")
    quantized = sized_components(quantized, (T, depth), groups, a.device, grouped=True).empty()
    codes, exponents = (torch.full((groups, columns, depth // n), 127, dtype=torch.uint8) for n in (2, 32))
    y, dw = dy.clone(), torch.zeros(groups, depth, columns)
    low, up = rows(T, 16, dtype=dtype), rows(groups, 16, columns, dtype=dtype)
    return {
        "batched_syrk": ((w, rows(groups, depth, depth, dtype=dtype)), {}),
        "grouped_gemm": ((a, w, offs, bias, probs), {}),
        "grouped_gemm.out": ((a, w, offs, bias, probs), {"out": y}),
        "grouped_gemm_wgrad": ((a, dy, offs), {}),
        "grouped_gemm_wgrad.out": ((a, dy, offs), {"out": dw}),
        "grouped_gemm_wgrad_accumulate_": ((a, dy, offs, dw), {}),
        "grouped_dbias": ((dy.repeat(1, 24), offs), {}),
        "grouped_dbias_dscales": ((dy.repeat(1, 24), bias.repeat(1, 24), probs, offs), {}),
        "grouped_activation": ((wide, offs, probs), swiglu),
        "grouped_activation_backward": ((dy, wide, offs, probs), swiglu),
        "grouped_gemm_activation": ((a, w.repeat(1, 1, 2), offs, wide_bias, probs), swiglu),
        "grouped_gemm_dactivation": ((a, w, wide, offs, probs), swiglu),
        "grouped_gemm_low_rank": ((a, w, low, up, offs, bias, probs), {}),
        "grouped_gemm_low_rank.out": ((a, w, low, up, offs, bias, probs), {"out": y}),
        "grouped_gemm_low_rank_activation": (
            (a, w.repeat(1, 1, 2), low, up.repeat(1, 1, 2), offs, wide_bias, probs),
            swiglu,
        ),
        "grouped_gemm_packed": ((a, codes, exponents, offs, None, bias, probs), {"format": "mxfp4"}),
        "grouped_gemm_row_scaled": ((fp8, probs, fp8_w, bias.float(), offs), {}),
        "grouped_gemm_row_scaled_wgrad": ((*_scaled_rows(groups, *turned), offs), {}),
        "grouped_gemm_scaled": ((fp8, ones, fp8_w, ones.clone(), offs), tensor),
        "grouped_gemm_scaled.out": ((fp8, ones, fp8_w, ones.clone(), offs), {**tensor, "out": y}),
        "grouped_gemm_scaled_wgrad": ((turned[0], ones, turned[1], ones.clone(), offs), tensor),
        "grouped_gemm_scaled_wgrad.out": ((turned[0], ones, turned[1], ones.clone(), offs), {**tensor, "out": dw}),
        "grouped_gemm_scaled_wgrad_accumulate_": ((turned[0], ones, turned[1], ones.clone(), offs, dw), tensor),
        SM100_ONLY: (
            (fp8, scales, fp8_w.repeat(1, 2, 1), w_scales, offs, None, None, wide_bias, probs),
            {**mxfp8, "interleaved": True},
        ),
        "grouped_activation_quantize": ((wide, offs, probs), {**mxfp8, **swiglu}),
        "group_quantize": ((a, offs), mxfp8),
        "group_quantize.out": ((a, offs), {**mxfp8, **dict(zip(OUT_NAMES, quantized))}),
        "group_dequantize": ((fp8, scales, offs), mxfp8),
        "group_requantize": ((fp8, scales, offs), mxfp8),
    }


def overload(name):
    packet, _, kind = name.partition(".")
    return getattr(getattr(torch.ops.tgl, packet), kind or "default")


OPTIONS = {
    "out_dtype": F32,
    "kind": "srelu",
    "interleaved": True,
    "b_direction": "columnwise",
    "scaling": "even",
    "dtype": torch.float8_e5m2,
    "format": "fp8_block",
    "scale_layout": "compact",
    "columnwise": False,
}


def strided_like(t, *strides):
    """``t`` with other strides."""
    size = 1 + sum((n - 1) * s for n, s in zip(t.shape, strides))
    return torch.zeros(size, dtype=t.dtype).as_strided(t.shape, strides).copy_(t)


def variants(t):
    """The same tensor told apart by everything that decides what may run."""
    shifted = torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    yield "misaligned", shifted.copy_(t)
    if t.dim() > 1:
        inner = t.shape[-1]
        for name, pitch in (("padded", inner + 16), ("odd pitch", inner + 1)):
            yield name, strided_like(t, *([t.shape[1] * pitch] if t.dim() == 3 else []), pitch, 1)
        yield "other major", t.mT.contiguous().mT
        yield "expanded rows", t[:1].expand(t.shape)
        yield "narrower", t[..., : inner // 2].contiguous()
        yield "one column less", t[..., :-1].contiguous()
    else:
        yield "strided", strided_like(t, 2)
    yield "one less", t[:-1].clone()
    yield "nothing", t[:0].clone()
    yield "many", torch.cat([t] * 40)
    yield "another dimension", t[None].clone()
    for dtype in (F16, F32, torch.float64, torch.int64, torch.float8_e5m2):
        if dtype is not t.dtype:
            yield str(dtype), t.float().to(dtype)
    if t.dtype in (BF16, F32):
        yield "requires grad", t.clone().requires_grad_()
    yield "on meta", t.to("meta")


def halved(t):
    """The left half of the columns, where their number follows from N."""
    if t is None:
        return None
    return t[..., : t.shape[-1] // 2] if t.dim() > 1 and t.shape[-1] % N == 0 and t.dtype != F8 else t


def changes(name):
    """Calls like the base but for one argument, or for what all arguments have in common."""
    args, options = bases()[name]
    schema = overload(name)._schema.arguments
    for i, t in enumerate(args):
        for what, variant in variants(t) if t is not None else ():
            yield f"argument {i}: {what}", name, (*args[:i], variant, *args[i + 1 :]), options
        if schema[i].type.kind() == "OptionalType":
            yield f"argument {i}: None", name, (*args[:i], None, *args[i + 1 :]), options
    if "out" in options:
        for what, variant in variants(options["out"]):
            yield f"out: {what}", name, args, {**options, "out": variant}
    for count in (0, 1, 5, 300):
        sized = [torch.cat([t] * 50)[:count] if t is not None and t.shape[0] == T else t for t in args]
        out = {"out": options["out"][:1].repeat(count, 1)} if "out" in options and len(options["out"]) == T else {}
        yield f"{count} rows", name, tuple(sized), {**options, **out}
    for option, value in OPTIONS.items():
        if option in {a.name for a in schema}:
            yield f"{option}={value}", name, args, {**options, option: value}
    for sizes in ({"groups": 3}, {"depth": 128}, {"columns": 64}, {"depth": N, "columns": K}, {"dtype": F16}):
        yield str(sizes), name, *bases(**sizes)[name]
    left = {k: halved(t) if isinstance(t, torch.Tensor) else t for k, t in options.items()}
    yield "half of the columns", name, tuple(map(halved, args)), left
    block_scales = (torch.ones(T, 1), torch.ones(G, 1, 1))
    if name.startswith("grouped_gemm_scaled"):
        a, _, b, *rest = args
        block_scales = (torch.ones(1, K), torch.ones(1, N)) if "wgrad" in name else block_scales
        yield "blocks", name, (a, block_scales[0], b, block_scales[1], *rest[1:]), {**options, "format": "fp8_block"}
    for other in bases():
        if other.startswith(name.partition(".")[0]) and other != name:
            yield other, other, *bases()[other]


@pytest.fixture
def launched(monkeypatch):
    """Every launch, by op, kernel and what the tensors look like; nothing is compiled."""
    seen = []

    def describe(t):
        return (t.shape, t.stride(), t.dtype, t.data_ptr() % 16) if isinstance(t, torch.Tensor) else t

    def compiled(op, key, where, build):
        return lambda *args: seen.append((op, key, *map(describe, args)))

    monkeypatch.setattr(device, "packages_reason", lambda: None)
    monkeypatch.setattr(launcher, "compiled", compiled)
    monkeypatch.setattr(launcher, "plans", {})
    monkeypatch.setattr(launcher, "known", {})
    with backends.emulated_device("sm_90"):
        yield seen


def outcome(launched, name, args, options):
    """What is launched and made, or what is raised."""
    launched.clear()
    arch = "sm_100" if name == SM100_ONLY else backends.emulated_arch
    try:
        with backends.emulated_device(arch):
            made = overload(name)(*args, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)
    made = made if isinstance(made, (tuple, list)) else [made]
    return list(launched), [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in made if t is not None]


class Forgetful(dict):
    def __setitem__(self, key, value):
        pass


@pytest.fixture
def cold(launched, monkeypatch):
    """``outcome`` when nothing is remembered."""

    def run(*call):
        with monkeypatch.context() as patch:
            patch.setattr(launcher, "known", Forgetful())
            for op, check in CHECKS:
                patch.setattr(op, check, getattr(op, check).__wrapped__)
            return outcome(launched, *call)

    return run


@pytest.mark.parametrize("name", list(bases()))
def test_a_call_like_one_before_is_served_like_one_that_is_not(launched, cold, name):
    base = (name, *bases()[name])
    refused = served = 0
    for what, *change in changes(name):
        expected = {"base": cold(*base), "change": cold(*change)}
        for first, second in (("base", "change"), ("change", "base")):
            launcher.forget()
            for turn in (first, second, first, second):
                got = outcome(launched, *(base if turn == "base" else change))
                assert got == expected[turn], f"{what}: {turn} after {first}"
        refused += isinstance(expected["change"][0], type)
        served += bool(expected["change"][0]) and not isinstance(expected["change"][0], type)
    assert refused > 10
    assert served > 5


def test_one_group_of_rows_is_not_one_matrix(launched):
    data, offs = rows(128, K, dtype=F8), torch.tensor([128], dtype=torch.int32)
    scale = torch.zeros(blocked_size(128, K // 32), dtype=torch.uint8)
    keys = []
    for _ in range(2):
        for args in ((data, scale, offs), (data[None], scale[None], None)):
            [(_, key, *_)], _ = outcome(
                launched, "group_dequantize", args, {"format": "mxfp8", "scale_layout": "blocked"}
            )
            keys.append(key)
    assert keys[0] == keys[2] != keys[1] == keys[3]


@pytest.mark.parametrize("name", list(bases()))
def test_a_warm_call_is_one_look_up(launched, monkeypatch, name):
    """No kernel is looked for again, nor are operands looked at one by one."""
    args, options = bases()[name]
    expected = outcome(launched, name, args, options)
    assert len(expected[0]) == 1
    for method in ("reason", "plan"):
        monkeypatch.setattr(launcher.Launcher, method, None)
    for module, function in ((tgl.meta.scaled, "_data"), (tgl.meta.checks, "floating")):
        monkeypatch.setattr(module, function, None)
    assert outcome(launched, name, args, options) == expected


def test_buffers_of_components_are_checked_once(launched, monkeypatch):
    args, options = bases()["group_quantize.out"]
    expected = outcome(launched, "group_quantize.out", args, options)
    assert len(expected[0]) == 1
    monkeypatch.setattr(tgl.meta.quantized, "sized_components", None)
    assert outcome(launched, "group_quantize.out", args, options) == expected


@pytest.mark.parametrize("name", [n for n in bases() if n not in OF_ONE])
def test_every_architecture_has_its_own(launched, name):
    for arch in ("sm_90", "sm_100", "sm_90"):
        with backends.emulated_device(arch):
            (op, key, *_), *_ = outcome(launched, name, *bases()[name])[0]
        assert arch in map(str, key), op
