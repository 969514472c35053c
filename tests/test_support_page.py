"""The tables of docs/support.md say which calls are kernels, as ``tgl.explain`` does."""

import re
from pathlib import Path

import pytest
import torch

import tgl
from tests import chips
from tgl import backends
from tgl.cutlass_kernels.archs import ARCHS
from tgl.meta.formats import FORMATS
from tgl.testing.signatures import sample_call
from tools import support_matrix

pytest.importorskip("cutlass")

ROOT = Path(__file__).parents[1]
PAGE = support_matrix.PAGE.read_text()
ALL = tuple(ARCHS)
CELLS = {"-": (), "all": ALL}
OFFS = torch.tensor([128, 256], dtype=torch.int32)


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
        with backends.compile_only(arch):
            found = tgl.explain(op, *args, **kwargs).chosen
            return found and found.name

    return tuple(arch for arch in ALL if chosen(arch) == "tgl kernel")


def test_dense_ops():
    for (op, dtype), archs in table("bfloat16").items():
        arguments, options = sample_call(op, dtype=getattr(torch, dtype))
        assert kernels(op, *arguments, **options) == archs, (op, dtype)


def test_quantised_ops():
    cells = table("mxfp8")
    assert {form for _, form in cells} == set(FORMATS)
    for (op, form), archs in cells.items():
        arguments, options = support_matrix.call(op, form)
        assert kernels(op, *arguments, **options) == archs, (op, form)


@pytest.mark.parametrize("op", ["grouped_gemm_row_scaled", "grouped_gemm_row_scaled_wgrad"])
def test_row_scaled_ops(op):
    arguments, options = support_matrix.call(op, support_matrix.BY_ROWS)
    assert kernels(op, *arguments, **options) == ("sm_89", "sm_90", "sm_100", "sm_120", "sm_121")
    assert f"`{op}`" in PAGE


def test_given_scales():
    rows, scale = torch.ones(256, 256, dtype=torch.bfloat16), torch.ones(2)
    assert kernels("grouped_activation_quantize", rows, OFFS, None, scale, format="fp8_tensor") == ALL


def test_the_matrix_is_what_the_command_writes():
    assert support_matrix.page(PAGE) == PAGE, "run python -m tools.support_matrix"


@pytest.mark.parametrize("op", support_matrix.EMULATED)
def test_runs_in_the_emulator_are_tests(op):
    """The test parametrizes the op, where it has ops, and chips."""
    test = support_matrix.EMULATED[op]
    tried = [values for values in support_matrix.parameters(test) if {"chip", "arch"} & values.keys()]
    assert bool(tried) != bool(test.chips)
    assert not any("op" in values for values in tried) or any(values["op"] == op for values in tried)
    assert not support_matrix.emulated(test, op, "no such format", "sm_80") or all("format" not in v for v in tried)


def test_a_format_whose_emulation_no_test_runs_on_a_chip_is_marked(monkeypatch):
    """A format that a test runs is not marked, nor an implementation made of other ops."""
    tried, place = support_matrix.parameters(support_matrix.FORMATS_EMULATED), ("mxfp8", "grouped_gemm_scaled")
    assert {v["op"] for v in tried} == {"grouped_gemm_scaled", "grouped_gemm_scaled_wgrad"}
    assert support_matrix.cells("sm_86")[place] == "emulated"
    fewer = [v for v in tried if (v["format"], v["chip"]) != ("mxfp8", "sm_86")]
    found = support_matrix.parameters
    monkeypatch.setattr(
        support_matrix,
        "parameters",
        lambda test: fewer if test == support_matrix.FORMATS_EMULATED else found(test),
    )
    cells = support_matrix.cells("sm_86")
    assert cells[place] == cells["mxfp8", "grouped_gemm_scaled_wgrad"] == "emulated, untried"
    assert cells["nvfp4", "grouped_gemm_scaled"] == "emulated"
    assert cells["mxfp8", "grouped_gemm_scaled_activation_quantize"] == "composed, emulated"


def test_runs_on_hardware_are_tests_on_a_device():
    for ops in support_matrix.HARDWARE.values():
        for op, module in ops.items():
            assert re.search(rf"\b{op}\b", (ROOT / "tests" / "gpu" / f"{module}.py").read_text()), op


def test_formats_emulated_on_hardware_are_recipes_of_tests_on_a_device():
    for formats in support_matrix.FORMATS_ON_HARDWARE.values():
        for form, module in formats.items():
            assert form in chips.EVERY
            assert "RECIPES = chips.EVERY" in (ROOT / "tests" / "gpu" / f"{module}.py").read_text()
