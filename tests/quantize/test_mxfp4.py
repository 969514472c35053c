"""MXFP4: every byte against loops over ``ml_dtypes``, the bytes of gpt-oss, and the steps of aten that serve GPUs."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tests.covers import covering, form
from tests.memory import same_bytes
from tests.quantize.comparing import DTYPES, check, spread
from tests.quantize.reference import E2M1
from tgl import backends
from tgl.backends.composite import quantize_steps
from tgl.testing import ROUTINGS, sample_inputs

CASES = [{}, {"scaling": "floor", "scale_layout": "blocked"}, {"scaling": "even"}]
IDS = ["-".join(o.values()) or "default" for o in CASES]
SCALINGS = ("rceil", "floor", "even")


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("options", CASES, ids=IDS)
def test_every_routing(options, routing):
    r = ROUTINGS[routing]
    x = spread(r.rows, 40, seed=len(routing))
    x[r.routed :] = math.nan
    check(x, r.ends(), "mxfp4", **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [2, 32, 34, 130])
@pytest.mark.parametrize("options", CASES, ids=IDS)
def test_every_width_and_source(options, columns, dtype):
    x = spread(10, columns, dtype=dtype, seed=columns, width=6)
    check(x, torch.tensor([4, 4, 9], dtype=torch.int32), "mxfp4", **options)


@pytest.mark.parametrize("shape", [(2, 34, 40), (3, 128, 32), (1, 2, 2), (0, 4, 4), (40, 2, 6)], ids=str)
@pytest.mark.parametrize("options", CASES, ids=IDS)
def test_matrices(options, shape):
    check(spread(*shape), None, "mxfp4", **options)


FLT_MAX, SMALLEST = torch.finfo(torch.float32).max, 2.0**-149


@pytest.mark.parametrize(
    "values, scaling, expected",
    [
        *[((0.0, -0.0), s, [0, 0x0, 0x8]) for s in SCALINGS],
        *[((SMALLEST, -SMALLEST), s, [0, 0x0, 0x8]) for s in SCALINGS],
        *[((1.0, math.inf, -2.0), s, [255, 0x7, 0x7, 0x7]) for s in SCALINGS],
        *[((1.0, math.nan, -2.0), s, [255, 0x7, 0x7, 0x7]) for s in SCALINGS],
        *[((6.0, -6.0, 0.25, 0.75, 2.5), s, [127, 0x7, 0xF, 0x0, 0x2, 0x4]) for s in SCALINGS],
        ((7.0,), "floor", [127, 0x7]),
        ((7.0,), "even", [128, 0x6]),
        ((7.0,), "rceil", [128, 0x6]),
        ((FLT_MAX,), "floor", [252, 0x7]),
        ((FLT_MAX,), "even", [253, 0x6]),
        ((FLT_MAX,), "rceil", [253, 0x6]),
    ],
)
def test_edges(values, scaling, expected):
    """Scale byte and codes of the first block of a row."""
    x = torch.zeros(2, 32)
    x[0, : len(values)] = torch.tensor(values)
    made = check(x, torch.tensor([2], dtype=torch.int32), "mxfp4", scaling=scaling)
    pairs = made.data[0].tolist()
    codes = [code for pair in pairs for code in (pair & 15, pair >> 4)]
    assert [int(made.scale[0, 0]), *codes][: len(expected)] == expected


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("center", [E2M1.max, 1.0])
def test_amaxes_next_to_where_the_scale_changes(center, scaling):
    centers = torch.tensor([center * 2.0**k for k in range(-120, 125)], dtype=torch.float32)
    bits = centers.view(torch.int32)[:, None] + torch.arange(-8, 9, dtype=torch.int32)
    amaxes = bits.flatten().view(torch.float32)
    x = torch.stack([amaxes, torch.zeros_like(amaxes)], 1)
    check(x, torch.tensor([len(x)], dtype=torch.int32), "mxfp4", scaling=scaling)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("blocked", [False, True], ids=["compact", "blocked"])
def test_reads_back_as_element_times_power(columnwise, blocked):
    """All elements under all scales: float32 products, infinite beyond its range."""
    layout = "blocked" if blocked else "compact"
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    data = (codes[::2] | codes[1::2] << 4).expand(1, 256, 16).contiguous()
    scale = torch.arange(256, dtype=torch.uint8)[None, :, None].contiguous()
    given = tgl.to_blocked_scale(scale, None, shape=(1, 256, 32), format="mxfp4") if blocked else scale
    options = {"format": "mxfp4", "scale_layout": layout, "out_dtype": torch.float32}
    found = tgl.group_dequantize(data, given, None, columnwise=columnwise, **options)[0]
    found = found.t() if columnwise else found
    elements = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    powers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    wanted = torch.from_numpy(np.tile(elements, 2) * powers[:, None]).float()
    assert torch.equal(found.nan_to_num(123.0), wanted.nan_to_num(123.0))


def test_the_layout_of_gpt_oss():
    """Components of ``_blocks`` and ``_scales`` decode to the values that transformers decodes, without a copy."""
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 6, 2), dtype=torch.uint8, generator=generator)
    data, scale = tgl.nn.layouts.mxfp4_from_gpt_oss(blocks, scales)
    assert (data.data_ptr(), scale.data_ptr()) == (blocks.data_ptr(), scales.data_ptr())
    ours = tgl.group_dequantize(data, scale, format="mxfp4")
    assert torch.equal(ours, convert(blocks, scales, dtype=torch.bfloat16).transpose(1, 2))
    for back, given in zip(tgl.nn.layouts.mxfp4_to_gpt_oss(data, scale), (blocks, scales)):
        assert torch.equal(back, given)


@pytest.mark.parametrize(
    "blocks, scales, message",
    [
        ((3, 6, 2, 8), (3, 6, 2), r"`blocks` must be \[G, N, K / 32, 16\]"),
        ((3, 6, 2, 16), (3, 6, 3), r"`scales` must be \[G, N, K / 32\] = \(3, 6, 2\)"),
    ],
)
def test_other_layouts_are_refused(blocks, scales, message):
    with pytest.raises(ValueError, match=message):
        tgl.nn.layouts.mxfp4_from_gpt_oss(*(torch.zeros(s, dtype=torch.uint8) for s in (blocks, scales)))


# --- by steps of aten -------------------------------------------------------------------------------------------------


def calls():
    """Return the arguments that an implementation gets, with their samples."""
    for sample in sample_inputs("group_quantize"):
        if sample.options["format"] == "mxfp4":
            yield sample, *backends.registry.described["group_quantize"](**sample.tensors(), **sample.options)[1:]


def test_steps_give_the_bytes_of_the_cpu():
    for sample, args, options in calls():
        out = tgl.Components(*(torch.full_like(t, 0x5B, device="cpu") for t in options["out"]))
        quantize_steps.run(*args, **{**options, "out": out})
        wanted = tgl.group_quantize(**sample.tensors(), **sample.options)
        for name, have, want in zip(out._fields, out, wanted):
            assert same_bytes(have, want), (sample.name, name)


@pytest.mark.parametrize("blocked", [False, True], ids=["compact", "blocked"])
@pytest.mark.parametrize("shape, ends", [((214, 40), (5, 5, 140, 206)), ((3, 34, 70), None), ((0, 40), (0, 0))])
def test_steps_of_broken_blocks_and_flags(shape, ends, blocked):
    x = spread(*shape, seed=7)
    if x.numel():
        x.view(-1)[5], x.view(-1)[-100] = math.inf, math.nan
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    options = {"format": "mxfp4", "scale_layout": "blocked" if blocked else "compact", "scaling": "even"}
    wanted = tgl.group_quantize(x, offs, **options)
    _, args, given = backends.registry.described["group_quantize"](x, offs, **options)
    for flag in (None, torch.tensor(False), torch.tensor([1.0])):
        out = tgl.Components(*(torch.full_like(t, 3) for t in wanted))
        quantize_steps.run(*args[:5], flag, **{**given, "out": out})
        stops = flag is not None and bool(flag)
        for have, want in zip(out, wanted):
            assert same_bytes(have, torch.full_like(want, 3) if stops else want)


def pairs():
    """``calls`` that hold every pair of values; of routings any, since no numbers are read."""
    return covering(list(calls()), lambda call: form(call[0]))


@pytest.mark.parametrize("samples", [pairs, pytest.param(calls, marks=pytest.mark.slow)])
def test_steps_read_nothing_on_the_host(samples):
    for _, args, options in samples():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # constants of the arithmetic
            fakes = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in args]
            tables = {name: mode.from_tensor(options[name]) for name in ("slots", "rows") if name in options}
            out = tgl.Components(*(torch.empty(t.shape, dtype=t.dtype) for t in options["out"]))
            if not options["options"].dbias:
                quantize_steps.run(*fakes, **{**options, **tables, "out": out})


def test_steps_serve_no_other_format():
    for name in ("mxfp8", "nvfp4", "fp8_block"):
        _, args, options = backends.registry.described["group_quantize"](torch.ones(2, 64, 64), None, format=name)
        reason = quantize_steps.supports(*args, **options)
        assert reason == f"quantises to E2M1 elements with E8M0 scales, got {name}"
