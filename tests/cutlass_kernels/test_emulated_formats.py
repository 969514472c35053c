"""Formats that a chip lacks, from dense operands to a product on its kernels: quantised, decoded and multiplied.

Sources are such that nothing is rounded anywhere, so that results are those of the dense operands in float64.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.kernel_cases import ends, gradient, integers, product, spans
from tests.without_kernels import emulated_formats
from tgl.cutlass_kernels.archs import ARCHS, arch_of
from tgl.cutlass_kernels.gemm.operand_formats import OPERANDS
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName
from tgl.testing import emulate

SIZES, TAIL, N = (5, 0, 20), 7, 32
EVERY = 16  # of elements, one has the largest magnitude: no block of any format is without
# What multiplies integers up to 3, and the largest one, for which all scales are exact: 6 and 7 * 2^6 are the ends of
# E2M1 and E4M3, so that the rest are powers of two. Of NVFP4 448 is the scale of a block, and 2 the factor of a group.
SOURCES = OnePerName(
    FORMATS,
    "SOURCES in tests/cutlass_kernels/test_emulated_formats.py",
    {
        "mxfp8": (1, 7),
        "nvfp4": (2 * 448, 6),
        "mxfp4": (1, 6),
        "fp8_tensor": (1, 7),
        "fp8_block": (1, 7),
    },
)


def source(form: str, *shape: int) -> torch.Tensor:
    """Integers in bfloat16, the first of every few of a row as large as they are."""
    unit, largest = SOURCES[form]
    made = integers(*shape) + 2 * integers(*shape)
    made[..., ::EVERY] = largest
    return made * unit


def tokens(form: str, columns: int) -> torch.Tensor:
    """Rows of all groups, twice as large in each, and of every few of a group one that is large; NaN in the tail."""
    made = source(form, sum(SIZES) + TAIL, columns)
    for g, rows in spans(SIZES):
        made[rows][::EVERY] = made[0, 0]
        made[rows] *= 2**g
    made[sum(SIZES) :] = torch.nan
    return made


@pytest.fixture
def emulated() -> Iterator[None]:
    with emulated_formats():
        yield


OPS = ("grouped_gemm_scaled", "grouped_gemm_scaled_wgrad")


def without_it() -> list:
    """Ops, formats and chips without; slow but for one of scales in bfloat16, of groups and of sums, ops rotate."""
    fast = {(OPS[i % 2], form, "sm_80") for i, form in enumerate(("mxfp8", "nvfp4", "fp8_block"))}
    having = {form: OPERANDS[form].archs if form in OPERANDS else () for form in FORMATS}
    lacking = [(form, name) for form in FORMATS for name in ARCHS if name not in having[form]]
    every = [(op, *both) for both in lacking for op in OPS]
    return [pytest.param(*case, marks=() if case in fast else pytest.mark.slow) for case in every]


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("op", "format", "chip"), without_it())
def test_products_of_sources_that_are_exact(op, format, chip):
    torch.manual_seed(0)
    facts, offs = FORMATS[format], ends(SIZES)
    options: dict[str, Any] = {
        "format": format,
        "scale_layout": "blocked" if "blocked" in facts.layouts else "compact",
    }
    depth = 2 * (facts.block or 32)
    x = tokens(format, depth)
    with emulate(chip, detect_races=False) as machine:
        a = tgl.group_quantize(x, offs, **options)
        if op == "grouped_gemm_scaled":
            w = source(format, len(SIZES), N, depth) * torch.tensor([1, 2, 4]).view(-1, 1, 1).bfloat16()
            b = tgl.group_quantize(w, None, **options, **({"block_2d": True} if facts.square_scales else {}))
            operands, amax = (a.data, a.scale, b.data, b.scale), (a.amax, b.amax)
            wanted = product(x, w.transpose(1, 2), SIZES)
        else:
            dy = tokens(format, N)
            b = tgl.group_quantize(dy, offs, **options)
            operands = (a.columnwise_data, a.columnwise_scale, b.columnwise_data, b.columnwise_scale)
            amax = (a.columnwise_amax, b.columnwise_amax)
            wanted = gradient(x, dy, SIZES)
        call = (*operands, offs, *(amax if facts.decodes_with_amax else ()))
        options["out_dtype"] = torch.float32
        found = tgl.explain(getattr(tgl, op), *call, **options)
        assert found.emulates
        assert found.parts
        assert all(part.chosen.name.startswith("tgl kernel") for part in found.parts)  # or one between copies
        before = len(machine.launches)
        with pytest.warns(UserWarning, match=f"{chip} has no kernel for GEMMs on {format}, which are emulated"):
            made = getattr(tgl, op)(*call, **options)
    assert machine.launches[before:]
    assert {launch.arch for launch in machine.launches} == {arch_of(chip).target}
    assert torch.equal(made.double(), wanted)
