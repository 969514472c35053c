"""A training step of an expert layer in every recipe, with every kind of gradient, dtype and width, run in every way.

The CPU's half runs without a GPU, as a cover of the choices: see ``tests.journeys`` for the bounds.
"""

from dataclasses import replace

import pytest
import torch

import tgl
from tests import chips
from tests.journeys import RECIPES, Case, batch, check, covering, covering_triples, every_case, forward_and_loss, layer
from tests.journeys import step as train_step

ARCH = chips.arch()
needs_gpu = (pytest.mark.gpu, pytest.mark.skipif(ARCH is None, reason="needs a device that the kernels are built for"))
# Those of the chip, or where there is none, so that the cases have names everywhere, Hopper's.
ON_GPU = chips.EVERY
TRIPLES = covering_triples(ON_GPU)


def on_gpu(how):
    for case in every_case(ON_GPU):
        slow = (pytest.mark.slow,) if how == "compiled" and case not in TRIPLES else ()
        yield pytest.param(case, "cuda", how, marks=(*needs_gpu, *slow), id=f"cuda-{case}-{how}")


def on_cpu(how, cases):
    slow = (
        (pytest.mark.slow,) if how == "compiled" else ()
    )  # tests/models has a step of every recipe in Inductor's code
    for case in cases:
        yield pytest.param(case, "cpu", how, marks=slow, id=f"cpu-{case}-{how}")


CPU_COVER = covering(RECIPES)
CASES = [
    *on_cpu("eager", CPU_COVER),
    # One of each recipe, each with another loss and width than the one before.
    *on_cpu("traced", CPU_COVER[::5]),
    *on_cpu("compiled", [Case("current", "sum", "bf16", "72x40")]),
    *(case for how in ("eager", "captured", "compiled") for case in on_gpu(how)),
]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("case, device, how", CASES)
def test_a_training_step_has_the_right_values(case, device, how):
    check(case, device, how)


LACKING = [name for name in RECIPES if name not in chips.RECIPES[ARCH or "sm_90"]]


@pytest.mark.parametrize("recipe", [pytest.param(name, marks=needs_gpu) for name in LACKING])
@pytest.mark.parametrize("widths", ["aligned", "72x40"])
def test_a_recipe_without_emulation_raises(recipe, widths, monkeypatch):
    """One error names the format, the architectures with it, and this chip's formats; nothing is written."""
    monkeypatch.setitem(RECIPES, recipe, replace(RECIPES[recipe], emulate=False))
    case = Case(recipe, widths=widths)
    mlp = layer(case, "cuda")
    call, data = forward_and_loss(mlp, case), batch(case).to("cuda")
    kind = RECIPES[recipe].format
    with pytest.raises(tgl.NoImplementationError, match=f"takes {kind} on .*, not on {ARCH}, which takes fp8_tensor"):
        train_step(call, mlp, data)
    assert all(p.grad is None for p in mlp.parameters())
    torch.cuda.synchronize()
