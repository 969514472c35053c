"""Recipes are values, and each says in one table what it does."""

import dataclasses
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

import tgl
from tgl.recipes import (
    GEMMS,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPES = (MXFP8BlockScaling, NVFP4BlockScaling, Float8CurrentScaling, DelayedScaling, Float8BlockScaling)


@pytest.mark.parametrize("recipe", RECIPES)
def test_equal_by_value_hashable_and_frozen(recipe):
    one, two = recipe(), recipe()
    assert one == two
    assert hash(one) == hash(two)
    assert len({one, two}) == 1
    assert eval(repr(one), {recipe.__name__: recipe, "Format": Format}) == one
    field = dataclasses.fields(one)[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, field.name, None)
    assert {r() for r in RECIPES if r() == one} == {one}


def test_options_make_other_values():
    assert MXFP8BlockScaling(Format.HYBRID) != MXFP8BlockScaling()
    assert MXFP8BlockScaling(Format.HYBRID).operands.grad.dtype == torch.float8_e5m2
    assert MXFP8BlockScaling(Format.HYBRID).operands.input.dtype == torch.float8_e4m3fn
    assert Float8BlockScaling(use_f32_scales=True).operands.weight.power_of_two is False
    plain = NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True, scale_layout="compact"
    ).operands
    assert plain.input == plain.weight == plain.grad
    assert plain.input.scale_layout == "compact"


def test_tables():
    """Every operand is read by two GEMMs, along their contraction."""
    assert {name for pair in GEMMS.values() for name, _ in pair} == {"input", "weight", "grad"}
    assert_expected_inline(
        "\n\n".join("\n".join([recipe.__name__, *str(recipe()).splitlines()[1:]]) for recipe in RECIPES),
        """\
MXFP8BlockScaling
        fprop              dgrad                 wgrad
input   rowwise E4M3 1x32  -                     columnwise E4M3 32x1
weight  rowwise E4M3 1x32  columnwise E4M3 32x1  -
grad    -                  rowwise E4M3 1x32     columnwise E4M3 32x1

NVFP4BlockScaling
        fprop               dgrad                         wgrad
input   rowwise E2M1 1x16   -                             columnwise E2M1 16x1 RHT
weight  rowwise E2M1 16x16  columnwise E2M1 16x16         -
grad    -                   rowwise E2M1 1x16 stochastic  columnwise E2M1 16x1 RHT stochastic

Float8CurrentScaling
        fprop                   dgrad                      wgrad
input   rowwise E4M3 per group  -                          columnwise E4M3 per group
weight  rowwise E4M3 per group  columnwise E4M3 per group  -
grad    -                       rowwise E5M2 per group     columnwise E5M2 per group

DelayedScaling
        fprop                           dgrad                              wgrad
input   rowwise E4M3 per group delayed  -                                  columnwise E4M3 per group delayed
weight  rowwise E4M3 per group delayed  columnwise E4M3 per group delayed  -
grad    -                               rowwise E5M2 per group delayed     columnwise E5M2 per group delayed

Float8BlockScaling
        fprop                 dgrad                    wgrad
input   rowwise E4M3 1x128    -                        columnwise E4M3 128x1
weight  rowwise E4M3 128x128  columnwise E4M3 128x128  -
grad    -                     rowwise E4M3 1x128       columnwise E4M3 128x1""",
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: MXFP8BlockScaling(scaling="up"), "MXFP8BlockScaling: `scaling` must be one of rceil, floor, even"),
        (lambda: MXFP8BlockScaling(fp8_format="E4M3"), r"`fp8_format` must be a tgl.recipes.Format, but got 'E4M3'"),
        (lambda: NVFP4BlockScaling(scale_layout="swizzled"), "`scale_layout` must be one of compact, blocked"),
        (lambda: Float8CurrentScaling(amax_epsilon=-1.0), "`amax_epsilon` must be finite and not negative"),
        (lambda: DelayedScaling(amax_history_len=0), "`amax_history_len` must be at least 1, but got 0"),
        (lambda: DelayedScaling(amax_compute_algo="mean"), "`amax_compute_algo` must be 'max' or 'most_recent'"),
        (lambda: tgl.GroupedLinear(2, 7, 4, recipe=NVFP4BlockScaling()), "`in_features` must be even for NVFP4Block"),
        (lambda: tgl.GroupedLinear(2, 8, 5, recipe=NVFP4BlockScaling()), r"`out_features` .* pad it to 6, but got 5"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_something_else_is_no_recipe():
    message = r"`recipe` must be a recipe of tgl.recipes, the name of one or None, but got 8"
    with pytest.raises(TypeError, match=message):
        tgl.GroupedLinear(2, 8, 8, recipe=8)
    with pytest.raises(
        ValueError, match=r"`recipe` must be one of mxfp8, .*, but got 'MXFP-8' \(did you mean 'mxfp8'\?\)"
    ):
        tgl.MoE(2, 8, 8, recipe="MXFP-8")


def test_every_recipe_has_a_name():
    assert set(tgl.recipes.RECIPES.values()) == set(RECIPES)
    for name, recipe in tgl.recipes.RECIPES.items():
        assert tgl.recipes.named(name) == recipe()
        assert f'`"{name}"`' in (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
    layer = tgl.GroupedLinear(num_experts=2, in_features=64, out_features=32, bias=False, recipe="mxfp8")
    assert layer.gemms.recipe == MXFP8BlockScaling()
    assert layer.extra_repr().endswith("bias=False, dtype=torch.float32, recipe='mxfp8'")
    other = tgl.GroupedLinear(2, 64, 32, dtype=torch.bfloat16, recipe=MXFP8BlockScaling(scaling="floor"))
    assert "dtype=torch.bfloat16, recipe=MXFP8BlockScaling(" in other.extra_repr()


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: tgl.MoE(2, 8, 8, activation="swigl"),
            r"`activation` must be one of swiglu, .* \(did you mean 'swiglu'",
        ),
        (lambda: tgl.quantize(torch.ones(2, 32), None, "mxpf8"), r"`format` .* but got 'mxpf8' \(did you mean 'mxfp8'"),
        (lambda: tgl.topk_router(torch.ones(2, 4), 1, score_function="softmx"), r"one of .* \(did you mean 'softmax'"),
        (lambda: tgl.recipes.QuantizeSpec("fp8_blocks"), r"but got 'fp8_blocks' \(did you mean 'fp8_block'\?\)"),
        (lambda: tgl.recipes.QuantizeSpec("int8x"), r"but got 'int8x'$"),
    ],
)
def test_unknown_names_get_the_closest(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_page_shows_the_tables_and_its_example_runs(capsys):
    text = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
    for recipe in RECIPES:
        assert str(recipe()) in text, recipe
    example = text.split("```python\n")[1].split("```")[0]
    exec(compile(example, "docs/recipes.md", "exec"), {})
    assert capsys.readouterr().out == f"{MXFP8BlockScaling()}\n"
