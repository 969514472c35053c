"""Warm calls differ from cold ones in cost alone: the same kernel, the same operands, the same errors."""

import pytest
import torch

import tgl
from tgl import backends
from tgl.cutlass_kernels.runtime import device, launcher
from tgl.meta import remembered
from tgl.meta.placement import blocked_size
from tgl.testing import GroupSizes
from tgl.testing.signatures import overload, sample_call

BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
T, G, K, N = 6, 2, 64, 128  # half as many columns get other tiles

SM100_ONLY = "grouped_gemm_scaled_activation_quantize"
OF_ONE = (SM100_ONLY, "batched_syrk")  # architecture


def rows(*shape, dtype=BF16):
    return torch.randint(-1, 2, shape).to(dtype)


BIAS = {"given": ("bias", "bias_scale"), "wide": True}
PROBS = {"given": ("probs",), "wide": True, "kind": "swiglu"}
FUSED = {**PROBS, "given": ("bias", "probs")}
TENSOR, MXFP8 = {"format": "fp8_tensor"}, {"format": "mxfp8"}
AXES: dict[str, dict] = {
    "batched_syrk": {"given": ("c",)},
    "grouped_gemm": BIAS,
    "grouped_gemm.out": {**BIAS, "wide": False},
    "grouped_gemm_wgrad": {},
    "grouped_gemm_wgrad.out": {"wide": True},
    "grouped_gemm_wgrad_accumulate_": {"wide": True},
    "grouped_dbias": {},
    "grouped_dbias_dscales": {"wide": True},
    "grouped_activation": PROBS,
    "grouped_activation_backward": PROBS,
    "grouped_gemm_activation": FUSED,
    "grouped_gemm_dactivation": PROBS,
    "grouped_gemm_low_rank": BIAS,
    "grouped_gemm_low_rank.out": {**BIAS, "wide": False},
    "grouped_gemm_low_rank_activation": FUSED,
    "grouped_gemm_packed": {**BIAS, "format": "mxfp4"},
    "grouped_gemm_row_scaled": {},
    "grouped_gemm_row_scaled_wgrad": {},
    "grouped_gemm_scaled": TENSOR,
    "grouped_gemm_scaled.out": TENSOR,
    "grouped_gemm_scaled_wgrad": TENSOR,
    "grouped_gemm_scaled_wgrad.out": {**TENSOR, "dtype": F32},
    "grouped_gemm_scaled_wgrad_accumulate_": {**TENSOR, "dtype": F32},
    SM100_ONLY: {"given": ("bias", "probs"), **MXFP8, "interleaved": True},
    "grouped_activation_quantize": {**PROBS, **MXFP8},
    "group_quantize": MXFP8,
    "group_quantize.out": {**MXFP8, "dbias": False},
    "group_dequantize": MXFP8,
    "group_requantize": MXFP8,
}
"""By op, what a call has that a kernel serves, with the optional arguments that change the kernel."""


def arguments(name, groups=G, depth=K, columns=N, dtype=BF16):
    """Operands and options of a call in two rows a group."""
    sizes = {"K": depth, "M": depth, "N": columns, "I": columns, "R": 16}
    rows = T
    if name == "batched_syrk":
        sizes |= {"S": groups, "K": columns}
    elif name.startswith("grouped_dbias"):
        sizes["N"] = 24 * columns
    elif name == SM100_ONLY:
        sizes["N"] = 2 * columns
    elif name == "grouped_gemm_row_scaled_wgrad":
        rows = 32 * (groups + 1)  # side by side, from 16 bytes to 16 bytes
    axes = {"dtype": dtype, "routing": GroupSizes("twos", (2,) * groups, rows), "sizes": sizes, **AXES[name]}
    return sample_call(name, **axes)


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
    """The same tensor, distinguished by everything that decides what may run."""
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
    args, options = arguments(name)
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
        yield str(sizes), name, *arguments(name, **sizes)
    left = {k: halved(t) if isinstance(t, torch.Tensor) else t for k, t in options.items()}
    yield "half of the columns", name, tuple(map(halved, args)), left
    block_scales = (torch.ones(T, 1), torch.ones(G, 1, 1))
    if name.startswith("grouped_gemm_scaled"):
        a, _, b, *rest = args
        block_scales = (torch.ones(1, K), torch.ones(1, N)) if "wgrad" in name else block_scales
        yield "blocks", name, (a, block_scales[0], b, block_scales[1], *rest[1:]), {**options, "format": "fp8_block"}
    for other in AXES:
        if other.startswith(name.partition(".")[0]) and other != name:
            yield other, other, *arguments(other)


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
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    with backends.emulated_device("sm_90"):
        yield seen


def outcome(launched, name, args, options):
    """Return the launches and results of a call, or its error."""
    launched.clear()
    arch = "sm_100" if name == SM100_ONLY else backends.cpu_target.arch
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
            patch.setattr(launcher, "warm_plans", Forgetful())
            for check in remembered.MADE:
                check.passed.clear()
            return outcome(launched, *call)

    return run


@pytest.mark.parametrize("name", list(AXES))
def test_a_call_like_one_before_is_served_like_one_that_is_not(launched, cold, name):
    base = (name, *arguments(name))
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


@pytest.mark.parametrize("name", list(AXES))
def test_a_warm_call_is_one_look_up(launched, monkeypatch, name):
    """A warm call looks up no kernel, and checks no operand, a second time."""
    args, options = arguments(name)
    expected = outcome(launched, name, args, options)
    assert len(expected[0]) == 1
    for method in ("reason", "plan"):
        monkeypatch.setattr(launcher.Launcher, method, None)
    for module, function in ((tgl.meta.scaled, "_data"), (tgl.meta.checks, "floating")):
        monkeypatch.setattr(module, function, None)
    assert outcome(launched, name, args, options) == expected


def test_buffers_of_components_are_checked_once(launched, monkeypatch):
    args, options = arguments("group_quantize.out")
    expected = outcome(launched, "group_quantize.out", args, options)
    assert len(expected[0]) == 1
    monkeypatch.setattr(tgl.meta.quantized, "sized_components", None)
    assert outcome(launched, "group_quantize.out", args, options) == expected


@pytest.mark.parametrize("name", [n for n in AXES if n not in OF_ONE])
def test_every_architecture_has_its_own(launched, name):
    for arch in ("sm_90", "sm_100", "sm_90"):
        with backends.emulated_device(arch):
            (op, key, *_), *_ = outcome(launched, name, *arguments(name))[0]
        assert arch in map(str, key), op
