"""The tile order and the search for a tile's group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from tgl.cutlass_kernels.scheduler import (
    TileGrid,
    allocate_deal,
    allocate_order,
    decode,
    exact_tile,
    find_tile,
    start_search,
)
from tgl.cutlass_kernels.scheduler.group_sort import CAPACITY, sort_groups
from tgl.cutlass_kernels.scheduler.groups import group_range
from tgl.cutlass_kernels.scheduler.lpt import EPILOGUE, STEPS, UNIT, WORTHWHILE, deal_tiles, dealt
from tgl.testing import emulate

TILE_M, TILES_N, BAND, BLOCKS = 128, 3, 4, 3
FIELDS = 5


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 9))
def test_decode_visits_every_tile_once_in_bands(tiles_m, tiles_n, band):
    order = [decode(i, tiles_m, tiles_n, band) for i in range(tiles_m * tiles_n)]
    assert sorted(order) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    bands = [m // band for m, _ in order]
    assert bands == sorted(bands)
    columns = [n for m, n in order if m // band == 0]
    assert columns == sorted(columns)


@cute.kernel
def _write_tiles(offs: cute.Tensor, out: cute.Tensor, rows: Int32, tail: cutlass.Constexpr):
    index, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    grid = TileGrid(offs, rows, TILES_N, TILE_M, BAND, tail)
    search = start_search(grid)
    search, tile = find_tile(search, index, grid)
    while tile.valid:
        if cute.arch.lane_idx() == 0:
            out[index, 0] = tile.group
            out[index, 1] = tile.m
            out[index, 2] = tile.n
            out[index, 3] = tile.start
            out[index, 4] = tile.length
        index += blocks
        search, tile = find_tile(search, index, grid)


@cute.jit
def _launch(offs: cute.Tensor, out: cute.Tensor, rows: Int32, tail: cutlass.Constexpr):
    _write_tiles(offs, out, rows, tail).launch(grid=(BLOCKS, 1, 1), block=(32, 1, 1))


def _expected(ranges):
    tiles = []
    for group, (start, end) in enumerate(ranges):
        tiles_m = -(-(end - start) // TILE_M)
        for i in range(tiles_m * TILES_N):
            tiles.append([group, *decode(i, tiles_m, TILES_N, BAND), start, end - start])
    return tiles


def _ranges(offs, rows, tail):
    """Row ranges of the groups, and of the tail if it is one, as promised for any values in ``offs``."""
    before = [0, *offs]
    ranges = []
    for start, end in zip(before, offs):
        start = min(max(start, 0), rows)
        ranges.append((start, min(max(end, start), rows)))
    if tail:
        ranges.append((min(max(before[-1], 0), rows), rows))
    return ranges


ROUTINGS = {
    "ragged": ([5, 5, 135, 262, 390, 519, 520, 520], 600),
    "67 groups": (torch.tensor([0, 3, 129, 0, 1] * 13 + [0, 256]).cumsum(0).tolist(), 2100),
    "32 groups": ([128 * (g + 1) for g in range(32)], 32 * 128),
    "empty": ([0, 0, 0], 300),
    "no rows": ([0], 0),
    "descending, negative, past the end": ([100, 40, -3, 700, 2**31 - 1, -(2**31), 200], 400),
}


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("offs, rows", ROUTINGS.values(), ids=ROUTINGS)
def test_a_warp_finds_every_tile(offs, rows, tail):
    expected = _expected(_ranges(offs, rows, tail))
    ends = torch.tensor(offs, dtype=torch.int32)
    out = torch.full((len(expected) + BLOCKS, FIELDS), -1, dtype=torch.int32)
    with emulate("sm_100a"):
        ends_, out_ = (from_dlpack(t).mark_layout_dynamic() for t in (ends, out))
        cute.compile(_launch, ends_, out_, Int32(rows), tail)(ends_, out_, Int32(rows))
    assert out.tolist() == expected + [[-1] * FIELDS] * BLOCKS


@cute.jit
def _host_range(offs: cute.Tensor, rows: Int32, out: cute.Tensor, tail: cutlass.Constexpr):
    for group in range(cute.size(out) // 2):
        out[group, 0], out[group, 1] = group_range(offs, rows, group, tail)


@settings(max_examples=30)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6), st.integers(0, 2**30))
def test_ranges_stay_in_bounds_for_any_offsets(offs, rows):
    """The device function itself, on the host."""
    out = torch.full((len(offs) + 1, 2), -1, dtype=torch.int32)
    key = len(offs)
    ends_, out_ = from_dlpack(torch.tensor(offs, dtype=torch.int32)), from_dlpack(out)
    if key not in _host:
        _host[key] = cute.compile(_host_range, ends_, Int32(rows), out_, True)
    _host[key](ends_, Int32(rows), out_)
    assert [tuple(r) for r in out.tolist()] == _ranges(offs, rows, True)


_host: dict = {}


WARPS, TILES_M = 3, 2


@cute.kernel
def _write_deal(offs: cute.Tensor, out: cute.Tensor, rows: Int32):
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    warp = cute.arch.warp_idx()
    allocator = SmemAllocator()
    order, deal = allocate_order(allocator), allocate_deal(allocator)
    sort_groups(order, offs, rows, warp, WARPS)
    cute.arch.sync_threads()
    if warp == 0:
        deal_tiles(deal, order, Int32(cute.size(offs)), rows, Int32(TILES_M * TILES_N), block, blocks)
    cute.arch.sync_threads()
    turn, index = Int32(0), block
    tile = exact_tile(dealt(deal, turn, index), offs, rows, TILES_M, TILES_N, BAND, order.groups)
    while tile.valid:
        if cute.arch.thread_idx()[0] == 0:
            out[block, turn, 0] = tile.group
            out[block, turn, 1] = tile.m
            out[block, turn, 2] = tile.n
            out[block, turn, 3] = tile.start
            out[block, turn, 4] = tile.length
        turn += 1
        index += blocks
        tile = exact_tile(dealt(deal, turn, index), offs, rows, TILES_M, TILES_N, BAND, order.groups)


@cute.jit
def _deal(offs: cute.Tensor, out: cute.Tensor, rows: Int32):
    _write_deal(offs, out, rows).launch(grid=(BLOCKS, 1, 1), block=(WARPS * 32, 1, 1))


def _work(sizes, index, per_group):
    """Return the work of the ``index``-th tile of groups of these sizes."""
    return -(-sizes[index // per_group] // UNIT) + EPILOGUE


def _dealt(sizes, per_group, clusters):
    """Indices of every cluster's tiles of sorted groups, as the device should deal them."""
    tiles, work = [[] for _ in range(clusters)], [0] * clusters
    given, sets, ranked = 0, [range(clusters)], range(clusters)
    unequal = max(sizes) > 2 * (sum(sizes) // len(sizes))
    mean = (sum(sizes) // UNIT + len(sizes) * EPILOGUE) * per_group / clusters
    if unequal and WORTHWHILE * _work(sizes, 0, per_group) > mean:
        for _ in range(STEPS):
            if given == len(sizes) * per_group:
                break
            least = min(sets, key=lambda members: work[members[0]])
            taken = least[: per_group - given % per_group]
            for cluster in taken:
                work[cluster] += _work(sizes, given, per_group)
                tiles[cluster].append(given)
                given += 1
            if len(taken) < len(least):
                sets[sets.index(least)] = least[len(taken) :]
                sets.append(taken)
        ranked = [cluster for members in sorted(sets, key=lambda s: work[s[0]]) for cluster in members]
    for i, first in enumerate(range(given, len(sizes) * per_group, clusters)):
        for place, cluster in enumerate(ranked[:: -1 if i % 2 and unequal else 1]):
            if first + place < len(sizes) * per_group:
                tiles[cluster].append(first + place)
    return tiles


SPLITS = {
    "even": [64] * 7,
    "skewed": [3, 0, 900, 3, 64, 64, 0, 1],
    "fewer tiles than steps": [0, 400, 10],
    "70 groups": [(i * 37) % 150 for i in range(69)] + [4000],
    "70 groups, unequal in vain": [(i * 37) % 150 for i in range(69)] + [400],
    "too many to sort": [5, *[0] * CAPACITY, 900],
}


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS)
def test_long_tiles_go_where_there_is_least_work(sizes):
    ends = torch.tensor(sizes).cumsum(0).int()
    rows, groups, per_group = int(ends[-1]), len(sizes), TILES_M * TILES_N
    by_length, lengths = range(groups), [1] * groups  # as they come
    if groups <= CAPACITY:
        by_length = sorted(range(groups), key=lambda g: -sizes[g])
        lengths = [sizes[g] for g in by_length]
    dealt = _dealt(lengths, per_group, BLOCKS)
    expected = torch.full((BLOCKS, max(map(len, dealt)) + 1, FIELDS), -1, dtype=torch.int32)
    for block, indices in enumerate(dealt):
        for turn, index in enumerate(indices):
            group = by_length[index // per_group]
            m, n = decode(index % per_group, TILES_M, TILES_N, BAND)
            expected[block, turn] = torch.tensor([group, m, n, int(ends[group]) - sizes[group], sizes[group]])
    assert sorted(index for indices in dealt for index in indices) == list(range(groups * per_group))
    out = torch.full_like(expected, -1)
    with emulate("sm_90a"):
        ends_, out_ = (from_dlpack(t).mark_layout_dynamic() for t in (ends, out))
        cute.compile(_deal, ends_, out_, Int32(rows))(ends_, out_, Int32(rows))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("groups", [16, 128])
def test_zipf_is_balanced_over_ctas(groups):
    """96 tiles a group on 132 clusters: 65536 rows of Qwen3's experts on an H200."""
    weights = [1 / (i + 1) for i in range(groups)]
    sizes = [int(65536 * w / sum(weights)) for w in weights]
    work = [sum(_work(sizes, i, 96) for i in indices) for indices in _dealt(sizes, 96, 132)]
    assert max(work) <= 1.02 * sum(work) / 132
