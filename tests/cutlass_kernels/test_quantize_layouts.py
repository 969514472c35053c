"""Quantisation of x in layouts and of widths that the quantising kernels do not load in 16 bytes: the CPU's bytes."""

import copy

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

import tgl
from tests.cutlass_kernels.test_quantize import BF16, F32, awkward, check, grouped
from tests.kernel_cases import framed_like
from tgl import recipes
from tgl.cutlass_kernels.launchers.quantize import WRITTEN
from tgl.meta.components import Components
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName
from tgl.testing import emulate

BY_ELEMENTS, COPIED = "tgl kernel, element by element", "tgl kernel between copies"
SIZES = (3, 0, 137)
LAYOUTS = {
    "expanded": lambda x: x[:1, :1].expand_as(x),
    "expanded rows": lambda x: x[:1].expand_as(x),
    "column-major": lambda x: x.t().contiguous().t(),
    "odd pitch": lambda x: x[:, :60],
    "odd width": lambda x: x[:, :38].contiguous(),
    "misaligned": lambda x: x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x),
}
MATRICES = {
    "odd sizes": (lambda w: w, BY_ELEMENTS),
    "transposed": (lambda w: w.mT, COPIED),
    "expanded": (lambda w: w[:, :1].expand_as(w), COPIED),
}
OPTIONS = OnePerName(
    WRITTEN,
    "OPTIONS",
    {
        "mxfp8": ("sm_100a", {"scale_layout": "blocked"}),
        "nvfp4": ("sm_100a", {"scale_layout": "blocked", "rht": True}),
        "fp8_tensor": ("sm_90a", {}),
        "fp8_block": ("sm_90a", {}),
    },
)
slow = pytest.mark.slow


def served_by(arch, x, offs, **options) -> str:
    with emulate(arch):
        return tgl.explain("group_quantize", x, offs, **options).chosen.name


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("format", WRITTEN)
def test_rows(format, layout):
    arch, options = OPTIONS[format]
    x, offs = grouped(SIZES, 9, 72, BF16)
    x = layout(x)
    assert served_by(arch, x, offs, format=format, **options) == BY_ELEMENTS
    check(x, offs, arch, format=format, **options)


@slow
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_compact_scales(format):
    x, offs = grouped(SIZES, 9, 38, BF16)
    check(x, offs, format=format)


@pytest.mark.parametrize("columns", [40, pytest.param(38, marks=slow)])
@pytest.mark.parametrize(
    "format", ["mxfp8", *(pytest.param(f, marks=slow) for f in (*WRITTEN, "given") if f != "mxfp8")]
)
def test_factors_of_rows_reach_nothing_past_a_row(format, columns):
    """An infinite factor makes NaN of a zero: none may come from columns that do not exist."""
    arch, options = OPTIONS.get(format, ("sm_90a", {"scale": torch.tensor([1.0, 2.0, 3.0])}))
    x, offs = grouped(SIZES, 9, columns, BF16)
    factors = torch.rand(x.shape[0])
    factors[5], factors[70] = float("inf"), float("nan")
    x[70] = 1.0
    check(x, offs, arch, row_scale=factors, format="fp8_tensor" if format == "given" else format, **options)


@pytest.mark.parametrize("case", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize(
    "format, block_2d",
    [
        *((name, True) for name in WRITTEN if "block_2d" in FORMATS[name].options),
        ("mxfp8", False),
        *(pytest.param(name, False, marks=slow) for name in WRITTEN if name != "mxfp8"),
    ],
)
def test_matrices(format, block_2d, case):
    arch, options = OPTIONS[format]
    options = {name: value for name, value in options.items() if name != "rht"}
    if "block_2d" in FORMATS[format].options:
        options["block_2d"] = block_2d
    layout, served = case
    w = layout(awkward(3, 38, 60, dtype=BF16))
    assert served_by(arch, w, None, format=format, **options) == served
    check(w, None, arch, format=format, **options)


@slow
def test_stochastic_rounding_draws_the_same_bits():
    x, offs = grouped(SIZES, 9, 38, F32)
    check(x, offs, format="nvfp4", rng=torch.tensor([7, 9]))


@slow
def test_sums_of_rows_and_other_options():
    x, offs = grouped(SIZES, 0, 38, BF16)
    x = torch.randn_like(x)
    check(x.t().contiguous().t(), offs, "sm_90a", format="fp8_block", dbias=True, power_of_two=False, rowwise=False)


@pytest.mark.usefixtures("overlapping_groups")
def test_bad_offsets_stay_inside():
    x = torch.randn(100, 38).bfloat16()
    offs = torch.tensor([90, -5, 2000, 40], dtype=torch.int32)
    frame = framed_like(tgl.group_quantize(x, torch.tensor([10, 20, 30, 40], dtype=torch.int32), format="fp8_tensor"))
    out = Components(*frame.inside)
    with emulate("sm_90a"):
        tgl.group_quantize(x, offs, format="fp8_tensor", out=out)
    assert frame.intact()


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, arch",
    [
        (recipes.Float8CurrentScaling(), "sm_90a"),
        (recipes.DelayedScaling(), "sm_90a"),
        (recipes.Float8BlockScaling(), "sm_90a"),
        (recipes.MXFP8BlockScaling(), "sm_100a"),
        (recipes.NVFP4BlockScaling(), "sm_100a"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize("width, inner", [(72, 40), (100, 60)])
def test_the_gradient_of_a_sum(recipe, arch, width, inner):
    torch.manual_seed(0)
    x, m_splits = torch.randn(50, width).bfloat16(), torch.tensor([20, 0, 25])
    made = tgl.GroupedLinear(3, width, inner, params_dtype=BF16, recipe=recipe)

    def step():
        layer = copy.deepcopy(made)  # of no history yet
        torch.manual_seed(1)  # of stochastic rounding
        rows = x.clone().requires_grad_()
        y = layer(rows, m_splits)
        y.sum().backward()
        return [y.detach(), rows.grad, *(p.grad.clone() for p in layer.parameters())]

    wanted = step()
    with emulate(arch, detect_races=False):
        for ours, theirs in zip(step(), wanted):
            assert (ours.float() - theirs.float()).norm() <= 2.0**-6 * theirs.float().norm()
