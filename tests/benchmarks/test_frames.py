"""Python frames of warm calls: their numbers may fall."""

import pytest

MOST = {
    "grouped_gemm": 7,
    "group_quantize": 12,
    "group_quantize, other T": 19,
    "MLP, forward": 70,
    "MLP, backward": 75,
    "moe": 56,
    "MoE, forward": 83,
    "MoE, backward": 90,
    "MXFP8 MLP, forward": 255,
    "MXFP8 MLP, backward": 153,
}


@pytest.fixture(scope="module")
def frames(load):
    return load("frames")


def test_no_more_than_there_were(frames):
    found = {name: sum(run().values()) for name, run in frames.cases().items()}
    assert all(found[name] <= most for name, most in MOST.items()), found
