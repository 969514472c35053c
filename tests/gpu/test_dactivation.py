"""``grouped_gemm_dactivation`` on a device: the bits of two launches, for every routing, again, and from a graph.

With the activation's own result beside it, as the backward of experts needs it, the bits are those of a third.
"""

import pytest
import torch

import tgl
from tests.activation_cases import CASES, back_to_hidden, width
from tests.gpu.device import ARCH, DEVICE, TAIL, ends, served
from tests.kernel_cases import ROUTINGS as ALL
from tests.kernel_cases import column_major
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.config import GemmConfig
from tgl.cutlass_kernels.runtime import launcher
from tgl.meta.specs import TensorSpec
from tgl.ops.grouped_activation import Params

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUTINGS = {name: ALL[name] for name in ("edges", "one takes all", "all empty", "even", "many")}
SM90 = [GemmConfig(64, 64), GemmConfig(64, 256), GemmConfig(128, 192), GemmConfig(128, 256), GemmConfig(256, 128)]
SM90 += [GemmConfig(128, 128, cluster_n=2), GemmConfig(64, 128, pingpong=True), GemmConfig(128, 128, pingpong=True)]
SM100 = [GemmConfig(128, n) for n in (64, 128, 256)] + [GemmConfig(256, n, two_cta=True) for n in (64, 128, 256)]
SHAPES = ("swiglu", "swiglu interleaved", "srelu")  # the layouts of halves: side by side, interleaved, none
TILINGS = {"sm_90": SM90, "sm_100": SM100}


def inputs(kind, sizes, depth, columns, dtype, probs_dtype, by_columns=False):
    """dy, b, h, offs and probs; NaN in every tail."""
    rows = sum(sizes) + TAIL
    dy = torch.randn(rows, depth, device=DEVICE).to(dtype)
    b = torch.randn(len(sizes), depth, columns, device=DEVICE).to(dtype)
    h = (torch.randn(rows, width(kind, columns), device=DEVICE) * 3).to(dtype)
    probs = None if probs_dtype is None else torch.rand(rows, device=DEVICE).to(probs_dtype)
    for t in (dy, h, probs):
        if t is not None:
            t[sum(sizes) :] = float("nan")
    if by_columns:
        b = column_major(b)
    return dy, b, h, ends(sizes), probs


def check(dy, b, h, offs, probs, options, again=3):
    dh, dprobs = served("grouped_gemm_dactivation", dy, b, h, offs, probs, **options)
    da = tgl.grouped_gemm(dy, b, offs)
    wanted, wanted_probs = torch.ops.tgl.grouped_activation_backward(da, h, offs, probs, **options)
    assert torch.equal(dh, wanted)
    spec = TensorSpec((h.shape[0], b.shape[2]), h.dtype, h.device)
    beside = back_to_hidden([dy, b, h, offs, probs], spec, params=Params(**options))
    assert torch.equal(beside[0], dh)
    if probs is not None:
        assert torch.equal(beside[1], dprobs)
    assert torch.equal(beside[2], tgl.grouped_activation(h, offs, probs, **options))
    end = int(offs[-1])
    assert dh[end:].eq(0).all()
    if probs is not None:
        # Each of the two sums rounds once for every addition that a summand goes through: fewer than `additions`.
        additions = 64 + b.shape[2] // 8
        summands = da.abs().double() * tgl.grouped_activation(h, offs, **options).abs().double()
        bound = 2 * additions * 2.0**-24 * summands.sum(1)
        assert ((dprobs - wanted_probs).abs() <= bound)[:end].all()
        assert dprobs[end:].eq(0).all()
    for _ in range(again):
        same = tgl.grouped_gemm_dactivation(dy, b, h, offs, probs, **options)
        assert torch.equal(same[0], dh)
        assert torch.equal(same[1], dprobs)


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    ("dtype", "probs", "column_major"), [(BF16, F32, False), (F16, None, True), (BF16, BF16, True)], ids=str
)
def test_the_bits_of_two_launches(sizes, options, dtype, probs, column_major):
    check(*inputs(options["kind"], sizes, 520, 776, dtype, probs, column_major), options)


@pytest.mark.parametrize("tiling", TILINGS[ARCH], ids=str)
@pytest.mark.parametrize("options", [CASES[name] for name in SHAPES], ids=SHAPES)
def test_every_tiling(monkeypatch, tiling, options):
    monkeypatch.setattr(tilings, "choose_gradient", lambda *_: tiling)
    monkeypatch.setattr(launcher, "warm_plans", {})
    for sizes, columns in (((257, 0, 255, 1, 700), 1032), ((3, 64, 0), 40)):
        check(*inputs(options["kind"], sizes, 264, columns, BF16, F32), options)


def test_one_graph_for_every_routing():
    rows = 3000
    dy, b, h, offs, probs = inputs("swiglu", (rows - TAIL,), 256, 520, BF16, F32)
    dy, h, probs = torch.nan_to_num(dy), torch.nan_to_num(h), torch.nan_to_num(probs)
    offs.fill_(rows)
    wanted = [t.clone() for t in tgl.grouped_gemm_dactivation(dy, b, h, offs, probs)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = tgl.grouped_gemm_dactivation(dy, b, h, offs, probs)
    for end in (0, 1, 777, rows, 128):
        offs.fill_(end)
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for got, whole in zip(results, wanted):
            assert torch.equal(got[:end], whole[:end]), end
            assert got[end:].eq(0).all(), end
