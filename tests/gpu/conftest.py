"""What tests on a device share."""

import pytest

from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.runtime import launcher


@pytest.fixture
def tiling(monkeypatch):
    """Makes every GEMM use a given tiling."""

    def use(chosen):
        monkeypatch.setattr(tilings, "choose", lambda *_: chosen)
        launcher.forget()

    yield use
    launcher.forget()
