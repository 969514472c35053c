"""``tgl::route`` on a CPU, and the sort of aten that other devices fall back to, against a loop over the pairs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tests.routing_oracle import expected
from tgl.backends.portable import routing
from tgl.meta.checks import INTEGERS
from tgl.nn import _routing_expressions as expressions


def by_aten(index, num_experts, num_rows=None):
    """Into tensors that hold something else."""
    pairs = index.numel()
    rows = pairs if num_rows is None else num_rows
    outputs = [torch.full((size,), -7, dtype=torch.int32) for size in (rows, pairs, rows, num_experts)]
    routing.route(index, num_experts, **dict(zip(("source", "position", "token", "offs"), outputs)))
    return outputs


WAYS = [torch.ops.tgl.route, by_aten, expressions.route]


def check(index, num_experts, num_rows=None):
    wanted = expected(index, num_experts, num_rows)
    for way in WAYS:
        for name, ours in zip(wanted._fields, way(index, num_experts, num_rows), strict=True):
            assert ours.dtype == torch.int32, (way, name)
            assert torch.equal(ours, getattr(wanted, name)), (way, name)


@given(
    tokens=st.integers(0, 12),
    top_k=st.integers(1, 20),
    experts=st.integers(0, 9),
    beyond=st.integers(0, 3),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(INTEGERS),
    num_rows=st.one_of(st.none(), st.integers(0, 300)),
)
def test_few_slots(tokens, top_k, experts, beyond, seed, dtype, num_rows):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(-beyond, experts + 1 + beyond, (tokens, top_k), generator=generator).to(dtype)
    check(index, experts, num_rows)


@pytest.mark.parametrize("experts", [100, 200, 254, 255, 300])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_many_slots(dtype, experts):
    """The CPU sorts so many slots by their digits, with invalid experts up to the limits of the dtype."""
    limits = torch.iinfo(dtype)
    index = torch.randint(max(limits.min, -2), min(limits.max, experts + 2), (11000, 3))
    index[::100] = limits.min
    index[1::100] = limits.max
    for num_rows in (None, 20000, 40000):
        check(index.to(dtype), experts, num_rows)


@pytest.mark.parametrize("layout", ["column-major", "sliced", "expanded"])
def test_any_layout(layout):
    index = torch.randint(0, 5, (40, 4))
    index = {"column-major": index.t(), "sliced": index[::2, 1:], "expanded": index[:, :1].expand(40, 4)}[layout]
    check(index, 5)


def test_narrow_dtypes_with_more_experts_than_they_count():
    for dtype in (torch.int8, torch.uint8, torch.int16):
        check(torch.tensor([[3, 1], [0, 100], [-1, 2]]).to(dtype), 40000)


BAD = [
    (lambda t: t[0], (4,), ValueError, r"`top_k_index` must be 2-D \[S, k\], but got shape \(3,\)"),
    (torch.Tensor.float, (4,), TypeError, "`top_k_index` must be an integer tensor, but got torch.float32"),
    (torch.Tensor.bool, (4,), TypeError, "`top_k_index` must be an integer tensor, but got torch.bool"),
    (
        lambda t: t[:, :0],
        (4,),
        ValueError,
        r"`top_k_index` must be \[S, k\] with k of at least 1, but got shape \(2, 0\)",
    ),
    (lambda t: t[:1, :1].expand(1 << 30, 2), (4,), ValueError, "`top_k_index` must be of fewer than 2\\^31 elements"),
    (lambda t: t, (-1,), ValueError, "`num_experts` must be at least 0, but got -1"),
    (lambda t: t, (4, -1), ValueError, r"`num_rows` must be from 0 to 2\^31 - 1, but got -1"),
    (lambda t: t, (4, 1 << 31), ValueError, r"`num_rows` must be from 0 to 2\^31 - 1, but got 2147483648"),
]


@pytest.mark.parametrize("change, sizes, error, message", BAD)
def test_bad_input(change, sizes, error, message):
    index = change(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(error, match=f"tgl::route: {message}"):
        torch.ops.tgl.route(index, *sizes)
    with FakeTensorMode() as mode, pytest.raises(error, match=f"tgl::route: {message}"):
        torch.ops.tgl.route(mode.from_tensor(index), *sizes)


def test_debug_checks_find_slots_beyond_the_capacity():
    index = torch.tensor([[0, 1], [-1, 3], [4, 3]])
    with tgl.debug_checks():
        tgl.route(index, 4, 4, sentinels=True)
        with pytest.raises(
            ValueError, match="tgl::route: `num_rows` must be at least 4, the slots that are not dropped, but"
        ):
            tgl.route(index, 4, 3, sentinels=True)
