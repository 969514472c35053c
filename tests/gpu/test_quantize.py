"""Quantisation kernels on a device: the bytes of the CPU implementation, canaries intact, one graph for any routing."""

import pytest
import torch

import tgl
from tests.gpu.device import DEVICE, TAIL, ends, served
from tests.kernel_cases import ROUTINGS, framed_like, poisoned
from tests.memory import raw
from tests.quantize import drawn
from tgl import backends
from tgl.meta.components import Components

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SQUARES = (dict(format="fp8_block", block_2d=True), dict(format="nvfp4", block_2d=True, scale_layout="blocked"))
OPTIONS = {
    "blocked": dict(format="mxfp8", scale_layout="blocked"),
    "compact": dict(format="mxfp8"),
    "rowwise, floor": dict(format="mxfp8", columnwise=False, scaling="floor", scale_layout="blocked"),
    "columnwise, even": dict(format="mxfp8", rowwise=False, scaling="even", dtype=E5M2),
    "FP8 blocks": dict(format="fp8_block"),
    "FP8 blocks, any scale": dict(format="fp8_block", power_of_two=False, dtype=E5M2),
    "FP8 per group": dict(format="fp8_tensor"),
    "NVFP4, blocked": dict(format="nvfp4", scale_layout="blocked"),
    "NVFP4, compact": dict(format="nvfp4"),
}
TRANSFORMED = {
    "both": dict(format="nvfp4", rht=True, scale_layout="blocked"),
    "columnwise": dict(format="nvfp4", rht=True, rowwise=False),
}


def awkward(*shape, dtype=BF16):
    """Values of many exponents, some zeros, an Inf and a NaN."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-40, 40, shape).float())
    x[..., ::13] = 0.0
    if x.numel() > 50:
        x.view(-1)[7], x.view(-1)[50] = float("inf"), float("nan")
    return x.to(dtype)


def rows(sizes, columns, dtype=BF16):
    return poisoned(awkward(sum(sizes) + TAIL, columns, dtype=dtype), sizes)


def differing(ours, theirs):
    """Return the number of bytes of each component that differ."""
    pairs = zip(Components._fields, ours, theirs)
    counts = {name: (raw(a.cpu()) != raw(b)).sum().item() for name, a, b in pairs}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bytes(sizes, options):
    x = rows(sizes, 272)
    expected = tgl.group_quantize(x, ends(sizes).cpu(), **options)
    got = served(tgl.group_quantize, x.to(DEVICE), ends(sizes), **options)
    assert not differing(got, expected)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("scaling", ["rceil", "floor", "even"])
def test_sources(dtype, scaling):
    sizes = ROUTINGS["edges"]
    x = rows(sizes, 200, dtype)
    options = dict(format="mxfp8", scaling=scaling, scale_layout="blocked")
    expected = tgl.group_quantize(x, ends(sizes).cpu(), **options)
    assert not differing(served(tgl.group_quantize, x.to(DEVICE), ends(sizes), **options), expected)


@pytest.mark.parametrize("options", [*OPTIONS.values(), *SQUARES], ids=str)
def test_matrices(options):
    w = awkward(3, 224, 264)
    expected = tgl.group_quantize(w, None, **options)
    assert not differing(served(tgl.group_quantize, w.to(DEVICE), None, **options), expected)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("options", [OPTIONS["NVFP4, blocked"], *TRANSFORMED.values()], ids=str)
def test_nvfp4(options, seeded, dtype):
    """Transformed and not, rounded to nearest and stochastically."""
    sizes = ROUTINGS["edges"]
    x, rng = rows(sizes, 264, dtype), torch.tensor([2**40 + 3, -5]) if seeded else None
    with drawn.as_on(backends.device_arch(DEVICE), x, ends(sizes).cpu(), {"rng": rng}):
        expected = tgl.group_quantize(x, ends(sizes).cpu(), rng=rng, **options)
    rng = rng.to(DEVICE) if seeded else None
    assert not differing(served(tgl.group_quantize, x.to(DEVICE), ends(sizes), rng=rng, **options), expected)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_every_nvfp4_block(dtype):
    """Blocks of every magnitude beside one of 1, so that scales go from 0 to the largest and products to anything."""
    magnitudes = torch.exp2(torch.linspace(-24, 0, 2048))[:, None]
    x = (torch.rand(2048, 512) * 2 - 1) * magnitudes
    x[:, ::16] = magnitudes
    x, offs = x.to(dtype), ends((2048,))
    expected = tgl.group_quantize(x, offs.cpu(), format="nvfp4")
    assert not differing(served(tgl.group_quantize, x.to(DEVICE), offs, format="nvfp4"), expected)


def test_given_scales():
    sizes = ROUTINGS["edges"]
    x, scale = rows(sizes, 272), torch.rand(len(sizes)) * 100
    expected = tgl.group_quantize(x, ends(sizes).cpu(), scale, format="fp8_tensor")
    got = served(tgl.group_quantize, x.to(DEVICE), ends(sizes), scale.to(DEVICE), format="fp8_tensor")
    assert not differing(got, expected)


def test_wide_rows_and_canaries():
    """More columns than a block walks over, in buffers between canaries."""
    sizes = (300, 0, 517, 2)
    x = rows(sizes, 4104)
    expected = tgl.group_quantize(x, ends(sizes).cpu(), format="mxfp8", scale_layout="blocked")
    frame = framed_like(expected, DEVICE)
    out = Components(*frame.inside)
    tgl.group_quantize(x.to(DEVICE), ends(sizes), format="mxfp8", scale_layout="blocked", out=out)
    assert not differing(out, expected)
    assert frame.intact()


@pytest.mark.parametrize("name", ["blocked", "FP8 blocks", "FP8 per group", "NVFP4, blocked"])
def test_one_graph_for_any_routing(name):
    routings = [(100, 0, 300), (0, 400, 0), (133, 133, 134), (0, 0, 1)]
    x, offs = awkward(400, 384).to(DEVICE), ends(routings[0])
    options = OPTIONS[name]
    out = tgl.group_quantize(x, offs, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tgl.group_quantize(x, offs, **options, out=out)
    for sizes in routings:
        offs.copy_(ends(sizes))
        graph.replay()
        torch.cuda.synchronize()
        assert not differing(out, tgl.group_quantize(x.cpu(), offs.cpu(), **options))


def test_two_streams_at_once():
    """Scales per group wait for other blocks of their launch: with those of another launch between them, too."""
    sizes = (700, 0, 2900, 1, 3000)
    inputs = [rows(sizes, 2048).to(DEVICE) for _ in range(2)]
    expected = [tgl.group_quantize(x, ends(sizes), format="fp8_tensor") for x in inputs]
    out = [Components(*(torch.empty_like(t) for t in e)) for e in expected]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        for x, o, stream in zip(inputs, out, streams):
            with torch.cuda.stream(stream):
                tgl.group_quantize(x, ends(sizes), format="fp8_tensor", out=o)
    torch.cuda.synchronize()
    for o, e in zip(out, expected):
        assert not differing(o, [t.cpu().view(torch.uint8) for t in e])
