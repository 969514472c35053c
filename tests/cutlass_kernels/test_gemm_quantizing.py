"""Scaled GEMMs whose activation leaves quantised, on the emulator: every byte, under adversarial timing."""

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels.quantizing_cases import E5M2, NAMES, Case, run
from tests.memory import same_bytes
from tgl import backends
from tgl.cutlass_kernels.runtime import launcher
from tgl.ops.grouped_activation import Params
from tgl.testing import emulate

OP = "grouped_gemm_scaled_activation_quantize"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 129, 128, 1, 0, 40)
CLAMPED = Params("clamped_qgeglu", limit=2.0, alpha=1.5, offset=0.5)
ALTERNATING = Params(interleaved=True)
SRELU = Params("srelu")

CASES = {
    "swiglu": Case(128, 256, RAGGED, bias=BF16),
    "swiglu, pair": Case(256, 256, (5, 0, 257, 1), columns=256, bias=F32, tail=40),
    "alternating": Case(128, 128, RAGGED, ALTERNATING, columns=176, tail=200),
    "alternating, few columns": Case(128, 128, (5, 0, 130, 1), ALTERNATING, columns=48),
    "alternating, wide": Case(128, 256, RAGGED, ALTERNATING, columns=80, tail=200),
    "alternating, pair, columnwise weights": Case(
        256, 256, (130, 0, 0, 3), ALTERNATING, columns=144, direction="columnwise", out=F16, probs=F16
    ),
    "clamped, columns alone": Case(
        128, 256, (5, 0, 130, 1), CLAMPED, probs=None, bias=F32, rowwise=False, scaling="even"
    ),
    "srelu, rows alone": Case(128, 128, RAGGED, SRELU, columns=208, columnwise=False, dtype=E5M2, scaling="floor"),
    "srelu, wide pair": Case(256, 256, (300, 0, 1), SRELU, columns=336, probs=BF16, b_dtype=E5M2),
    "all empty": Case(128, 256, (0, 0, 0), tail=140, bias=BF16),
}
USUAL = ("swiglu", "swiglu, pair", "alternating", "alternating, few columns", "srelu, rows alone", "all empty")


@pytest.mark.parametrize("name", USUAL)
def test_exact(name):
    run(CASES[name], seeds=(0,))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_exact_under_many_schedules(name):
    run(CASES[name], seeds=range(1, 9))


@pytest.mark.usefixtures("overlapping_groups")
def test_bad_offsets_stay_inside():
    for ends in ((5, 1 << 30), (70, -3), (-(1 << 31), 3), (1 << 30, 90), (150, 10)):
        run(dataclasses.replace(CASES["swiglu"], sizes=(130, 20), offs=ends), seeds=(0,))


def operands(sizes=(7, 0, 133), columns=128, rows=150, depth=64, names=NAMES):
    """Arguments by name; random values."""
    offs = torch.tensor(sizes).cumsum(0).int()
    torch.manual_seed(0)
    q = tgl.group_quantize(torch.randn(rows, depth).bfloat16(), offs, **names)
    w = torch.randn(len(sizes), 2 * columns, depth).bfloat16()
    p = tgl.group_quantize(w, None, **names, block_2d=names["format"] == "fp8_block")
    made = {"a": q.data, "a_scale": q.scale, "b": p.data, "b_scale": p.scale, "offs": offs}
    if names["format"] == "nvfp4":
        made |= {"a_amax": q.amax, "b_amax": p.amax}
    return {**made, "bias": torch.randn(len(sizes), 2 * columns), "probs": torch.rand(rows)}


def two_ops(given, params, **quantizing):
    given = dict(given)
    probs = given.pop("probs")
    h = tgl.grouped_gemm_scaled(**given, **NAMES)
    return h, tgl.grouped_activation_quantize(h, given["offs"], probs, **params._asdict(), **NAMES, **quantizing)


def same(x, y):
    return same_bytes(x, y)


@pytest.mark.parametrize("params", [Params(), ALTERNATING], ids=["halves", "alternating"])
def test_one_launch_with_the_bytes_of_two(params):
    """One launch has the bytes of two, also for values that are not finite, which affect their own block only."""
    given = operands()
    given["probs"][:4] = torch.tensor([float("inf"), float("nan"), 0.0, -1.0])
    given["bias"][2, 5] = float("inf")
    given["a"][20, 3] = float("nan")
    with emulate("sm_100a") as machine:
        h, out = tgl.grouped_gemm_scaled_activation_quantize(**given, **params._asdict(), **NAMES)
        assert len(machine.launches) == 1
        wanted_h, wanted = two_ops(given, params)
        assert len(machine.launches) == 3
    assert same(h, wanted_h)
    assert all(same(*pair) for pair in zip(out, wanted))
    assert (out.scale == 255).any()
    assert not h[140:].any()


@pytest.mark.slow
def test_a_layer_does_not_read_its_first_product_back():
    """Two weights and the input quantised, and two GEMMs: five launches, with the bits of seven."""
    torch.manual_seed(0)
    recipe = tgl.recipes.MXFP8BlockScaling()
    mlp = tgl.GroupedMLP(3, 64, 128, bias=True, recipe=recipe, params_dtype=BF16).requires_grad_(False)
    x, offs, probs = torch.randn(150, 64).bfloat16(), torch.tensor([7, 7, 140], dtype=torch.int32), torch.rand(150)
    with emulate("sm_100a", detect_races=False) as machine:
        y = mlp.forward_offsets(x, offs, probs)
        assert len(machine.launches) == 5
        hidden = mlp.fc1.forward_offsets(x, offs)
        apart = mlp.fc2.forward_offsets(tgl.grouped_activation(hidden, offs, probs), offs, probs)
        assert len(machine.launches) == 12
    assert same(y, apart)


@pytest.mark.slow
def test_a_warmed_up_call_compiles_nothing(monkeypatch):
    given = operands()
    with emulate("sm_100a", detect_races=False) as machine:
        monkeypatch.setattr(launcher, "compiled_kernels", {})
        monkeypatch.setattr(launcher, "warm_plans", {})
        before = {name: t.clone() for name, t in given.items()}
        assert tgl.warmup(OP, **given, **NAMES).chosen.name == "tgl kernel"
        assert all(same(t, before[name]) for name, t in given.items())
        monkeypatch.setattr(launcher, "compiled", None)
        tgl.grouped_gemm_scaled_activation_quantize(**given, **NAMES)
        assert len(machine.launches) == 2


@pytest.mark.parametrize("sizes, rows", [((0, 0, 0), 0), ((), 9)])
def test_nothing_to_multiply(sizes, rows):
    """Places of scales there are nevertheless."""
    given = operands(sizes, rows=rows)
    with emulate("sm_100a") as machine:
        h, out = tgl.grouped_gemm_scaled_activation_quantize(**given, **NAMES)
        assert not machine.launches
    assert not any(t.view(torch.uint8).any() for t in (h, *out))


def test_unsupported_calls_have_reasons():
    def reason(given, **options):
        with backends.compile_only("sm_100"):
            explanation = tgl.explain(OP, **given, **{**NAMES, **options})
        assert explanation.chosen.name == "GEMM, then activation and quantise"
        return str(explanation)

    assert "needs I to be a multiple of 128 unless halves alternate" in reason(operands(columns=192))
    assert "needs I to be a multiple of 16, got 72" in reason(operands(columns=72), interleaved=True)
    assert "writes bfloat16 or float16, not torch.float32" in reason(operands(), out_dtype=F32)
    given = operands()
    compact = {"format": "mxfp8", "scale_layout": "compact"}
    assert 'needs scale_layout="blocked", got "compact"' in reason(operands(names=compact), scale_layout="compact")
    fp4 = {"format": "nvfp4", "scale_layout": "blocked"}
    assert "amax of a whole group, which one tile does not know" in reason(operands(names=fp4), **fp4)
    block = {"format": "fp8_block", "scale_layout": "compact"}
    assert "takes mxfp8, got fp8_block" in reason(operands(names=block), **block)
    with backends.compile_only("sm_90"):
        assert "built for sm_100, sm_103, this device is sm_90" in str(tgl.explain(OP, **given, **NAMES))
