"""Every byte of every component, against a reference that quantises one element at a time."""

import pytest
import torch

from tests.quantize.comparing import DTYPES, check, spread
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


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("format, options", CASES, ids=IDS)
def test_every_routing(format, options, routing):
    """K is a multiple of no block; NaN in the tail goes nowhere."""
    r = ROUTINGS[routing]
    x = spread(r.rows, 40 if format == "mxfp8" else 12, seed=len(routing))
    x[r.routed :] = torch.nan
    check(x, r.ends(), format, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 32, 33, 128, 256, 300])
@pytest.mark.parametrize("format, options", CASES, ids=IDS)
def test_every_width_and_source(format, options, columns, dtype):
    x = spread(10, columns, dtype=dtype, seed=columns, width=6)
    check(x, torch.tensor([4, 4, 9], dtype=torch.int32), format, **options)


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
