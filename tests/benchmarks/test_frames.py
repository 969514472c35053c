"""Python frames of warm calls: their numbers may fall."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MOST = {
    "grouped_gemm": 7,
    "group_quantize": 14,
    "MLP, forward": 73,
    "MLP, backward": 80,
    "MXFP8 MLP, forward": 263,
    "MXFP8 MLP, backward": 157,
}


@pytest.fixture(scope="module")
def frames():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("frames")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_no_more_than_there_were(frames):
    found = {name: sum(run().values()) for name, run in frames.cases().items()}
    assert all(found[name] <= most for name, most in MOST.items()), found
