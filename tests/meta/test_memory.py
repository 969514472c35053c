"""The overlap test: never misses a shared byte, and knows column slices of one matrix apart."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tgl.meta.memory import overlap

VIEW = st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 5), st.integers(0, 6))


def region(base: torch.Tensor, view: tuple) -> torch.Tensor:
    top, rows, left, columns = view
    return base[top : top + rows, left : left + columns]


@given(first=VIEW, second=VIEW)
def test_slices_of_one_matrix(first, second):
    """Never misses shared memory; exact when the slices have the same rows."""
    base = torch.zeros(12, 12)
    x, y = region(base, first), region(base, second)
    x.fill_(1)
    shared = bool(y.any())
    base.zero_()
    if shared:
        assert overlap(x, y)
        assert overlap(y, x)
    elif first[:2] == second[:2]:
        assert not overlap(x, y)


@given(
    starts=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    shapes=st.tuples(*[st.lists(st.integers(0, 3), min_size=1, max_size=3)] * 2),
    strides=st.tuples(*[st.lists(st.integers(0, 5), min_size=3, max_size=3)] * 2),
)
def test_never_misses_shared_memory(starts, shapes, strides):
    base = torch.zeros(80)
    x, y = (
        base.as_strided(shape, stride[: len(shape)], start) for start, shape, stride in zip(starts, shapes, strides)
    )
    x.fill_(1)
    if y.any():
        assert overlap(x, y)


def test_different_element_sizes():
    raw = torch.zeros(64, dtype=torch.uint8)
    assert overlap(raw[:16].view(torch.float32), raw[12:20].view(torch.int16))
    assert not overlap(raw[:16].view(torch.float32), raw[16:20].view(torch.int16))


@pytest.mark.parametrize("empty", [torch.zeros(0), torch.zeros(0, 4), torch.zeros(4, 0)])
def test_empty_tensors_share_nothing(empty):
    assert not overlap(empty, torch.zeros(4))
