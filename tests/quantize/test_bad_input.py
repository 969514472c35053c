"""Bad arguments of the quantising ops: one error that names the argument, eager, faked and compiled."""

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import tgl
from tests.memory import same_bytes

X, W = torch.randn(9, 64), torch.randn(3, 40, 64)
OFFS = torch.tensor([4, 4, 7], dtype=torch.int32)
SCALE, P, RNG = torch.ones(3), torch.ones(9), torch.tensor([1, 2])
E4M3 = torch.float8_e4m3fn


def quantize(x=X, offs=OFFS, scale=None, row_scale=None, rng=None, **options):
    return tgl.group_quantize, (x, offs, scale, row_scale, rng), {"format": "mxfp8", **options}


def tensor(**given):
    return quantize(format="fp8_tensor", **given)


def block(**given):
    return quantize(format="fp8_block", **given)


def nvfp4(**given):
    return quantize(format="nvfp4", **given)


COMPONENTS = {
    (format, grouped): tgl.group_quantize(X if grouped else W, OFFS if grouped else None, format=format)
    for format in ("mxfp8", "fp8_tensor", "fp8_block")
    for grouped in (True, False)
}


def dequantize(data=None, scale=None, offs=OFFS, amax=None, *, format="mxfp8", columnwise=False, **options):
    parts = COMPONENTS[format, offs is not None][3 if columnwise else 0 :]
    data = parts[0] if data is None else data
    scale = parts[1] if scale is None else scale
    return tgl.group_dequantize, (data, scale, offs, amax), {"format": format, "columnwise": columnwise, **options}


def requantize(**options):
    parts = COMPONENTS["mxfp8", True]
    return tgl.group_requantize, (parts.data, parts.scale, OFFS), {"format": "mxfp8", **options}


def into(format="mxfp8", noop=None, **changed):
    parts = COMPONENTS[format, True]
    out = parts._replace(**{name: change(getattr(parts, name)) for name, change in changed.items()})
    return tgl.group_quantize, (X, OFFS, None, None, None, noop), {"format": format, "out": out}


def misaligned(t):
    return (
        torch.zeros(t.numel() * t.element_size() + 16, dtype=torch.uint8)[1:][: t.numel()].view(t.dtype).view(t.shape)
    )


def strided(t):
    return torch.stack([t, t], -1)[..., 0]


def meta(t):
    return t.to("meta")


QUANTIZE = [
    (quantize(x=X[0]), ValueError, r"`x` must be 2-D \[T, K\] when `offs` is given, but got shape \(64,\)"),
    (quantize(x=W), ValueError, r"`x` must be 2-D \[T, K\] when `offs` is given"),
    (quantize(offs=None), ValueError, r"`x` must be 3-D \[G, N, K\] when `offs` is None, but got shape \(9, 64\)"),
    (quantize(x=X.double()), TypeError, "`x` must be float32, bfloat16 or float16, but got torch.float64"),
    (quantize(x=X.int()), TypeError, "`x` must be float32, bfloat16 or float16"),
    (quantize(offs=OFFS.long()), TypeError, r"`offs` must be int32 \(cumulative group ends\)"),
    (quantize(offs=OFFS[None]), ValueError, r"`offs` must be 1-D \[G\]"),
    (quantize(offs=meta(OFFS)), ValueError, "`offs` must be on cpu like `x`, but got meta"),
    (
        quantize(format="fp8"),
        ValueError,
        "`format` must be one of .*nvfp4, mxfp4, fp8_tensor, fp8_block, but got 'fp8'",
    ),
    (quantize(scaling="up"), ValueError, "`scaling` must be one of rceil, floor, even, but got 'up'"),
    (tensor(scaling="floor"), ValueError, r"`scaling` must be left .* fp8_tensor \(it is for mxfp8 and mxfp4\)"),
    (quantize(scale_layout="tiled"), ValueError, "`scale_layout` must be 'compact' or 'blocked' for mxfp8, but got 't"),
    (block(scale_layout="blocked"), ValueError, "`scale_layout` must be 'compact' for fp8_block, but got 'blocked'"),
    (quantize(dtype=torch.float16), TypeError, "`dtype` must be torch.float8_e4m3fn or torch.float8_e5m2 for mxfp8"),
    (nvfp4(dtype=E4M3), TypeError, "`dtype` must be torch.uint8 for nvfp4"),
    (quantize(rowwise=False, columnwise=False), ValueError, "`rowwise` must be True when `columnwise` is False"),
    (quantize(power_of_two=True), ValueError, "`power_of_two` must be left at its default for mxfp8"),
    (nvfp4(power_of_two=False), ValueError, "`power_of_two` must be left at its default for nvfp4"),
    (
        quantize(eps=1e-3),
        ValueError,
        r"`eps` must be left at its default for mxfp8 \(it is for fp8_tensor and fp8_block",
    ),
    (tensor(eps=-1.0), ValueError, "`eps` must be finite and not negative, but got -1.0"),
    (tensor(eps=float("nan")), ValueError, "`eps` must be finite and not negative"),
    (quantize(block_2d=True), ValueError, "`block_2d` must be left at its default for mxfp8"),
    (block(block_2d=True), ValueError, r"`block_2d` must be False when `offs` is given \(blocks would span groups\)"),
    (quantize(rht=True), ValueError, r"`rht` must be left at its default for mxfp8 \(it is for nvfp4\)"),
    (nvfp4(rht=True, columnwise=False), ValueError, "`rht` must be False without `columnwise`"),
    (nvfp4(x=W, offs=None, rht=True), ValueError, "`rht` must be False when `offs` is None"),
    (quantize(x=W, offs=None, dbias=True), ValueError, "`dbias` must be False when `offs` is None"),
    (nvfp4(x=X[:, :63]), ValueError, r"`x` must be \[..., K\] with an even K .*: pad it with a column of zeros"),
    (nvfp4(x=W[:, :39], offs=None), ValueError, r"`x` must be \[G, N, K\] with an even N .*: pad it with zeros"),
    (quantize(scale=SCALE), ValueError, r"`scale` must be left at its default for mxfp8 \(it is for fp8_tensor\)"),
    (tensor(scale=SCALE[1:]), ValueError, r"`scale` must be of shape \[G\] = \(3,\), but got shape \(2,\)"),
    (tensor(scale=SCALE.half()), TypeError, "`scale` must be torch.float32, but got torch.float16"),
    (tensor(scale=meta(SCALE)), ValueError, "`scale` must be on cpu like `x`"),
    (tensor(scale=torch.ones(6)[::2]), ValueError, "`scale` must be contiguous"),
    (tensor(scale=SCALE, eps=0.5), ValueError, "`scale` must be None when `eps` or `power_of_two` is given"),
    (tensor(scale=SCALE, power_of_two=True), ValueError, "`scale` must be None when `eps` or `power_of_two` is given"),
    (quantize(row_scale=P[1:]), ValueError, r"`row_scale` must be of shape \[T\] = \(9,\)"),
    (quantize(row_scale=P.half()), TypeError, "`row_scale` must be torch.float32, but got torch.float16"),
    (quantize(row_scale=meta(P)), ValueError, "`row_scale` must be on cpu like `x`"),
    (quantize(x=W, offs=None, row_scale=P), ValueError, "`row_scale` must be None when `offs` is None"),
    (quantize(rng=RNG), ValueError, r"`rng` must be left at its default for mxfp8 \(it is for nvfp4\)"),
    (nvfp4(rng=RNG[1:]), ValueError, r"`rng` must be of shape \[seed, offset\] = \(2,\)"),
    (nvfp4(rng=RNG.int()), TypeError, "`rng` must be torch.int64"),
]
READ = [
    (dequantize(format="fp8_tensor", offs=None, rows=9), ValueError, "`rows` must be None when `offs` is None"),
    (dequantize(columnwise=True, format="fp8_tensor"), ValueError, "`rows` must be the number of rows T of transposed"),
    (dequantize(rows=8), ValueError, "`rows` must be 9 like `data`, but got 8"),
    (
        dequantize(columnwise=True, format="fp8_block", rows=99),
        ValueError,
        r"`data` must be \(64, 192\), the shape of c",
    ),
    (dequantize(data=X), TypeError, "`data` must be torch.float8_e4m3fn or torch.float8_e5m2 for mxfp8"),
    (dequantize(data=W.to(E4M3)), ValueError, r"`data` must be 2-D \[T, K\] or \[K, Tp\] when `offs` is given"),
    (
        dequantize(scale=torch.zeros(9, 3).byte()),
        ValueError,
        r"`scale` must be \(9, 2\), the shape of compact mxfp8, but",
    ),
    (dequantize(scale_layout="blocked"), ValueError, r"`scale` must be \(1536,\), the shape of blocked mxfp8"),
    (dequantize(scale=torch.zeros(9, 2)), TypeError, "`scale` must be torch.uint8, but got torch.float32"),
    (dequantize(scale=torch.zeros(2, 9).byte().t()), ValueError, "`scale` must be contiguous"),
    (dequantize(scale=torch.zeros(9, 2, device="meta").byte()), ValueError, "`scale` must be on cpu like `data`"),
    (dequantize(offs=meta(OFFS)), ValueError, "`offs` must be on cpu like `data`"),
    (dequantize(amax=SCALE), ValueError, "`amax` must be None for mxfp8, but got a tensor"),
    (dequantize(out_dtype=torch.float64), TypeError, "`out_dtype` must be float32, bfloat16 or float16, but got"),
    (dequantize(format="fp8_block", block_2d=True), ValueError, "`block_2d` must be False when `offs` is given"),
    (dequantize(rht=True), ValueError, "`rht` must be "),
    (requantize(scaling="up"), ValueError, "`scaling` must be one of rceil"),
    (requantize(scale_layout="blocked"), ValueError, r"group_requantize: `scale` must be \(1536,\), the shape of bl"),
]
WRITE = [
    (into(data=lambda t: t[1:]), ValueError, r"`data` must be \(9, 64\), the shape of compact mxfp8, but got"),
    (into(scale=lambda t: t.float()), TypeError, "`out_scale` must be torch.uint8, but got torch.float32"),
    (into(data=lambda t: t.view(torch.uint8)), TypeError, "`data` must be torch.float8_e4m3fn, but got"),
    (into(columnwise_scale=strided), ValueError, "`columnwise_scale` must be contiguous, but got"),
    (
        into(dbias=lambda t: torch.zeros(3, 64)),
        ValueError,
        r"`out_dbias` must be \(0,\), the shape of compact mxfp8, but",
    ),
    (into(columnwise_data=meta), ValueError, "`columnwise_data` must be on cpu like `x`, but got meta"),
    (into(noop=torch.zeros(2)), ValueError, r"`noop` must be of shape \[\] or \[1\] = \(1,\), but got shape \(2,\)"),
    (into(noop=torch.zeros(1).int()), TypeError, "`noop` must be torch.float32 or torch.bool, but got torch.int32"),
    (into(noop=torch.zeros(1, device="meta")), ValueError, "`noop` must be on cpu like `x`"),
]
POINTERS = [
    (into(data=misaligned), ValueError, "`data` must be aligned to 16 bytes"),
    (
        into(columnwise_data=lambda t: COMPONENTS["mxfp8", True].data),
        ValueError,
        "`columnwise_data` must be disjoint f",
    ),
    (
        into(data=lambda t: X.view(torch.uint8).view(-1)[: t.numel()].view(t.dtype).view(t.shape)),
        ValueError,
        "`data` mu",
    ),
]


def names(cases):
    return [f"{i}-{message[:30]}" for i, (_, _, message) in enumerate(cases)]


EVERY = [*QUANTIZE, *READ, *WRITE]


@pytest.mark.parametrize("call, error, message", [*EVERY, *POINTERS], ids=names([*EVERY, *POINTERS]))
def test_eager(call, error, message):
    function, args, options = call
    before = [t.clone() for t in options["out"] if t.device.type == "cpu"] if "out" in options else []
    with pytest.raises(error, match=message):
        function(*args, **options)
    after = [t for t in options.get("out", ()) if t.device.type == "cpu"]
    for t, kept in zip(after, before):
        assert same_bytes(t, kept)


@pytest.mark.parametrize("call, error, message", EVERY, ids=names(EVERY))
def test_fake_raises_the_same(call, error, message):
    function, args, options = call
    with pytest.raises(error) as real:
        function(*args, **options)
    with FakeTensorMode() as mode:
        fakes = tree_map(lambda t: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t, (args, options))
        with pytest.raises(error) as fake:
            function(*fakes[0], **fakes[1])
    assert str(fake.value).splitlines()[0] == str(real.value).splitlines()[0]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("index", [0, 2, 9, 14, 28, 31, -27, -18, -9])
def test_compiled_carries_the_message(index):
    (function, args, options), error, message = EVERY[index]
    compiled = torch.compile(lambda *a, **o: function(*a, **o), backend="aot_eager", fullgraph=True)
    with pytest.raises((TorchRuntimeError, error), match=message):
        compiled(*args, **options)


def test_noop_needs_buffers():
    with pytest.raises(ValueError, match="`noop` must be None without `out`"):
        tgl.group_quantize(X, OFFS, noop=torch.ones(1), format="mxfp8")
