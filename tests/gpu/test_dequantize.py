"""Dequantisation and scale layouts on a device: the numbers of the CPU implementation, one graph for any routing."""

import pytest
import torch

import tgl
from tests.gpu.device import DEVICE, ends, integers, served
from tests.gpu.test_quantize import F16, F32, awkward, differing, rows
from tests.kernel_cases import ROUTINGS
from tests.memory import same_bytes
from tgl.cutlass_kernels.runtime import cache, launcher

pytestmark = pytest.mark.gpu

BLOCKED = dict(scale_layout="blocked")
CASES = {
    "mxfp8": (dict(format="mxfp8"), False),
    "mxfp8, blocked": (dict(format="mxfp8", **BLOCKED), False),
    "mxfp8, columnwise": (dict(format="mxfp8"), True),
    "mxfp8, columnwise, blocked": (dict(format="mxfp8", **BLOCKED), True),
    "nvfp4, blocked": (dict(format="nvfp4", **BLOCKED), False),
    "nvfp4, columnwise": (dict(format="nvfp4"), True),
    "nvfp4, columnwise, blocked, transformed": (dict(format="nvfp4", rht=True, **BLOCKED), True),
    "fp8_tensor": (dict(format="fp8_tensor"), False),
    "fp8_tensor, columnwise": (dict(format="fp8_tensor"), True),
    "fp8_block": (dict(format="fp8_block"), False),
    "fp8_block, columnwise": (dict(format="fp8_block"), True),
}


def components(x, offs, options, columnwise):
    """Positional arguments of ``group_dequantize``, quantised on the host, and its keywords."""
    options = options | ({} if columnwise else {"rht": False})
    q = tgl.group_quantize(x, offs, rowwise=not columnwise, columnwise=columnwise, **options)
    data, scale, amax = q[3:6] if columnwise else q[:3]
    keywords = options | {"columnwise": columnwise} | ({} if offs is None else {"rows": len(x)})
    return (data, scale, offs, amax if options["format"] == "nvfp4" else None), keywords


def here(args):
    return tuple(None if t is None else t.to(DEVICE) for t in args)


def same(ours, theirs):
    """Equal to the bit, but for which NaN it is."""
    ours, bits = ours.cpu(), {2: torch.int16, 4: torch.int32}[ours.element_size()]
    return ((ours.view(bits) == theirs.view(bits)) | (ours.isnan() & theirs.isnan())).all()


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("options, columnwise", CASES.values(), ids=CASES)
def test_values(sizes, options, columnwise):
    args, keywords = components(rows(sizes, 272), ends(sizes).cpu(), options, columnwise)
    assert same(served(tgl.group_dequantize, *here(args), **keywords), tgl.group_dequantize(*args, **keywords))


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("columns", [4104, 36, 34])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8, columnwise, blocked", "nvfp4, columnwise, blocked, transformed"])
def test_dtypes_and_widths(name, columns, dtype):
    options, columnwise = CASES[name]
    sizes = ROUTINGS["edges"]
    args, keywords = components(rows(sizes, columns), ends(sizes).cpu(), options, columnwise)
    keywords["out_dtype"] = dtype
    assert same(served(tgl.group_dequantize, *here(args), **keywords), tgl.group_dequantize(*args, **keywords))


@pytest.mark.parametrize("options, columnwise", [c for n, c in CASES.items() if "transformed" not in n], ids=str)
@pytest.mark.parametrize("n", [208, 38])
def test_matrices(options, columnwise, n):
    args, keywords = components(awkward(3, n, 264), None, options, columnwise)
    assert same(served(tgl.group_dequantize, *here(args), **keywords), tgl.group_dequantize(*args, **keywords))


REQUANTIZED = {
    "mxfp8": (dict(format="mxfp8"), "tgl kernel"),
    "mxfp8, blocked": (dict(format="mxfp8", **BLOCKED), "tgl kernel"),
    "fp8_block": (dict(format="fp8_block"), "tgl kernel"),
    "fp8_block, any scale": (dict(format="fp8_block", power_of_two=False), "tgl kernel"),
    "fp8_tensor": (dict(format="fp8_tensor"), "through float32"),
}


@pytest.mark.parametrize("columns", [272, 37])
@pytest.mark.parametrize("options, served_by", REQUANTIZED.values(), ids=REQUANTIZED)
def test_requantize(options, served_by, columns):
    sizes = ROUTINGS["edges"]
    q = tgl.group_quantize(rows(sizes, columns), ends(sizes).cpu(), columnwise=False, **options)
    args = (q.data, q.scale, ends(sizes).cpu())
    assert tgl.explain("group_requantize", *here(args), **options).chosen.name == served_by
    got, wanted = tgl.group_requantize(*here(args), **options), tgl.group_requantize(*args, **options)
    assert not differing(got, wanted)


def replayed(work, offs, arguments):
    """Results of a captured call of ``work(offs)``, for every routing, and of the same on the host."""
    work(offs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work(offs)
    for sizes in arguments:
        offs.copy_(ends(sizes))
        graph.replay()
        torch.cuda.synchronize()
        yield result, work(offs.cpu())


OTHERS = [(100, 0, 300), (0, 400, 0), (133, 133, 134), (0, 0, 1)]


@pytest.mark.parametrize("name", ["mxfp8, columnwise, blocked", "nvfp4, columnwise", "fp8_block, columnwise"])
def test_one_graph_for_any_routing(name):
    args, keywords = components(awkward(400, 384), ends(OTHERS[0]).cpu(), *CASES[name])
    device = here(args)

    def work(offs):
        data, scale, _, amax = device if offs.is_cuda else args
        return tgl.group_dequantize(data, scale, offs, amax, **keywords)

    for got, wanted in replayed(work, ends(OTHERS[0]), OTHERS):
        assert same(got, wanted)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_scale_layouts_in_a_graph(format, columnwise):
    q = tgl.group_quantize(awkward(400, 384), ends(OTHERS[0]).cpu(), format=format)
    compact = q.columnwise_scale if columnwise else q.scale
    device, options = compact.to(DEVICE), dict(shape=(400, 384), format=format, columnwise=columnwise)

    def work(offs):
        scale = device if offs.is_cuda else compact
        blocked = tgl.to_blocked_scale(scale, offs, **options)
        theirs = tgl.to_torch_scale_layout(scale, offs, **options)
        return torch.cat([t.flatten() for t in (blocked, theirs, tgl.from_torch_scale_layout(theirs, offs, **options))])

    for got, wanted in replayed(work, ends(OTHERS[0]), OTHERS):
        assert torch.equal(got.cpu(), wanted)


def test_a_capture_uses_warmed_up_kernels(tmp_path, monkeypatch):
    """Nothing compiled before, in memory or on disk; the warmed-up kernels are launched by the graph alone."""
    monkeypatch.setattr(launcher, "compiled_kernels", {})
    monkeypatch.setattr(launcher, "warm_plans", {})
    before = cache._directory
    cache.set_directory(tmp_path)
    sizes = (30, 0, 34)
    offs, x, w = ends(sizes), integers(64, 136), integers(3, 40, 136)
    q = tgl.group_quantize(x.cpu(), offs.cpu(), format="fp8_tensor")
    p = tgl.group_quantize(w.cpu(), None, format="fp8_tensor")
    (data, scale, weights, weight_scale), (turned, turned_scale) = (
        here((q.data, q.scale, p.data, p.scale)),
        here((q.columnwise_data, q.columnwise_scale)),
    )
    calls = (
        (tgl.group_quantize, (x, offs), {"format": "mxfp8"}),
        (tgl.group_quantize, (x, offs), {"format": "fp8_tensor"}),
        (tgl.group_dequantize, (turned, turned_scale, offs), {"format": "fp8_tensor", "columnwise": True, "rows": 64}),
        (tgl.group_requantize, (data, scale, offs), {"format": "fp8_tensor"}),
        (tgl.grouped_gemm_scaled, (data, scale, weights, weight_scale, offs), {"format": "fp8_tensor"}),
        (tgl.grouped_gemm_scaled_wgrad, (turned, turned_scale) * 2 + (offs,), {"format": "fp8_tensor"}),
    )
    try:
        for op, args, keywords in calls:
            with pytest.raises(tgl.GraphCaptureError, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                op(*args, **keywords)
            tgl.warmup(op, *args, **keywords)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = op(*args, **keywords)
            graph.replay()
            torch.cuda.synchronize()
            wanted = op(*args, **keywords)
            pairs = [(result, wanted)] if isinstance(result, torch.Tensor) else zip(result, wanted)
            for ours, theirs in pairs:
                assert same_bytes(ours, theirs), op
    finally:
        cache.set_directory(before)
