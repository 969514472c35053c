"""The cases of ``tests.gpu.sanitize``, run on the emulator: they pass, and kernels run them."""

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from tests.gpu import sanitize
from tgl.cutlass_kernels.archs import ARCHS
from tgl.testing import emulate

FAST = sanitize.combining_backward
BODIES = [
    pytest.param(body, id=body.__name__, marks=() if body is FAST else pytest.mark.slow) for body in sanitize.BODIES
]


@pytest.mark.parametrize("body", BODIES)
def test_every_body(body, monkeypatch):
    monkeypatch.setattr(sanitize, "DEVICE", torch.device("cpu"))
    torch.manual_seed(0)
    with emulate(ARCHS["sm_90"].target) as machine:
        body()
    assert machine.launches
