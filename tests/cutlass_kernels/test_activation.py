"""Activation kernels on the emulator: within stated rounding of float64, zero tails, nothing written around them."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import cute_emulator
import tgl
from tests.activation_cases import PARAMS, UNIT, relative_error
from tests.cutlass_kernels import sass
from tests.kernel_cases import framed_like
from tests.memory import same_bytes
from tgl import backends
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.components import Components
from tgl.meta.quantized import Options
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 13, 1, 0, 40)


def inputs(params, sizes, tail, columns, dtype, probs_dtype):
    """dy, x, offs and probs; NaN in every tail."""
    torch.manual_seed(columns)
    rows = sum(sizes) + tail
    x = (torch.randn(rows, columns * (2 if params.gated else 1)) * 3).to(dtype)
    dy = torch.randn(rows, columns).to(dtype)
    probs = None if probs_dtype is None else torch.rand(rows).to(probs_dtype)
    for t in (dy, x, probs):
        if t is not None:
            t[sum(sizes) :] = float("nan")
    return dy, x, torch.tensor(sizes).cumsum(0).int(), probs


def run(dy, x, offs, probs, params, seeds=(0,)):
    """Run both kernels between canaries, with the same bits under every seed; return y, dx and dprobs."""
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    dprobs = torch.empty(0 if probs is None else len(x))
    frame = framed_like((y, dx, dprobs))
    y, dx, dprobs = frame.inside
    first = None
    for seed in seeds:
        cute_emulator.active().seed = seed
        before = len(cute_emulator.active().launches)
        frame.refill()
        backends.run("grouped_activation", x.device, x, offs, probs, params=params, out=y)
        backends.run("grouped_activation_backward", x.device, dy, x, offs, probs, params=params, dx=dx, dprobs=dprobs)
        assert len(cute_emulator.active().launches) == before + 2
        assert frame.intact()
        first = first or [room.clone() for room in frame.rooms]
        assert all(torch.equal(a, b) for a, b in zip(first, frame.rooms))
    return y, dx, dprobs


def half_unit(exact, dtype):
    """Half a unit in the last place of ``dtype``."""
    info = torch.finfo(dtype)
    return torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(info.smallest_normal)))) * (info.eps / 2)


def check(dy, x, offs, probs, params, got):
    """Against float64: one rounding to the dtype, and float32's own errors, which grow with the terms of a sum."""
    end = int(offs[-1])
    y, dx, dprobs = got
    for t in got:
        assert t[end:].eq(0).all()
    y, dx, dprobs, dy, x = y[:end], dx[:end], dprobs[:end], dy[:end].double(), x[:end].double()
    p = torch.ones(end, 1, dtype=torch.float64) if probs is None else probs[:end, None].double()
    g, u = params.halves(x)
    exact = params.value(g.clone(), u) * p
    a, a1, linear, slope = params.factors(g, u)
    own = relative_error(params, g, a, a1, fast=y.dtype != F32)
    linear = torch.ones_like(a) if linear is None else linear
    lost = 2.0**-126 * g.abs() * p  # of A, whose other factor is 0 where it would be a subnormal number
    error = half_unit(exact, y.dtype) + own * exact.abs() + lost * linear.abs()
    assert ((y.double() - exact).abs() <= error).all()
    slope = torch.ones_like(a) if slope is None else slope
    terms = (torch.abs(a) + 1) * p * dy.abs() * linear.abs()  # A' = s + alpha a (1 - s), whose terms may cancel
    dg, du = params.halves(dx.double())
    exact = dy * p * a1 * linear
    # The sum and the products of A' round as often again, and so do those with dy, p and L.
    assert ((dg - exact).abs() <= half_unit(exact, dx.dtype) + (own + 8 * UNIT) * terms).all()
    if du is not None:
        exact = dy * p * a * slope
        assert ((du - exact).abs() <= half_unit(exact, dx.dtype) + own * exact.abs() + lost * dy.abs()).all()
    if probs is not None:
        summands = dy * a * linear
        # A lane adds up columns / 32 of them, five shuffles follow, and a summand has two products of its own.
        bound = ((own + (7 + dy.shape[1] / 32) * UNIT) * summands.abs()).sum(1)
        assert ((dprobs.double() - summands.sum(1)).abs() <= bound).all()


CASES = [("sm_90a", name, (BF16, F32)[i % 2], F32) for i, name in enumerate(PARAMS)]
CASES += [("sm_90a", "swiglu", F16, None), ("sm_100a", "swiglu", BF16, F32), ("sm_100a", "clamped_qgeglu", F16, None)]


@pytest.mark.parametrize(("arch", "name", "dtype", "probs"), CASES, ids=str)
def test_ragged_groups(arch, name, dtype, probs):
    problem = inputs(PARAMS[name], RAGGED, 9, 264, dtype, probs)
    with emulate(arch):
        check(*problem, PARAMS[name], run(*problem, PARAMS[name]))


@pytest.mark.parametrize("columns", [1, 7, 36, 1032])
@pytest.mark.parametrize("name", ["swiglu", "swiglu interleaved", "srelu"])
def test_any_width(columns, name):
    problem = inputs(PARAMS[name], (3, 0, 8), 2, columns, BF16, BF16)
    with emulate("sm_90a"):
        check(*problem, PARAMS[name], run(*problem, PARAMS[name], seeds=range(3)))


@pytest.mark.parametrize("sizes, tail", [((0, 0), 5), ((8,), 0), ((), 9)], ids=str)
def test_routings(sizes, tail):
    params = PARAMS["swiglu"]
    dy, x, offs, probs = inputs(params, sizes, tail, 40, BF16, F32)
    with emulate("sm_90a"):
        got = run(dy, x, offs, probs, params)
    if sizes:
        check(dy, x, offs, probs, params, got)
    else:
        assert all(t.eq(0).all() for t in got)


def test_srelu_is_exact():
    params = PARAMS["srelu"]
    dy, x, offs, probs = inputs(params, RAGGED, 9, 136, F32, F32)
    wanted = tgl.grouped_activation(x, offs, probs, kind="srelu")
    wanted_dx, _ = torch.ops.tgl.grouped_activation_backward(dy, x, offs, probs, kind="srelu")
    with emulate("sm_90a"):
        y, dx, _ = run(dy, x, offs, probs, params)
    assert torch.equal(y, wanted)
    assert torch.equal(dx, wanted_dx)


def test_special_values_and_layouts():
    """NaN and infinities as the CPU has them; rows apart from each other, misaligned, and of one kind repeated."""
    offs = torch.tensor([3, 7], dtype=torch.int32)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 80.0, -80.0, 200.0, -200.0])
    wide = torch.stack(torch.meshgrid(special, special, indexing="ij")).reshape(2, 81).flatten().expand(7, 162)
    for params in (PARAMS["swiglu"], PARAMS["clamped_qgeglu"], PARAMS["srelu"]):
        for x in (wide, wide.clone().bfloat16(), torch.cat([wide, wide], 1)[:, 1:163]):
            keywords = params._asdict()
            wanted = tgl.grouped_activation(x, offs, **keywords)
            with emulate("sm_90a") as machine:
                y = tgl.grouped_activation(x, offs, **keywords)
                assert len(machine.launches) == 1
            torch.testing.assert_close(y, wanted, rtol=2**-8 if y.dtype == BF16 else 1e-6, atol=2**-119, equal_nan=True)


def test_bad_offsets_stay_inside():
    params = PARAMS["swiglu"]
    dy, x, _, probs = inputs(params, (20,), 0, 40, BF16, F32)
    with emulate("sm_90a"):
        for values in ((5, 1 << 30), (7, -3), (-(1 << 31),)):
            run(dy, x, torch.tensor(values, dtype=torch.int32), probs, params)


def test_unsupported_calls_have_reasons():
    offs = torch.tensor([8], dtype=torch.int32)
    with backends.compile_only("sm_90"):
        columns = torch.zeros(16, 8, dtype=BF16).t()
        assert "row-major" in str(tgl.explain("grouped_activation", columns, offs))
        assert "float64" in str(tgl.explain("grouped_activation", torch.zeros(8, 16).double(), offs))
        odd = torch.zeros(8, 17, dtype=BF16)[:, :16]
        assert "on 4 bytes" in str(tgl.explain("grouped_activation", odd, offs, interleaved=True))
        narrow = torch.zeros(8, 24, dtype=BF16)
        assert "multiple of 8" in str(tgl.explain("grouped_activation_quantize", narrow, offs, format="mxfp8"))


BLOCKED, COMPACT = {"format": "mxfp8", "scale_layout": "blocked"}, {"format": "mxfp8"}


@pytest.mark.parametrize(
    ("arch", "name", "dtype", "probs", "options"),
    [
        ("sm_90a", "swiglu", BF16, F32, BLOCKED),
        ("sm_90a", "swiglu interleaved", F16, None, COMPACT),
        ("sm_100a", "clamped_qgeglu", F32, F32, BLOCKED),
        ("sm_100a", "clamped_qgeglu interleaved", BF16, BF16, COMPACT),
        ("sm_90a", "srelu", BF16, F32, BLOCKED),
        ("sm_90a", "swiglu", BF16, F32, {"format": "fp8_block"}),
        ("sm_90a", "swiglu", BF16, None, {"format": "fp8_block", "columnwise": False}),
        ("sm_100a", "clamped_qgeglu interleaved", F16, F16, {"format": "fp8_block", "power_of_two": False}),
        ("sm_90a", "srelu", F32, None, {"format": "fp8_block", "rowwise": False, "dtype": torch.float8_e5m2}),
        ("sm_90a", "swiglu", BF16, F32, {"format": "fp8_tensor"}),
        ("sm_100a", "swiglu interleaved", BF16, None, {"format": "fp8_tensor", "rowwise": False}),
    ],
    ids=str,
)
def test_quantised_in_the_same_pass(arch, name, dtype, probs, options):
    """The bytes of the activation kernel's rows quantised on the CPU, in one launch, in the middle of canaries."""
    params = PARAMS[name]
    _, x, offs, probs = inputs(params, (5, 0, 130, 1), 40, 136, dtype, probs)
    scale = torch.tensor([1.0, 2.0, 0.25, 700.0]) if options["format"] == "fp8_tensor" else None
    with emulate(arch):
        y = tgl.grouped_activation(x, offs, probs, **params._asdict())
    wanted = tgl.group_quantize(y, offs, scale, **options)
    frame = framed_like(wanted)
    out = Components(*frame.inside)
    call = {"params": params, "options": Options(**options).resolved("group_quantize"), "out": out}
    with emulate(arch, seed=1) as machine:
        backends.run("grouped_activation_quantize", x.device, x, offs, probs, scale, **call)
        assert len(machine.launches) == 1
    for field, a, b in zip(wanted._fields, out, wanted):
        assert same_bytes(a, b), field
    assert frame.intact()


@pytest.mark.parametrize("options", [{"format": "fp8_block"}, {"format": "fp8_tensor"}], ids=str)
def test_a_call_like_one_before_gives_its_own_components(options, monkeypatch):
    """The second comes from the look-up, with other rows, of which the largest is smaller."""
    monkeypatch.setattr(launcher, "warm_plans", {})
    scale = torch.tensor([4.0, 0.5]) if options["format"] == "fp8_tensor" else None
    offs = torch.tensor([3, 40], dtype=torch.int32)
    with emulate("sm_90a", detect_races=False):
        for size in (8.0, 0.25):
            x = (torch.randn(44, 272) * size).bfloat16()
            got = tgl.grouped_activation_quantize(x, offs, None, scale, **options)
            y = tgl.grouped_activation(x, offs)
            with backends.emulated_device("no such device"):
                wanted = tgl.group_quantize(y, offs, scale, **options)
            assert all(map(same_bytes, got, wanted))
    assert any(key[0].op == "grouped_activation_quantize" for key in launcher.warm_plans)


def test_warming_up_two_ops_compiles_both(monkeypatch):
    """A format that no kernel makes in the same pass, since its scales follow from the amax of a group."""
    x, offs = torch.randn(40, 48).bfloat16(), torch.tensor([3, 3, 36], dtype=torch.int32)
    options = {"format": "fp8_tensor", "kind": "srelu"}
    expected = tgl.grouped_activation_quantize(x, offs, **options)
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    with emulate("sm_90a") as machine:
        explanation = tgl.warmup("grouped_activation_quantize", x, offs, **options)
        assert explanation.chosen.name == "activation, then quantise"
        assert "does not take fp8_tensor without `scale`" in str(explanation)
        monkeypatch.setattr(launcher, "compiled", None)
        before = len(machine.launches)
        got = tgl.grouped_activation_quantize(x, offs, **options)
        assert len(machine.launches) == before + 3
    for ours, theirs in zip(got, expected):
        assert same_bytes(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        ("sm_90a", "swiglu"),
        ("sm_100a", "swiglu interleaved"),
        ("sm_90a", "swiglu interleaved"),
        ("sm_100a", "swiglu"),
    ],
)
def test_machine_code(monkeypatch, arch, kind):
    """16-byte loads, all of a batch ahead of the arithmetic; nothing spilled."""
    params = PARAMS[kind]
    dy, x, offs, probs = inputs(params, (8,), 0, 264, BF16, F32)
    compile, compiled = launcher.compiled, []
    monkeypatch.setattr(launcher, "compiled", lambda *args: compiled.append(compile(*args)) or compiled[-1])
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    with emulate(arch):
        run(dy, x, offs, probs, params)
        for options in ({"format": "mxfp8", "scale_layout": "blocked"}, {"format": "fp8_block"}):
            tgl.grouped_activation_quantize(x, offs, probs, **options, **params._asdict())
        tgl.grouped_activation_quantize(x, offs, probs, torch.ones(1), format="fp8_tensor", **params._asdict())
    assert len(compiled) == 5
    for kernel in compiled:
        report = sass.inspect(kernel.artifacts.CUBIN)
        assert report.spills == report.frame == 0
        assert report.registers <= 128
        assert "ld.global.v4.b32" in kernel.artifacts.PTX
