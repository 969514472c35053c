"""Fixtures of tests on a device."""

import pytest

from tests import kernels_of_warps
from tgl.cutlass_kernels import tilings
from tgl.cutlass_kernels.runtime import launcher

LOADS = {"warp": "lanes", "warp-tma": "tma"}


@pytest.fixture(autouse=True)
def _kernels(request):
    """Run the test on the kernels that ``--kernels`` names; skip it if it tries the tilings of other kernels."""
    kernels = request.config.getoption("kernels")
    if kernels == "own":
        yield
    elif request.node.originalname == "test_every_tiling" or "tiling" in request.fixturenames:
        pytest.skip("tries tilings of other kernels")
    elif request.node.get_closest_marker("wide_mmas"):
        pytest.skip("there is no such mma.sync kernel")
    else:
        with kernels_of_warps.in_place(LOADS[kernels]):
            yield


@pytest.fixture
def tiling(monkeypatch):
    """Makes every GEMM use a given tiling."""

    def use(chosen):
        monkeypatch.setattr(tilings, "choose", lambda *_: chosen)
        launcher.forget()

    yield use
    launcher.forget()
