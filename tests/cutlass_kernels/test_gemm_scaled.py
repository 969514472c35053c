"""Kernels on quantised operands: exact where sums are, canaries intact, under adversarial timing."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels.scaled_cases import E5M2, ScaledCase, run
from tests.memory import same_bytes
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.cutlass_kernels.config import VARLEN_K, VARLEN_M
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.cutlass_kernels.runtime import launcher
from tgl.testing import emulate

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RAGGED = (5, 0, 129, 128, 1, 0, 40)

GEMM = {
    "mxfp8": ScaledCase("mxfp8", 128, 128, RAGGED),
    "mxfp8, columnwise weights": ScaledCase("mxfp8", 128, 128, RAGGED, "columnwise", out=F32),
    "mxfp8, wide": ScaledCase("mxfp8", 128, 256, RAGGED, columns=272, bias=BF16),
    "mxfp8, pair": ScaledCase("mxfp8", 256, 128, RAGGED, bias=F32, bias_scale=F32, zero_tail=False, tail=150),
    "mxfp8, wide pair, columnwise": ScaledCase("mxfp8", 256, 256, (257, 0, 255, 1), "columnwise", columns=272),
    "mxfp8, partial last block": ScaledCase("mxfp8", 128, 128, (70, 3), depth=80, columns=48),
    "mxfp8, all empty": ScaledCase("mxfp8", 128, 128, (0, 0, 0), tail=140),
    "nvfp4": ScaledCase("nvfp4", 128, 128, RAGGED),
    "nvfp4, columnwise weights, pair": ScaledCase("nvfp4", 256, 128, RAGGED, "columnwise", out=F32, bias=F32),
    "nvfp4, wide": ScaledCase("nvfp4", 128, 256, (300, 0, 2), columns=288, out=F16),
    "fp8_tensor": ScaledCase("fp8_tensor", 128, 128, RAGGED),
    "fp8_tensor, columnwise weights, pair": ScaledCase("fp8_tensor", 256, 256, RAGGED, "columnwise", out=F32),
    "fp8_block": ScaledCase("fp8_block", 128, 128, (5, 0, 130, 127), depth=336, bias=BF16),
    "fp8_block, columnwise weights, pair, deeper than the rings": ScaledCase(
        "fp8_block", 256, 128, (257, 0, 1), "columnwise", depth=1040, out=F32, bias=F32, bias_scale=F32
    ),
}
WGRAD = {
    "mxfp8": ScaledCase("mxfp8", 128, 128, RAGGED, out=F32),
    "mxfp8, mixed, accumulate": ScaledCase("mxfp8", 128, 256, RAGGED, out=F32, accumulate=True, b_dtype=E5M2),
    "mxfp8, pair, 16 bits": ScaledCase("mxfp8", 256, 128, RAGGED, depth=272, columns=144, accumulate=True),
    "nvfp4": ScaledCase("nvfp4", 128, 128, RAGGED, out=F32),
    "nvfp4, wide pair, accumulate": ScaledCase("nvfp4", 256, 256, RAGGED, depth=288, out=F32, accumulate=True),
    "fp8_tensor": ScaledCase("fp8_tensor", 128, 128, RAGGED, out=F32),
    "fp8_tensor, pair": ScaledCase("fp8_tensor", 256, 128, (33, 0, 200, 31, 32), depth=272, b_dtype=E5M2),
    "mxfp8, all empty": ScaledCase("mxfp8", 128, 128, (0, 0), tail=20),
    "fp8_block, accumulate": ScaledCase("fp8_block", 128, 128, (5, 0, 130, 127), out=F32, accumulate=True),
    "fp8_block, pair, mixed, 16 bits": ScaledCase(
        "fp8_block", 256, 128, (33, 0, 300, 31), depth=272, columns=144, b_dtype=E5M2, accumulate=True
    ),
}
GEMM_SM90 = {
    "fp8_tensor": ScaledCase("fp8_tensor", 128, 128, RAGGED, depth=336),
    "fp8_tensor, columnwise weights, pair": ScaledCase(
        "fp8_tensor", 128, 128, RAGGED, "columnwise", out=F32, columns=272, cluster_n=2, bias=F32, bias_scale=BF16
    ),
    "fp8_tensor, two blocks, deeper than the ring": ScaledCase(
        "fp8_tensor", 256, 128, (257, 0, 1), depth=656, bias=BF16, zero_tail=False, tail=300
    ),
    "fp8_tensor, wide": ScaledCase("fp8_tensor", 128, 192, (130, 0, 1), columns=208, out=F16),
    "fp8_tensor, few rows": ScaledCase("fp8_tensor", 64, 64, RAGGED, columns=40, tail=70),
    "fp8_tensor, all empty": ScaledCase("fp8_tensor", 64, 128, (0, 0, 0), tail=140),
    "fp8_block": ScaledCase("fp8_block", 128, 128, RAGGED, depth=336, columns=272),
    "fp8_block, columnwise weights": ScaledCase("fp8_block", 64, 64, RAGGED, "columnwise", out=F32, bias=BF16),
    "fp8_block, two blocks, pair": ScaledCase("fp8_block", 256, 128, (257, 0, 3), columns=272, cluster_n=2),
    "fp8_block, wide": ScaledCase("fp8_block", 128, 192, (130, 0, 1), depth=656, columns=400, bias=BF16),
}
WGRAD_SM90 = {
    "fp8_tensor": ScaledCase("fp8_tensor", 128, 128, RAGGED, out=F32),
    "fp8_tensor, mixed, accumulate": ScaledCase(
        "fp8_tensor", 128, 128, RAGGED, out=F32, columns=272, cluster_n=2, accumulate=True, b_dtype=E5M2
    ),
    "fp8_tensor, two blocks, 16 bits": ScaledCase("fp8_tensor", 256, 64, (33, 0, 200, 31, 32), accumulate=True),
    "fp8_tensor, deeper than the ring": ScaledCase("fp8_tensor", 128, 192, (1, 720, 0, 97), depth=144, columns=208),
    "fp8_block": ScaledCase("fp8_block", 128, 128, RAGGED, out=F32),
    "fp8_block, few rows, mixed": ScaledCase("fp8_block", 64, 64, (33, 0, 300, 31), columns=72, b_dtype=E5M2),
    "fp8_block, pair, accumulate": ScaledCase(
        "fp8_block", 128, 128, RAGGED, out=F32, columns=272, cluster_n=2, accumulate=True
    ),
    "fp8_block, two blocks, deeper than the ring": ScaledCase(
        "fp8_block", 256, 128, (1, 700, 0, 97), depth=272, columns=144, cluster_n=2
    ),
    "fp8_block, all empty": ScaledCase("fp8_block", 128, 128, (0, 0), tail=20),
}
LONG_GEMM = {
    "fp8_block, ragged": ScaledCase("fp8_block", 128, 128, RAGGED, "columnwise", depth=336, columns=272, out=F32),
    "fp8_block, pair, tail left alone": ScaledCase("fp8_block", 256, 128, RAGGED, zero_tail=False, tail=150),
    "fp8_block, all empty": ScaledCase("fp8_block", 128, 128, (0, 0, 0), tail=140),
    "fp8_block, wide, ragged, columnwise": ScaledCase(
        "fp8_block", 128, 192, RAGGED, "columnwise", arch="sm_90", depth=336, columns=784, out=F32, cluster_n=2
    ),
}
LONG_WGRAD = {
    "fp8_block, ragged": ScaledCase("fp8_block", 128, 128, RAGGED, columns=272),
    "fp8_block, pair, deeper than the rings": ScaledCase(
        "fp8_block", 256, 128, (1, 1100, 0, 97), depth=272, columns=272, out=F32
    ),
    "fp8_block, all empty": ScaledCase("fp8_block", 128, 128, (0, 0), tail=20),
}
KINDS = [(VARLEN_M, case) for case in GEMM.values()] + [(VARLEN_K, case) for case in WGRAD.values()]
NAMES = [f"rows: {name}" for name in GEMM] + [f"contraction: {name}" for name in WGRAD]
KINDS += [(VARLEN_M, replace(case, arch="sm_90")) for case in GEMM_SM90.values()]
KINDS += [(VARLEN_K, replace(case, arch="sm_90")) for case in WGRAD_SM90.values()]
NAMES += [f"sm_90, rows: {name}" for name in GEMM_SM90] + [f"sm_90, contraction: {name}" for name in WGRAD_SM90]
LONGER = {f"rows: {name}" for name in ("mxfp8, columnwise weights", "mxfp8, wide", "nvfp4", "fp8_tensor")}
LONGER |= {f"contraction: {name}" for name in ("mxfp8", "nvfp4")}
LONGER |= {"sm_90, rows: fp8_tensor", "sm_90, contraction: fp8_tensor", "sm_90, contraction: fp8_block"}
LONGER |= {f"sm_90, rows: {name}" for name in ("fp8_block", "fp8_block, two blocks, pair", "fp8_tensor, all empty")}
LONGER |= {"sm_90, contraction: fp8_block, two blocks, deeper than the ring", "contraction: fp8_block, accumulate"}
LONGER |= {"sm_90, contraction: fp8_tensor, two blocks, 16 bits", "rows: fp8_block", "contraction: fp8_tensor"}
LONGER |= {"sm_90, rows: fp8_tensor, wide", "contraction: fp8_tensor, pair"}
LONGER |= {"sm_90, contraction: fp8_tensor, mixed, accumulate", "sm_90, rows: fp8_block, wide"}
"""Cases whose paths through the kernels other cases take too."""
LONG = [(VARLEN_M, case) for case in LONG_GEMM.values()] + [(VARLEN_K, case) for case in LONG_WGRAD.values()]
LONG_NAMES = [f"rows: {name}" for name in LONG_GEMM] + [f"contraction: {name}" for name in LONG_WGRAD]


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in LONGER)) for name, case in zip(NAMES, KINDS)],
)
def test_exact(kind, case):
    run(kind, case)


@pytest.mark.parametrize("name", ["mxfp8, pair", "mxfp8, wide pair, columnwise", "nvfp4, columnwise weights, pair"])
def test_a_pair_loads_the_scales_of_b_once(name):
    case = GEMM[name]
    form, record = OPERANDS[case.format], run(VARLEN_M, case)
    stage = (case.tile_m + case.tile_n) * 128 + form.scale_bytes(case.tile_m) + form.scale_bytes(case.tile_n)
    tiles = sum(-(-size // case.tile_m) for size in case.sizes) * -(-case.columns // case.tile_n)
    assert record.tma_bytes["load"] == tiles * -(-case.depth // form.tile_k) * stage


@pytest.mark.slow
@pytest.mark.parametrize("kind, case", LONG, ids=LONG_NAMES)
def test_exact_on_more_sizes(kind, case):
    run(kind, case)


@pytest.mark.slow
@pytest.mark.parametrize("kind, case", KINDS, ids=NAMES)
def test_exact_under_many_schedules(kind, case):
    run(kind, case, seeds=range(1, 7))


@pytest.mark.parametrize(
    ("arch", "format"),
    [
        pytest.param(arch, name, marks=() if arch in ("sm_90", "sm_100", "sm_120") else pytest.mark.slow)
        for name, form in OPERANDS.items()
        for arch in form.archs
    ],
)
def test_ops_run_one_kernel_each(arch, format):
    layout = {"scale_layout": "blocked"} if OPERANDS[format].vector else {}
    offs = torch.tensor([3, 3, 40, 41], dtype=torch.int32)
    x, w = torch.randn(50, 64).bfloat16(), torch.randn(4, 32, 64).bfloat16()
    q = tgl.group_quantize(x, offs, format=format, **layout)
    p = tgl.group_quantize(w, None, format=format, **layout, block_2d=format == "fp8_block")
    amax = (q.amax, p.amax) if format == "nvfp4" else ()
    options = {"format": format, **layout}
    with emulate(ARCHS[arch].target, detect_races=False) as machine:
        y = tgl.grouped_gemm_scaled(q.data, q.scale, p.data, p.scale, offs, *amax, **options)
        dw = tgl.grouped_gemm_scaled_wgrad(
            *(q.columnwise_data, q.columnwise_scale) * 2, offs, *(q.columnwise_amax,) * len(amax), **options
        )
        assert len(machine.launches) == 2
    assert y.shape == (50, 32)
    assert not y[41:].any()
    assert dw.shape == (4, 64, 64)
    assert not dw[1].any()
    with backends.emulated_device("no such device"):
        near = tgl.grouped_gemm_scaled(q.data, q.scale, p.data, p.scale, offs, *amax, **options)
    assert (y.float() - near.float()).abs().max() <= near.abs().max().float() * 2.0**-8  # one rounding to bfloat16


def test_scales_of_rows_are_read_as_they_lie():
    """Scales column-major, as they are made, row-major, and with gaps run the same kernel."""
    offs = torch.tensor([3, 3, 140], dtype=torch.int32)
    q = tgl.group_quantize(torch.randn(150, 272).bfloat16(), offs, format="fp8_block")
    p = tgl.group_quantize(torch.randn(3, 32, 272).bfloat16(), None, format="fp8_block", block_2d=True)
    gaps = torch.stack([q.scale, q.scale], -1)[..., 1]
    with emulate("sm_90a") as machine:
        y, *others = (
            tgl.grouped_gemm_scaled(q.data, scale, p.data, p.scale, offs, format="fp8_block")
            for scale in (q.scale, q.scale.contiguous(), gaps)
        )
        assert len(machine.launches) == 3
    assert all(same_bytes(y, other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "format"),
    [
        ("sm_90", "fp8_block"),
        ("sm_100", "nvfp4"),
        pytest.param("sm_90", "fp8_tensor", marks=pytest.mark.slow),
        pytest.param("sm_100", "mxfp8", marks=pytest.mark.slow),
        pytest.param("sm_100", "fp8_block", marks=pytest.mark.slow),
    ],
)
def test_warmup_compiles_and_touches_no_argument(arch, format, monkeypatch):
    """A bias, columnwise weights, and a buffer that keeps its bytes."""
    layout = {"scale_layout": "blocked"} if OPERANDS[format].vector else {}
    options = {"format": format, **layout}
    offs = torch.tensor([3, 3, 40], dtype=torch.int32)
    q = tgl.group_quantize(torch.randn(50, 64).bfloat16(), offs, **options)
    p = tgl.group_quantize(torch.randn(3, 64, 32).bfloat16(), None, **options, block_2d=format == "fp8_block")
    amax = (q.amax, p.columnwise_amax) if format == "nvfp4" else (None, None)
    rows = (q.data, q.scale, p.columnwise_data, p.columnwise_scale, offs, *amax, torch.randn(3, 32))
    columns = (
        (q.columnwise_data, q.columnwise_scale) * 2 + (offs,) + ((q.columnwise_amax,) * 2 if format == "nvfp4" else ())
    )
    main_grad = torch.full((3, 64, 64), 7.0)
    calls = (
        ("grouped_gemm_scaled", rows, options | {"b_direction": "columnwise"}),
        ("grouped_gemm_scaled_wgrad", columns, options),
        ("grouped_gemm_scaled_wgrad_accumulate_", (*columns[:5], main_grad, *columns[5:]), options),
    )
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    with emulate(ARCHS[arch].target, detect_races=False):
        for op, args, keywords in calls:
            before = [t.clone() for t in args if t is not None]
            assert tgl.warmup(op, *args, **keywords).chosen.name == "tgl kernel"
            after = [t for t in args if t is not None]
            assert all(map(same_bytes, before, after))
        monkeypatch.setattr(launcher, "compiled", None)
        for op, args, keywords in calls:
            getattr(tgl, op)(*args, **keywords)
