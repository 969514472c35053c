"""Python frames of warm calls: their numbers may fall."""

import pytest

MOST = {
    "grouped_gemm": 6,
    "group_quantize": 11,
    "group_quantize, other T": 18,
    "MLP, forward": 64,
    "MLP, backward": 75,
    "moe": 55,
    "MoE, forward": 82,
    "MoE, backward": 90,
    "MXFP8 MLP, forward": 230,
    "MXFP8 MLP, backward": 139,
}


@pytest.fixture(scope="module")
def frames(load):
    return load("frames")


def test_no_more_than_there_were(frames):
    found = {name: sum(run().values()) for name, run in frames.cases().items()}
    assert all(found[name] <= most for name, most in MOST.items()), found
