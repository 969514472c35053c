"""Quantising into buffers allocates nothing that grows with the number of rows."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tgl
from tests.memory import same_bytes
from tests.peak_memory import peak_memory

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


@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(map(str, list(o.values())[:3])))
def test_memory_does_not_grow_with_rows(options):
    made = []
    for rows in (2048, 8192):
        x = torch.randn(rows, K).bfloat16()
        offs = torch.tensor([rows // 7, rows // 7, rows // 2, rows - 3], dtype=torch.int32)
        out = tgl.group_quantize(x, offs, **options)
        made.append((peak_memory(lambda: tgl.group_quantize(x, offs, **options, out=out)), sum(t.nbytes for t in out)))  # noqa: B023
    (small, small_out), (large, large_out) = made
    assert large - small < 0.02 * (large_out - small_out)


@pytest.mark.parametrize("options", [{"format": "mxfp8"}, {"format": "fp8_tensor"}, {"format": "fp8_block"}], ids=str)
def test_buffers_kept_from_inference_mode(options):
    """A thread's first call makes the buffers that its later calls take, in inference mode or not."""
    x, offs = torch.randn(300, 40), torch.tensor([7, 140, 140, 290], dtype=torch.int32)
    expected = tgl.group_quantize(x, offs, **options)

    def first_and_second():
        with torch.inference_mode():
            tgl.group_quantize(x.clone(), offs.clone(), **options)
        return tgl.group_quantize(x, offs, **options)

    with ThreadPoolExecutor(1) as thread:
        for have, want in zip(thread.submit(first_and_second).result(), expected):
            assert same_bytes(have, want)


def test_calls_into_buffers_allocate_next_to_nothing():
    """A thread keeps what a call of one thread needs for a step of work."""
    x, offs = torch.randn(2048, K).bfloat16(), torch.tensor([0, 700, 2048], dtype=torch.int32)
    for format in ("mxfp8", "fp8_tensor", "fp8_block"):
        out = tgl.group_quantize(x, offs, format=format)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert peak_memory(lambda: tgl.group_quantize(x, offs, format=format, out=out)) < 1 << 18  # noqa: B023
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [0, 1, 5, 130])
@pytest.mark.parametrize("columns", [40, 128, 129])
def test_scales_of_rows_as_bytes(rows, columns):
    """A contiguous copy of scales that lie by columns can be viewed as bytes, that of a single column too."""
    x, offs = torch.ones(rows, columns), torch.tensor([rows], dtype=torch.int32)
    scale = tgl.group_quantize(x, offs, format="fp8_block").scale
    assert scale.shape == (rows, -(-columns // 128))
    assert scale.contiguous().view(torch.uint8).shape == (rows, 4 * scale.shape[1])
