"""``group_quantize`` besides rounding: buffers, the flag, row scales, sums; and dequantisation."""

import math

import numpy as np
import pytest
import torch

import tgl
from tests.memory import raw, same_bytes
from tests.quantize.comparing import ELEMENTS, spread
from tests.quantize.reference import blocked_offset
from tgl.backends.cpu.quantize import _rows
from tgl.testing import ROUTINGS

R = ROUTINGS["above_tile"]
OFFS = R.ends()
FORMATS = ("mxfp8", "fp8_tensor", "fp8_block")
CALLS = [(f, {}) for f in FORMATS] + [("mxfp8", {"scale_layout": "blocked", "dbias": True})]


def same(one, other):
    return all(same_bytes(a, b) for a, b in zip(one, other))


def garbage(components):
    for t in components:
        raw(t).fill_(0x5B)
    return components


# --- out --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format, options", CALLS)
def test_in_place_gives_the_same_bytes_in_the_same_memory(format, options):
    x = spread(R.rows, 40)
    want = tgl.group_quantize(x, OFFS, format=format, **options)
    out = garbage(tgl.Components(*(torch.empty_like(t) for t in want)))
    addresses = [t.data_ptr() for t in out]
    assert tgl.group_quantize(x, OFFS, format=format, **options, out=out) is out
    assert [t.data_ptr() for t in out] == addresses
    assert same(out, want)


@pytest.mark.parametrize("format, options", CALLS)
@pytest.mark.parametrize("flag", [torch.ones(1), torch.tensor(2.5), torch.tensor([True]), torch.tensor(True)], ids=str)
def test_noop_writes_nothing(format, options, flag):
    x = spread(R.rows, 40)
    out = garbage(tgl.group_quantize(x, OFFS, format=format, **options))
    before = [t.clone() for t in out]
    tgl.group_quantize(x, OFFS, noop=flag, format=format, **options, out=out)
    assert same(out, before)
    tgl.group_quantize(x, OFFS, noop=torch.zeros_like(flag), format=format, **options, out=out)
    assert same(out, tgl.group_quantize(x, OFFS, format=format, **options))


# --- float32 scales of rows -------------------------------------------------------------------------------------------


def test_scales_of_rows_lie_by_columns():
    made = tgl.group_quantize(spread(R.rows, 300), OFFS, format="fp8_block")
    assert made.scale.shape == (R.rows, 3)
    assert made.scale.stride() == (1, R.rows)


@pytest.mark.parametrize("lying", [torch.Tensor.contiguous, lambda t: torch.stack([t, t], -1)[..., 1]])
def test_scales_of_rows_are_read_as_they_lie(lying):
    made = tgl.group_quantize(spread(R.rows, 300), OFFS, format="fp8_block")
    weight = tgl.group_quantize(spread(len(OFFS), 40, 300), None, format="fp8_block", block_2d=True)
    for call in (
        lambda scale: tgl.group_dequantize(made.data, scale, OFFS, format="fp8_block"),
        lambda scale: tgl.group_requantize(made.data, scale, OFFS, format="fp8_block")[0],
        lambda scale: tgl.grouped_gemm_scaled(made.data, scale, weight.data, weight.scale, OFFS, format="fp8_block"),
    ):
        assert same_bytes(call(lying(made.scale)), call(made.scale))


def test_scales_of_rows_are_written_by_columns_alone():
    x = spread(R.rows, 300)
    out = tgl.group_quantize(x, OFFS, format="fp8_block")
    out = garbage(out._replace(scale=out.scale.contiguous()))
    before = [t.clone() for t in out]
    message = rf"`out_scale` must be of strides \(1, {R.rows}\), as `scale` comes out, but got strides \(3, 1\)"
    with pytest.raises(ValueError, match=message):
        tgl.group_quantize(x, OFFS, format="fp8_block", out=out)
    assert same(out, before)


# --- row_scale and dbias ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_row_scale_multiplies_and_rounds_first(format, dtype, wide):
    x = spread(R.rows, 70, dtype=dtype, width=3)
    p = torch.rand(R.rows, dtype=torch.float32 if wide else dtype)
    p[R.routed :] = torch.nan
    scaled = (x.float() * p.float()[:, None]).to(dtype)
    want = tgl.group_quantize(scaled, OFFS, format=format)
    assert same(tgl.group_quantize(x, OFFS, row_scale=p, format=format), want)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_dbias_is_grouped_dbias_of_what_is_quantised(routing):
    r = ROUTINGS[routing]
    x = torch.randn(r.rows, 33).bfloat16()
    x[r.routed :] = torch.nan
    found = tgl.group_quantize(x, r.ends(), format="mxfp8", columnwise=False, dbias=True).dbias
    assert torch.equal(found, tgl.grouped_dbias(x, r.ends()))
    p, x = torch.randint(-2, 3, (r.rows,)).float(), torch.randint(-4, 5, (r.rows, 33)).bfloat16()
    found = tgl.group_quantize(x, r.ends(), row_scale=p, format="mxfp8", rowwise=False, dbias=True).dbias
    assert torch.equal(found, tgl.grouped_dbias(x.float() * p[:, None], r.ends()))


# --- reading back -----------------------------------------------------------------------------------------------------


def decoded(bytes_, dtype):
    """Values of FP8 bytes by the reference's list."""
    values = ELEMENTS[dtype].values
    positive = np.array(values + [math.nan] * (128 - len(values)))
    if dtype == torch.float8_e5m2:
        positive[0x7C] = math.inf
    return np.concatenate([positive, -positive])[bytes_]


def test_mxfp8_reads_back_as_element_times_power():
    """All elements under all scales, compact and blocked, in both directions."""
    for dtype in ELEMENTS:
        elements = torch.arange(256, dtype=torch.uint8).repeat_interleave(32)[None].expand(256, -1).contiguous()
        scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 256).contiguous()
        powers = np.where(np.arange(256) == 255, np.nan, 2.0 ** (np.arange(256.0) - 127))
        want = torch.from_numpy(decoded(elements.numpy(), dtype) * powers[:, None]).float()
        offs = torch.tensor([256], dtype=torch.int32)
        data = elements.view(dtype)
        read = dict(format="mxfp8", out_dtype=torch.float32)
        torch.testing.assert_close(
            tgl.group_dequantize(data, scale, offs, **read), want, rtol=0, atol=0, equal_nan=True
        )
        blocked = torch.zeros(2 * 64 * 512, dtype=torch.uint8)
        y, x = torch.arange(256)[:, None], torch.arange(256)
        blocked[blocked_offset(y.numpy(), x.numpy(), 256)] = scale
        found = tgl.group_dequantize(data, blocked, offs, scale_layout="blocked", **read)
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("format, options", [*CALLS[:3], ("mxfp8", {"scale_layout": "blocked"})])
def test_reads_back_what_it_wrote(format, options, columnwise, out_dtype):
    """Within half a step of E4M3 (2^-4 of the value, less than 1e-4 at its least), and one rounding to the output."""
    x = torch.randn(R.rows, 300)
    x[R.routed :] = torch.nan
    parts = tgl.group_quantize(x, OFFS, format=format, **options)
    data, scale, _ = parts[3:6] if columnwise else parts[:3]
    rows = R.rows if columnwise and format != "mxfp8" else None

    def read(dtype):
        return tgl.group_dequantize(
            data, scale, OFFS, format=format, columnwise=columnwise, rows=rows, out_dtype=dtype, **options
        )

    wide, found = read(torch.float32), read(out_dtype)
    assert found.dtype == (out_dtype or torch.bfloat16)
    assert torch.equal(found, wide.to(found.dtype))
    assert not wide[R.routed :].any()
    torch.testing.assert_close(wide[: R.routed], x[: R.routed], rtol=1 / 16, atol=1e-4)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("format, options", [*CALLS[:3], ("fp8_block", {"block_2d": True})])
@pytest.mark.parametrize("shape", [(3, 40, 70), (2, 130, 257), (300, 2, 4)], ids=str)
def test_matrices_read_back(shape, format, options, columnwise):
    x = torch.randn(shape)
    parts = tgl.group_quantize(x, None, format=format, **options)
    data, scale, _ = parts[3:6] if columnwise else parts[:3]
    found = tgl.group_dequantize(
        data, scale, None, format=format, columnwise=columnwise, out_dtype=torch.float32, **options
    )
    torch.testing.assert_close(found, x, rtol=1 / 16, atol=1e-4)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("format, options", [*CALLS[:3], ("mxfp8", {"scale_layout": "blocked"})])
def test_requantise_is_quantise_of_what_is_read_back(format, options, routing):
    r = ROUTINGS[routing]
    parts = tgl.group_quantize(spread(r.rows, 40), r.ends(), format=format, **options)
    values = tgl.group_dequantize(parts.data, parts.scale, r.ends(), format=format, out_dtype=torch.float32, **options)
    want = tgl.group_quantize(values, r.ends(), format=format, rowwise=False, **options)
    found = tgl.group_requantize(parts.data, parts.scale, r.ends(), format=format, **options)
    assert same(found, want[3:6])


def test_requantise_of_matrices_to_another_element():
    x = torch.randn(3, 40, 70)
    parts = tgl.group_quantize(x, None, format="fp8_block", block_2d=True)
    options = {"format": "fp8_block", "block_2d": True}
    values = tgl.group_dequantize(parts.data, parts.scale, None, out_dtype=torch.float32, **options)
    want = tgl.group_quantize(values, None, rowwise=False, dtype=torch.float8_e5m2, power_of_two=False, **options)
    found = tgl.group_requantize(parts.data, parts.scale, None, dtype=torch.float8_e5m2, power_of_two=False, **options)
    assert same(found, want[3:6])


def test_bad_offsets_stay_in_bounds():
    """Descending, negative and too large ends give numbers, wrong ones perhaps, and write nowhere else."""
    x = torch.randn(20, 40)
    for ends in ((25, 30, 99), (7, 3, 12), (-5, 40, -1), (2**31 - 1, -(2**31), 5)):
        offs = torch.tensor(ends, dtype=torch.int32)
        for format in FORMATS:
            parts = tgl.group_quantize(x, offs, format=format, dbias=True)
            tgl.group_dequantize(parts.data, parts.scale, offs, format=format)
            with tgl.debug_checks(), pytest.raises(ValueError, match="tgl::group_quantize: `offs` must"):
                tgl.group_quantize(x, offs, format=format)


def test_no_input_may_require_grad():
    x = torch.randn(R.rows, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"group_quantize: has no derivative.*`x` does; tgl\.quantize makes"):
        tgl.group_quantize(x, OFFS, format="mxfp8")
    with torch.no_grad():
        parts = tgl.group_quantize(x, OFFS, format="fp8_tensor")
        with torch.enable_grad(), pytest.raises(RuntimeError, match=r"writes into .*tgl\.quantize makes"):
            tgl.group_quantize(x, OFFS, format="fp8_tensor", out=parts)
    scale = parts.scale.requires_grad_()
    with pytest.raises(RuntimeError, match=r"group_dequantize: has no derivative.*`scale` does"):
        tgl.group_dequantize(parts.data, scale, OFFS, format="fp8_tensor")
    with pytest.raises(RuntimeError, match=r"group_requantize: has no derivative.*`scale` does"):
        tgl.group_requantize(parts.data, scale, OFFS, format="fp8_tensor")


@pytest.mark.parametrize("width", [1, 3, 10, 100])
@pytest.mark.parametrize("count, unit", [(0, 3), (7, 1), (1, 20), (6, 20), (50, 2)])
def test_steps_are_small_and_respect_matrices(count, unit, width, monkeypatch):
    """Every row once, no more than a step (or one row) at a time, and no part of one matrix beside another."""
    monkeypatch.setattr(_rows, "_STEP", 60)
    ranges = list(_rows.aligned_steps(count * unit, width, unit))
    assert [row for first, last in ranges for row in range(first, last)] == list(range(count * unit))
    for first, last in ranges:
        assert (last - first) * width <= max(60, width)
        assert first // unit == (last - 1) // unit or first % unit == last % unit == 0
