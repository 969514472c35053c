"""Python frames of calls: their numbers may fall."""

import pytest

MOST = {
    "grouped_gemm": 6,
    "group_quantize": 8,
    "group_quantize, other T": 15,
    "MLP, forward": 39,
    "MLP, backward": 51,
    "moe": 39,
    "moe, first on sm_90": 416,
    "MoE, forward": 50,
    "MoE, backward": 79,
    "MXFP8 MLP, forward": 201,
    "MXFP8 MLP, backward": 117,
}


@pytest.fixture(scope="module")
def frames(load):
    return load("frames")


def test_warm_calls_enter_no_more_functions(frames):
    found = {name: sum(run().values()) for name, run in frames.cases().items()}
    assert all(found[name] <= most for name, most in MOST.items()), found
