"""Quantising into buffers allocates nothing that grows with the number of rows."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tgl

K = 1024
CASES = [
    {"format": "mxfp8"},
    {"format": "mxfp8", "scale_layout": "blocked"},
    {"format": "nvfp4"},
    {"format": "nvfp4", "rht": True, "scale_layout": "blocked"},
    {"format": "nvfp4", "rht": True, "rng": torch.tensor([1, 2])},
    {"format": "fp8_tensor"},
    {"format": "fp8_block"},
]


def peak(call) -> int:
    """Bytes held at the highest point of a call, over those at its start."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    current = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            highest = max(highest, current)
    return highest


@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(map(str, list(o.values())[:3])))
def test_memory_does_not_grow_with_rows(options):
    made = []
    for rows in (2048, 8192):
        x = torch.randn(rows, K).bfloat16()
        offs = torch.tensor([rows // 7, rows // 7, rows // 2, rows - 3], dtype=torch.int32)
        out = tgl.group_quantize(x, offs, **options)
        made.append((peak(lambda: tgl.group_quantize(x, offs, **options, out=out)), sum(t.nbytes for t in out)))  # noqa: B023
    (small, small_out), (large, large_out) = made
    assert large - small < 0.02 * (large_out - small_out)
