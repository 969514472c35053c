"""Options of quantised operands, and component shapes against formulas written out."""

import math

import pytest
import torch

from tgl.meta.components import component_specs
from tgl.meta.formats import FORMATS
from tgl.meta.quantized import Options
from tgl.meta.table import OnePerName

CPU = torch.device("cpu")


@pytest.mark.parametrize("format", FORMATS)
def test_resolving_twice_changes_nothing(format):
    options = Options(format).resolved("op")
    assert options.resolved("op") == options
    assert options.dtype == FORMATS[format].data_dtypes[0]
    assert options.power_of_two == {"fp8_tensor": False, "fp8_block": True}.get(format)


def tp(rows, groups, u):
    return u * max(math.ceil(rows / u) + groups - 1, 0)


@pytest.mark.parametrize("rows, groups", [(0, 0), (0, 3), (1, 1), (129, 1), (300, 7), (5, 300)])
@pytest.mark.parametrize("k", [2, 32, 130])
def test_shapes_of_rows_in_groups(rows, groups, k):
    tile = 512
    across32, across16 = math.ceil(k / 32), math.ceil(k / 16)
    want = {
        ("mxfp8", "compact"): [(rows, k), (rows, across32), (rows, k), (tp(rows, groups, 128) // 32, k)],
        ("mxfp8", "blocked"): [
            (rows, k),
            (tp(rows, groups, 128) // 128 * math.ceil(across32 / 4) * tile,),
            (rows, k),
            (math.ceil(k / 128) * math.ceil(tp(rows, groups, 128) / 128) * tile,),
        ],
        ("nvfp4", "compact"): [
            (rows, k // 2),
            (rows, across16),
            (k, tp(rows, groups, 64) // 2),
            (k, tp(rows, groups, 64) // 16),
        ],
        ("nvfp4", "blocked"): [
            (rows, k // 2),
            (tp(rows, groups, 128) // 128 * math.ceil(across16 / 4) * tile,),
            (k, tp(rows, groups, 64) // 2),
            (math.ceil(k / 128) * math.ceil(tp(rows, groups, 64) / 64) * tile,),
        ],
        ("mxfp4", "compact"): [
            (rows, k // 2),
            (rows, across32),
            (k, tp(rows, groups, 128) // 2),
            (k, tp(rows, groups, 128) // 32),
        ],
        ("mxfp4", "blocked"): [
            (rows, k // 2),
            (tp(rows, groups, 128) // 128 * math.ceil(across32 / 4) * tile,),
            (k, tp(rows, groups, 128) // 2),
            (math.ceil(k / 128) * math.ceil(tp(rows, groups, 128) / 128) * tile,),
        ],
        ("fp8_tensor", "compact"): [(rows, k), (groups,), (k, tp(rows, groups, 32)), (groups,)],
        ("fp8_block", "compact"): [
            (rows, k),
            (rows, math.ceil(k / 128)),
            (k, tp(rows, groups, 32)),
            (tp(rows, groups, 128) // 128, k),
        ],
    }
    assert list(want) == [(f.name, layout) for f in FORMATS.values() for layout in f.layouts]
    for (format, layout), shapes in want.items():
        options = Options(format, scale_layout=layout, dbias=True).resolved("op")
        specs = component_specs(options, (rows, k), groups, CPU, grouped=True)
        found = [specs.data, specs.scale, specs.columnwise_data, specs.columnwise_scale]
        assert [s.shape for s in found] == shapes, (format, layout)
        amax = (groups,) if format in ("nvfp4", "fp8_tensor") else (0,)
        assert (specs.amax.shape, specs.columnwise_amax.shape, specs.dbias.shape) == (amax, amax, (groups, k))


def test_shapes_of_matrices():
    g, n, k = 3, 40, 200
    want = OnePerName(
        FORMATS,
        "shapes",
        {
            "mxfp8": [(g, n, k), (g, n, 7), (g, n, k), (g, 2, k)],
            "nvfp4": [(g, n, k // 2), (g, n, 13), (g, k, n // 2), (g, k, 3)],
            "mxfp4": [(g, n, k // 2), (g, n, 7), (g, k, n // 2), (g, k, 2)],
            "fp8_tensor": [(g, n, k), (g,), (g, k, n), (g,)],
            "fp8_block": [(g, n, k), (g, n, 2), (g, k, n), (g, 1, k)],
        },
    )
    for format, shapes in want.items():
        specs = component_specs(Options(format).resolved("op"), (g, n, k), g, CPU, grouped=False)
        found = [specs.data, specs.scale, specs.columnwise_data, specs.columnwise_scale]
        assert [s.shape for s in found] == shapes, format
    square = Options("fp8_block", block_2d=True).resolved("op")
    specs = component_specs(square, (g, n, k), g, CPU, grouped=False)
    assert (specs.scale.shape, specs.columnwise_scale.shape) == ((g, 1, 2), (g, 2, 1))
    blocked = Options("mxfp8", scale_layout="blocked").resolved("op")
    specs = component_specs(blocked, (g, n, k), g, CPU, grouped=False)
    assert (specs.scale.shape, specs.columnwise_scale.shape) == ((g, 1024), (g, 1024))


@pytest.mark.parametrize("rowwise, columnwise", [(True, False), (False, True)])
def test_one_direction_leaves_the_other_empty(rowwise, columnwise):
    for format in FORMATS:
        options = Options(format, rowwise=rowwise, columnwise=columnwise).resolved("op")
        specs = component_specs(options, (9, 64), 2, CPU, grouped=True)
        absent = specs[:3] if columnwise else specs[3:6]
        assert [s.shape for s in absent] == [(0,)] * 3
