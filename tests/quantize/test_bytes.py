"""Every byte of every component, against a reference that quantises one element at a time."""

import pytest
import torch

import tgl
from tests.quantize.comparing import DTYPES, check, spread
from tgl.backends.cpu.quantize import _rows
from tgl.meta.formats import FORMATS
from tgl.testing import ROUTINGS

E5M2 = torch.float8_e5m2
CASES = [
    ("mxfp8", {}),
    ("mxfp8", {"scaling": "floor", "scale_layout": "blocked"}),
    ("mxfp8", {"scaling": "even", "dtype": E5M2}),
    ("mxfp8", {"dtype": E5M2, "scale_layout": "blocked"}),
    ("fp8_tensor", {}),
    ("fp8_tensor", {"dtype": E5M2, "power_of_two": True, "eps": 0.25}),
    ("fp8_block", {}),
    ("fp8_block", {"dtype": E5M2, "power_of_two": False, "eps": 0.25}),
]
IDS = [f"{f}-{'-'.join(map(str, o.values()))}".replace("torch.float8_", "") for f, o in CASES]


@pytest.mark.cover(2)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("format, options", CASES, ids=IDS)
def test_every_routing(format, options, routing):
    """K is no multiple of a block; NaN in the tail does not spread."""
    r = ROUTINGS[routing]
    x = spread(r.rows, 40 if format == "mxfp8" else 12, seed=len(routing))
    x[r.routed :] = torch.nan
    check(x, r.ends(), format, **options)


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 32, 33, 128, 256, 300])
@pytest.mark.parametrize("format, options", CASES, ids=IDS)
def test_every_width_and_source(format, options, columns, dtype):
    x = spread(10, columns, dtype=dtype, seed=columns, width=6)
    check(x, torch.tensor([4, 4, 9], dtype=torch.int32), format, **options)


@pytest.mark.parametrize("format, options", CASES, ids=IDS)
def test_many_empty_groups_between_rows(format, options):
    """Places far apart, and rows of one step in many groups."""
    sizes = [3, *[0] * 40, 5, 0, 1, 2, *[0] * 9, 40]
    check(spread(60, 20), torch.tensor(sizes).cumsum(0).int(), format, **options)


@pytest.mark.parametrize("shape", [(2, 33, 40), (3, 128, 32), (1, 1, 1), (0, 4, 4), (40, 3, 5)], ids=str)
@pytest.mark.parametrize("format, options", CASES, ids=IDS)
def test_matrices(format, options, shape):
    if format == "fp8_tensor" and not shape[0]:
        shape = (1, 2, 3)
    check(spread(*shape), None, format, **options)


@pytest.mark.parametrize("shape", [(2, 128, 128), (1, 130, 257), (2, 5, 200), (3, 200, 5)], ids=str)
@pytest.mark.parametrize("dtype", ["e4m3fn", "e5m2"])
def test_square_blocks(dtype, shape):
    check(spread(*shape), None, "fp8_block", block_2d=True, dtype=getattr(torch, f"float8_{dtype}"))


@pytest.mark.cover(1)
@pytest.mark.parametrize("step", [1, 64, 1000, 5000])
@pytest.mark.parametrize("format, options", CASES, ids=IDS)
def test_many_steps_of_work(format, options, step, monkeypatch):
    """Large inputs are cut into steps, here of few elements, and the groups of rows are looked up in parts."""
    monkeypatch.setattr(_rows, "_STEP", step)
    monkeypatch.setattr(_rows, "_WINDOW", 16)
    r = ROUTINGS["above_tile"]
    check(spread(r.rows, 40), r.ends(), format, **options)
    for shape in ((5, 33, 40), (2, 140, 17)):
        check(spread(*shape), None, format, **options)
    if format == "fp8_block":
        check(spread(2, 140, 300), None, format, block_2d=True, **options)
        check(spread(9, 3, 4), None, format, block_2d=True, **options)


@pytest.mark.parametrize("step", [1, 5000])
@pytest.mark.parametrize("format", ["mxfp8", "fp8_tensor", "fp8_block"])
def test_reading_back_in_many_steps(format, step, monkeypatch):
    r = ROUTINGS["above_tile"]
    for x, offs in ((spread(r.rows, 140), r.ends()), (spread(3, 140, 130), None)):
        parts = tgl.group_quantize(x, offs, format=format)

        def read(columnwise, parts=parts, offs=offs):
            data, scale, _ = parts[3:6] if columnwise else parts[:3]
            rows = r.rows if columnwise and offs is not None else None
            return tgl.group_dequantize(data, scale, offs, format=format, columnwise=columnwise, rows=rows)

        whole = [read(columnwise) for columnwise in (False, True)]
        with monkeypatch.context() as patch:
            patch.setattr(_rows, "_STEP", step)
            assert all(torch.equal(read(columnwise), want) for columnwise, want in zip((False, True), whole))


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format):
    check(spread(9, 32), torch.tensor([3, 3, 8], dtype=torch.int32), format)
    check(spread(2, 16, 32), None, format)
