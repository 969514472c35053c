"""The tables of docs/support.md say which calls are kernels, as ``tgl.explain`` does."""

from pathlib import Path

import pytest
import torch

import tgl
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.meta.formats import FORMATS

pytest.importorskip("cutlass")

PAGE = (Path(__file__).parents[1] / "docs" / "support.md").read_text()
ALL = tuple(ARCHS)
CELLS = {"-": (), "all": ALL}
OFFS = torch.tensor([128, 256], dtype=torch.int32)
PLACES = torch.arange(256)


def table(first_column: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """``(op, column)`` to the architectures of a cell, of the table whose second column is ``first_column``."""
    lines = PAGE[PAGE.index(f"| op | {first_column} |") :].split("\n\n")[0].splitlines()
    columns = [cell.strip() for cell in lines[0].strip("|").split("|")][1:]
    cells = {}
    for line in lines[2:]:
        op, *archs = (cell.strip() for cell in line.strip("|").split("|"))
        for column, cell in zip(columns, archs, strict=True):
            cells[op.strip("`"), column] = CELLS[cell] if cell in CELLS else tuple(cell.split(", "))
    return cells


def kernels(op, *args, **kwargs):
    """The architectures with one kernel for the call."""

    def chosen(arch):
        with backends.emulated_device(arch):
            found = tgl.explain(op, *args, **kwargs).chosen
            return found and found.name

    return tuple(arch for arch in ALL if chosen(arch) == "tgl kernel")


def dense(op, dtype):
    rows, matrices, wide = (torch.zeros(size, dtype=dtype) for size in ((256, 256), (2, 256, 256), (256, 512)))
    return {
        "grouped_gemm": (rows, matrices, OFFS),
        "grouped_gemm_wgrad": (rows, rows, OFFS),
        "grouped_gemm_wgrad_accumulate_": (rows, rows, OFFS, matrices),
        "grouped_gemm_activation": (rows, matrices, OFFS),
        "grouped_gemm_dactivation": (rows, matrices, wide, OFFS),
        "grouped_activation": (rows, OFFS),
        "grouped_dbias": (rows, OFFS),
        "dispatch": (rows, PLACES, PLACES, 1),
        "combine": (rows, PLACES, PLACES, 1),
        "combine_backward": (rows, rows, PLACES, PLACES, 1, torch.ones(256, 1)),
        "topk_router": (rows, 8),
        "topk_router_backward": (torch.zeros(256, 8), rows, torch.zeros(256, 8, dtype=torch.int32)),
    }[op]


def quantised(op, form):
    rows, matrices = torch.ones(256, 256, dtype=torch.bfloat16), torch.ones(2, 256, 256, dtype=torch.bfloat16)
    facts = FORMATS[form]
    options = {"format": form, "scale_layout": "blocked" if "blocked" in facts.layouts else "compact"}
    square = {"block_2d": True} if facts.square_scales else {}
    a, b = tgl.group_quantize(rows, OFFS, **options), tgl.group_quantize(matrices, None, **options, **square)
    amax = (a.amax, b.amax) if facts.decodes_with_amax else (None, None)
    columns = (a.columnwise_data, a.columnwise_scale)
    amaxes = (a.columnwise_amax,) * 2 if facts.decodes_with_amax else (None, None)
    gemm = (a.data, a.scale, b.data, b.scale, OFFS, *amax)
    if op == "grouped_gemm_packed":
        scale = tgl.group_quantize(matrices, None, format=form, **square).scale
        return (rows, b.data, scale, OFFS, amax[1]), {"format": form}
    arguments = {
        "grouped_gemm_scaled": gemm,
        "grouped_gemm_scaled_wgrad": (*columns, *columns, OFFS, *amaxes),
        "grouped_gemm_scaled_wgrad_accumulate_": (*columns, *columns, OFFS, torch.zeros(2, 256, 256), *amaxes),
        "group_quantize": (rows, OFFS),
        "group_dequantize": (a.data, a.scale, OFFS, amax[0]),
        "grouped_activation_quantize": (rows, OFFS),
        "grouped_gemm_scaled_activation_quantize": gemm,
    }[op]
    return arguments, options


def test_dense_ops():
    for (op, dtype), archs in table("bfloat16").items():
        assert kernels(op, *dense(op, getattr(torch, dtype))) == archs, (op, dtype)


def test_quantised_ops():
    cells = table("mxfp8")
    assert {form for _, form in cells} == set(FORMATS)
    for (op, form), archs in cells.items():
        arguments, options = quantised(op, form)
        assert kernels(op, *arguments, **options) == archs, (op, form)


@pytest.mark.parametrize("op", ["grouped_gemm_row_scaled", "grouped_gemm_row_scaled_wgrad"])
def test_rows_with_a_scale_each(op):
    rows, matrices = torch.ones(256, 256).to(torch.float8_e4m3fn), torch.ones(2, 256, 256).to(torch.float8_e4m3fn)
    scales, of_groups = torch.ones(256), torch.ones(2, 256)
    wgrad = op.endswith("wgrad")
    operands = (rows, of_groups, rows, of_groups) if wgrad else (rows, scales, matrices, of_groups)
    assert kernels(op, *operands, OFFS) == ("sm_90", "sm_100")
    assert f"`{op}`" in PAGE


def test_given_scales():
    rows, scale = torch.ones(256, 256, dtype=torch.bfloat16), torch.ones(2)
    assert kernels("grouped_activation_quantize", rows, OFFS, None, scale, format="fp8_tensor") == ALL
