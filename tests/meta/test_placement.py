"""Group placement and the blocked scale layout, against formulas written with scalars."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tgl.meta import placement
from tgl.testing import ROUTINGS


def scalar_coordinates(sizes, u):
    """Coordinate of every routed token, in order."""
    places, start = [], 0
    for g, size in enumerate(sizes):
        first = (start // u + g) * u
        places += range(first, first + size)
        start += size
    return places


@given(sizes=st.lists(st.integers(0, 300), max_size=8), tail=st.integers(0, 200), u=st.sampled_from([16, 32, 64, 128]))
def test_placement(sizes, tail, u):
    rows = sum(sizes) + tail
    offs = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    places = scalar_coordinates(sizes, u)
    allocated = placement.padded_rows(rows, len(sizes), u)
    assert allocated == u * max(math.ceil(rows / u) + len(sizes) - 1, 0)
    assert len(set(places)) == len(places)
    assert all(p < allocated for p in places)
    assert placement.coordinate(offs, rows, u).tolist() == places + [-1] * tail
    tokens = placement.row_of(offs, rows, u).tolist()
    assert len(tokens) == allocated
    assert [tokens[p] for p in places] == list(range(sum(sizes)))
    assert sum(t >= 0 for t in tokens) == sum(sizes)
    assert all(start % u == 0 for start in placement.starts(offs, u).tolist())


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("u", [32, 64, 128])
def test_groups_never_share_a_unit(name, u):
    routing = ROUTINGS[name]
    offs, sizes = routing.ends(), routing.sizes
    begins = placement.starts(offs, u).tolist()
    for g, (begin, size) in enumerate(zip(begins, sizes)):
        end = begin + math.ceil(size / u) * u
        assert end <= (begins[g + 1] if g + 1 < len(sizes) else placement.padded_rows(routing.rows, len(sizes), u))


@pytest.mark.parametrize("rows, columns", [(1, 1), (128, 4), (129, 5), (127, 3), (300, 17), (0, 4), (5, 0)])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_blocked_layout(rows, columns, lead):
    scales = torch.randint(1, 256, (*lead, rows, columns), dtype=torch.uint8)
    flat = placement.to_blocked(scales)
    across = math.ceil(columns / 4)
    assert flat.shape == (*lead, 128 * math.ceil(rows / 128) * 4 * across)
    assert flat.shape[-1] == placement.blocked_size(rows, columns)
    matrices = scales if lead else scales[None]
    for matrix, laid in zip(matrices, flat.view(len(matrices), -1)):
        expected = [0] * flat.shape[-1]
        for y in range(rows):
            for x in range(columns):
                tile = (y // 128) * across + x // 4
                expected[tile * 512 + (y % 32) * 16 + ((y % 128) // 32) * 4 + x % 4] = int(matrix[y, x])
        assert laid.tolist() == expected
    assert torch.equal(placement.from_blocked(flat, rows, columns), scales)
    y, x = torch.arange(rows)[:, None], torch.arange(columns)
    offset = placement.blocked_offset(y, x, columns)
    assert torch.equal(flat[..., offset], scales)
