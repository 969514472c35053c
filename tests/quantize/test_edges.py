"""Edges of quantisation: zeros, subnormals, the largest values, Inf and NaN, amaxes next to powers of two."""

import numpy as np
import pytest
import torch

import tgl
from tests.quantize.comparing import DTYPES, check, spread
from tests.quantize.reference import E4M3, E5M2
from tgl.meta.formats import FORMATS

OFFS = torch.tensor([32], dtype=torch.int32)
TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
SMALLEST_NORMAL, SMALLEST = 2.0**-126, 2.0**-149
FLT_MAX = torch.finfo(torch.float32).max


def block(*values, dtype=torch.float32):
    """A 32 x 32 tile whose first row and first column hold the values, zeros elsewhere."""
    x = torch.zeros(32, 32, dtype=dtype)
    for i, value in enumerate(values):
        x[0, i] = x[i, 0] = value
    return x


def mx(x, **options):
    """Scale and element bytes of the first block in either direction, which must agree."""
    components = check(x, OFFS, "mxfp8", **options)
    rows = components.scale[0, 0], components.data.view(torch.uint8)[0, :3]
    columns = components.columnwise_scale[0, 0], components.columnwise_data.view(torch.uint8)[:3, 0]
    assert rows[0] == columns[0]
    assert torch.equal(rows[1], columns[1])
    return [int(rows[0]), *rows[1].tolist()]


RCEIL, FLOOR, EVEN = ({"scaling": s} for s in ("rceil", "floor", "even"))


@pytest.mark.parametrize(
    "values, options, expected",
    [
        *[((0.0, -0.0), o, [0, 0x00, 0x80]) for o in (RCEIL, FLOOR, EVEN)],
        *[((SMALLEST_NORMAL,), o, [0, 0x40]) for o in (RCEIL, FLOOR, EVEN)],
        *[((SMALLEST, -SMALLEST), o, [0, 0x00, 0x80]) for o in (RCEIL, FLOOR, EVEN)],
        *[((1.0, torch.inf, -2.0), o, [255, 0x7F, 0x7F, 0x7F]) for o in (RCEIL, FLOOR, EVEN)],
        *[((1.0, torch.nan, -2.0), o, [255, 0x7F, 0x7F, 0x7F]) for o in (RCEIL, FLOOR, EVEN)],
        *[((448.0, -448.0), o, [127, 0x7E, 0xFE]) for o in (RCEIL, FLOOR, EVEN)],
        ((FLT_MAX,), FLOOR, [246, 0x7E]),
        ((FLT_MAX,), RCEIL, [247, 0x78]),
        ((FLT_MAX,), EVEN, [247, 0x78]),
        ((480.0,), FLOOR, [127, 0x7E]),
        ((480.0,), RCEIL, [128, 0x77]),
        ((448.0, 2.0**-20, -(2.0**-20)), RCEIL, [127, 0x7E, 0x00, 0x80]),
    ],
)
def test_mxfp8(values, options, expected):
    assert mx(block(*values), **options)[: len(expected)] == expected


@pytest.mark.parametrize("negative", [False, True])
def test_both_signs_of_nan_give_one_byte(negative):
    nan = torch.tensor(0xFFC00001 - (1 << 32) if negative else 0x7F800001, dtype=torch.int32).view(torch.float32)
    x = block(1.0)
    x[0, 1] = x[1, 0] = nan
    assert mx(x, **RCEIL) == [255, 0x7F, 0x7F, 0x7F]
    for format, scale in (("fp8_tensor", None), ("fp8_tensor", torch.ones(1)), ("fp8_block", None)):
        given = {} if scale is None else {"scale": scale}
        components = check(x, OFFS, format, **given)
        assert int(components.data.view(torch.uint8)[0, 1]) == 0x7F
        assert int(components.columnwise_data.view(torch.uint8)[0, 1]) == 0x7F


def near(center, exponents, ulps=8):
    """float32 within 8 units in the last place of ``center * 2^k``."""
    centers = torch.tensor([center * 2.0**k for k in exponents], dtype=torch.float32)
    bits = centers.view(torch.int32)[:, None] + torch.arange(-ulps, ulps + 1, dtype=torch.int32)
    return bits.flatten().view(torch.float32)


@pytest.mark.parametrize("scaling", ["rceil", "floor", "even"])
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("center", ["max", "power"])
def test_amaxes_next_to_where_the_mxfp8_scale_changes(center, element, scaling):
    last = 127 - element.max_exponent
    amaxes = near(element.max if center == "max" else 1.0, range(-120, last))
    check_alone(amaxes, "mxfp8", scaling=scaling, dtype=TORCH[element])


def check_alone(amaxes, format, **options):
    """Blocks of one element: rowwise in a matrix of one column, columnwise in one of one row."""
    amaxes = amaxes * torch.where(torch.arange(len(amaxes)) % 2 == 0, 1.0, -1.0)
    check(amaxes[:, None], torch.tensor([len(amaxes)], dtype=torch.int32), format, **options)
    check(amaxes[None], torch.tensor([1], dtype=torch.int32), format, **options)


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_amaxes_next_to_where_a_power_of_two_scale_changes(power_of_two, element):
    amaxes = near(element.max, range(-126 - element.max_exponent, 127 - element.max_exponent))
    check_alone(amaxes, "fp8_block", power_of_two=power_of_two, dtype=TORCH[element])


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_every_element_and_every_tie(element):
    """All values, the midpoints between neighbours and what lies just beside them, scaled by 1."""
    values = np.array(element.values)
    middles = (values[1:] + values[:-1]) / 2
    beside = [np.nextafter(middles.astype(np.float32), np.float32(to)) for to in (0, np.inf)]
    positive = np.concatenate([values, middles, *beside]).astype(np.float32)
    x = torch.from_numpy(np.concatenate([positive, -positive]))[:, None]
    offs = torch.tensor([len(x)], dtype=torch.int32)
    check(x, offs, "fp8_tensor", scale=torch.ones(1), dtype=TORCH[element])


def test_delayed_scaling_saturates():
    x = torch.tensor([[1000.0, -1000.0, torch.inf, -torch.inf, 464.0, 1e-9]])
    offs = torch.tensor([1], dtype=torch.int32)
    for dtype, largest in ((torch.float8_e4m3fn, 0x7E), (torch.float8_e5m2, 0x7B)):
        components = check(x * 128, offs, "fp8_tensor", scale=torch.ones(1), dtype=dtype)
        assert components.data.view(torch.uint8)[0, :4].tolist() == [largest, largest + 128] * 2
        assert components.amax.item() == torch.inf


@pytest.mark.parametrize("amax", [0.0, SMALLEST, 2.0**-140, SMALLEST_NORMAL, 1e-38, FLT_MAX, torch.inf, torch.nan])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_scales_at_the_ends(amax, power_of_two):
    x = torch.zeros(5, 3)
    x[2, 1] = amax
    offs = torch.tensor([2, 5], dtype=torch.int32)
    for format in ("fp8_tensor", "fp8_block"):
        for eps in (0.0, 2.0**-130):
            check(x, offs, format, power_of_two=power_of_two, eps=eps)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format", ["mxfp8", "fp8_tensor", "fp8_block"])
def test_inf_and_nan_stay_in_their_block(format, bad):
    """Read back, exactly the elements that share a scale with the bad one are NaN; all others are as without it."""
    sizes, columns = (40, 0, 130, 3), 300
    offs = torch.tensor(sizes).cumsum(0).int()
    x = spread(180, columns, width=3)
    x[173:] = torch.nan
    row, column = 140, 150
    spoiled = x.clone()
    spoiled[row, column] = bad
    # The group begins at row 40, so its row 100 is in rows 96 ... 127 or 0 ... 127 of it.
    own = {
        ("mxfp8", False): (slice(140, 141), slice(128, 160)),
        ("mxfp8", True): (slice(136, 168), slice(150, 151)),
        ("fp8_tensor", False): (slice(40, 170), slice(0, columns)),
        ("fp8_tensor", True): (slice(40, 170), slice(0, columns)),
        ("fp8_block", False): (slice(140, 141), slice(128, 256)),
        ("fp8_block", True): (slice(40, 168), slice(150, 151)),
    }
    clean, dirty = (tgl.group_quantize(t, offs, format=format) for t in (x, spoiled))
    for columnwise in (False, True):
        parts = slice(3, 5) if columnwise else slice(0, 2)
        rows = 180 if columnwise and format != "mxfp8" else None
        before, after = (
            tgl.group_dequantize(
                *c[parts], offs, format=format, columnwise=columnwise, rows=rows, out_dtype=torch.float32
            )
            for c in (clean, dirty)
        )
        expected = before.clone()
        expected[own[format, columnwise]] = torch.nan
        torch.testing.assert_close(after, expected, rtol=0, atol=0, equal_nan=True)
        assert not before.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["mxfp8", "fp8_tensor", "fp8_block"])
def test_the_largest_and_smallest_of_every_source(format, dtype):
    info = torch.finfo(dtype)
    x = torch.zeros(4, 128, dtype=dtype)
    x[0, :3] = torch.tensor([info.max, -info.max, info.smallest_normal])
    x[1, :2] = torch.tensor([info.smallest_normal, -info.smallest_normal])
    smallest = info.smallest_normal * info.eps
    x[2, :2] = torch.tensor([smallest, -smallest])
    check(x, torch.tensor([1, 2, 3, 4], dtype=torch.int32), format)


@pytest.mark.parametrize("format", FORMATS)
def test_no_columns(format):
    """Tensors without columns have the shapes of the fake implementation, also of matrices."""
    for x, offs in ((torch.randn(4, 0), torch.tensor([2, 4], dtype=torch.int32)), (torch.randn(2, 32, 0), None)):
        made = tgl.group_quantize(x, offs, format=format)
        wanted = tgl.group_quantize(x.to("meta"), None if offs is None else offs.to("meta"), format=format)
        assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in wanted]


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_back_to_no_columns(format, columnwise):
    description = FORMATS[format]
    for x, offs in ((torch.randn(4, 0), torch.tensor([2, 4], dtype=torch.int32)), (torch.randn(2, 32, 0), None)):
        made = tgl.group_quantize(x, offs, format=format)
        data, scale, amax = made.data, made.scale, made.amax
        if columnwise:
            data, scale, amax = made.columnwise_data, made.columnwise_scale, made.columnwise_amax
        options = {"rows": len(x)} if offs is not None and columnwise and description.transposed_columnwise else {}
        amax = amax if description.decodes_with_amax else None
        back = tgl.group_dequantize(data, scale, offs, amax, format=format, columnwise=columnwise, **options)
        assert back.shape == x.shape
