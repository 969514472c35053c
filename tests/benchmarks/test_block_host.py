"""Launches of an eager block, in order."""

import pytest

from tgl.cutlass_kernels.runtime import launcher

FORWARD = ["route", "dispatch", "grouped_gemm_activation", "grouped_gemm", "combine", "end"]
BACKWARD = ["dispatch", "grouped_gemm_dactivation", "grouped_gemm_wgrad", "combine", "grouped_gemm", "combine"]
BACKWARD += ["grouped_gemm_wgrad", "end"]


@pytest.mark.parametrize("layer", [False, True])
def test_launches_of_a_step(load, layer):
    before = dict(launcher.compiled_kernels), dict(launcher.warm_plans)
    found = load("block_host").measure(layer, warm=True, rounds=3, before=1)
    assert [op for op, _ in found["forward"]] == FORWARD
    assert [op for op, _ in found["backward"]] == BACKWARD
    for launches in found.values():
        times = [at for _, at in launches]
        assert times == sorted(times)
        assert times[0] > 0
    assert (launcher.compiled_kernels, launcher.warm_plans) == before
