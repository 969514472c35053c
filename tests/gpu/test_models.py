"""Whole models on a device: every gradient against float64, and a loss that falls; eager, compiled and captured.

Graphs of a device hold other code than a CPU's, and a captured one replays it: all of the product is run, in the time
that as many processes as the machine has cores take (``-n``); ``-m "gpu and not slow"`` takes a cover of all pairs.
"""

import pytest
import torch
from torch._inductor import config

from tests.gpu.device import DEVICE
from tests.models.cases import AXES, THEIRS, Case, cover, product
from tests.models.families import Size
from tests.models.training import check

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]

MODES = AXES["mode"]
COVER = cover(MODES, [Case(family, "compiled", "autocast", "none", "plain") for family in AXES["family"]])
REST = [pytest.param(case, marks=pytest.mark.slow) for case in product(MODES) if case not in COVER]
SIZE = Size(blocks=3, experts=8, hidden=128, ffn=256, rows=256)
# Of a model with attention few sequences are so clearly routed that rounding to bfloat16 turns no choice in them.
SMALL = Size()


@pytest.fixture(autouse=True)
def _one_compiler_a_process(monkeypatch):
    """The processes that run tests are as many as there are cores."""
    monkeypatch.setattr(config, "compile_threads", 1)


@pytest.mark.parametrize("case", [*COVER, *REST], ids=str)
def test_every_gradient_and_a_falling_loss(case: Case) -> None:
    if case.family in THEIRS:
        pytest.importorskip("transformers")
    assert not torch.backends.cuda.matmul.allow_tf32
    check(case, SMALL if case.family in THEIRS else SIZE, str(DEVICE))
