"""NVFP4: the bytes of plain loops under every routing, and what stochastic rounding promises."""

import math

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tgl
from tests.memory import same_bytes
from tests.quantize import nvfp4_reference as reference
from tgl.backends.cpu.quantize import fp4
from tgl.testing import ROUTINGS, GroupSizes

SMALL = GroupSizes("small", (5, 0, 33, 66), 108)
SEED = torch.tensor([2**40 + 3, -5])
E2M1 = torch.tensor([*reference.E2M1, *(-v for v in reference.E2M1)])


@pytest.fixture(autouse=True)
def _no_warnings():
    with np.errstate(all="ignore"):
        yield


def quantize(x, offs, *, rng=None, **options):
    return tgl.group_quantize(x, offs, rng=rng, format="nvfp4", **options)


def numbers(packed):
    """The E2M1 values of packed bytes."""
    return E2M1[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()]


def assert_components(result, expected):
    for name, value in expected.items():
        component = getattr(result, name)
        assert component.shape == value.shape, name
        assert torch.equal(component, value), name


def rows(routing, k, dtype, *, broken=True):
    """Random rows whose groups differ in magnitude, one Inf and one NaN among them, NaN in the tail."""
    x = torch.randn(routing.rows, k) * torch.exp2(torch.randint(-3, 4, (routing.rows, 1)))
    if broken and routing.routed > 4:
        x[3, 5], x[1, k - 1] = -math.inf, math.nan
    x[routing.routed :] = math.nan
    return x.to(dtype)


CONFIGS = {
    "plain": (torch.bfloat16, {}, None),
    "rht": (torch.float32, {"rht": True, "scale_layout": "blocked"}, None),
    "stochastic": (torch.float16, {"scale_layout": "blocked"}, SEED),
    "gradient": (torch.bfloat16, {"rht": True}, SEED),
}


# Hundreds of groups take as long as all other routings: the quick run has them with stochastic rounding alone.
IN_GROUPS = [
    pytest.param(name, routing, id=f"{name}-{routing.name}", marks=[pytest.mark.slow] * (long and name != "stochastic"))
    for routing in ROUTINGS.values()
    for long in [len(routing.sizes) > 16]
    for name in CONFIGS
]


@pytest.mark.parametrize("config, routing", IN_GROUPS)
def test_bytes_of_rows_in_groups(config, routing):
    dtype, options, rng = CONFIGS[config]
    k = 18 if len(routing.sizes) == 300 else 34
    x = rows(routing, k, dtype)
    expected = reference.grouped(
        x,
        routing.sizes,
        rht="rht" in options,
        layout=options.get("scale_layout", "compact"),
        rng=None if rng is None else rng.tolist(),
    )
    assert_components(quantize(x, routing.ends(), rng=rng, **options), expected)
    if routing.rows < 20:
        for layout in (x.t().contiguous().t(), torch.cat([x, x], 1)[:, :k]):
            assert_components(quantize(layout, routing.ends(), rng=rng, **options), expected)


@pytest.mark.parametrize("shape", [(2, 34, 40), (3, 16, 16), (1, 130, 6), (2, 0, 16), (2, 4, 0)])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("layout, rng", [("compact", None), ("blocked", None), ("compact", SEED)])
def test_bytes_of_weights(shape, square, layout, rng):
    x = torch.randn(shape)
    if shape[1] > 20:
        x[0, 17, 3], x[-1, 20, 5] = math.inf, math.nan
    expected = reference.matrices(x, square=square, layout=layout, rng=None if rng is None else rng.tolist())
    result = quantize(x, None, rng=rng, block_2d=square, scale_layout=layout)
    assert_components(result, expected)
    for view in (x.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([x, x], 1)[:, : shape[1]]):
        assert_components(quantize(view, None, rng=rng, block_2d=square, scale_layout=layout), expected)


def edge_rows():
    """Each row is a group of its own, so every row decides its own amax."""
    tiny, big = 2.0**-149, float(torch.finfo(torch.float32).max)
    whole = [[0.0], [-0.0], [tiny], [-tiny, 0.0], [2.0**-126], [big], [-big, tiny], [big, big / 448, big / 2**20]]
    whole += [[math.inf, 1.0], [1.0, math.nan], [-math.inf] * 16, [2688.0, -2688.0, 6.0]]
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    near = [v for tie in ties for v in (np.nextafter(np.float32(tie), np.float32(0)), tie, -tie)]
    whole += [[6.0, *near[i : i + 15]] for i in range(0, len(near), 15)]
    # With a block of amax 2688 beside them (S_enc = 1), these blocks sit on and around the ties of the E4M3 scale.
    scales = [(reference.E4M3[c] + reference.E4M3[c + 1]) / 2 * 6 for c in (0, 1, 2, 7, 8, 63, 100, 125)]
    whole += [
        [*[0.0] * 16, float(np.float32(s)) + ulp * float(np.spacing(np.float32(s)))]
        for s in scales
        for ulp in range(-3, 4)
    ]
    x = torch.zeros(len(whole), 48)
    for row, values in zip(x, whole):
        row[: len(values)] = torch.tensor(values)
    x[-7 * len(scales) :, 40] = 2688.0
    spread = torch.randn(64, 48) * torch.exp2(torch.randint(-140, 120, (64, 3)).repeat_interleave(16, 1))
    return torch.cat([x, spread])


@pytest.mark.parametrize("rht", [False, True])
def test_bytes_of_edge_cases(rht):
    x = edge_rows()
    sizes = (1,) * x.shape[0]
    assert_components(
        quantize(x, GroupSizes("", sizes, x.shape[0]).ends(), rht=rht), reference.grouped(x, sizes, rht=rht)
    )


def test_every_float32_around_the_ties():
    """All values within 40 ulp of a tie, both signs, and a sample of all bit patterns."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).view(torch.int32)
    around = (ties[:, None] + torch.arange(-40, 41)).flatten().view(torch.float32)
    sample = torch.randint(0, 0x7F800000, (10000,), dtype=torch.int32).view(torch.float32)
    values = torch.cat([around, -around, sample, -sample])
    assert fp4.nearest(values).tolist() == [reference.e2m1(np.float32(v)) for v in values.tolist()]


def test_row_scale_and_dbias():
    """``row_scale`` multiplies first, rounded to x's dtype."""
    x, probs = rows(SMALL, 32, torch.bfloat16, broken=False), torch.rand(SMALL.rows)
    scaled = (x.float() * probs[:, None]).bfloat16()
    result = quantize(x, SMALL.ends(), row_scale=probs, rht=True, dbias=True)
    expected = quantize(scaled, SMALL.ends(), rht=True, dbias=True)
    for component, value in zip(result, expected):
        assert torch.equal(component, value)


@pytest.mark.parametrize("options", [{}, {"rht": True, "scale_layout": "blocked"}, {"columnwise": False}])
def test_out_writes_every_byte(options):
    x = rows(SMALL, 34, torch.bfloat16)
    expected = quantize(x, SMALL.ends(), **options)
    out = tgl.group_quantize(x, SMALL.ends(), format="nvfp4", **options)
    for component in out:
        component.view(torch.uint8).fill_(0xAB)
    before = [component.clone() for component in out]
    tgl.group_quantize(x, SMALL.ends(), noop=torch.ones(1), format="nvfp4", **options, out=out)
    assert all(same_bytes(a, b) for a, b in zip(out, before))
    tgl.group_quantize(x, SMALL.ends(), noop=torch.zeros(1), format="nvfp4", **options, out=out)
    assert all(torch.equal(a, b) for a, b in zip(out, expected))


@pytest.mark.parametrize("layout", ["compact", "blocked"])
def test_bad_offsets_stay_in_bounds(layout):
    """Ends that descend or lie outside the rows give empty or cut groups."""
    x = torch.randn(100, 32)
    offs = torch.tensor([-3, 60, 20, 500, 90], dtype=torch.int32)
    clamped = torch.tensor([0, 60, 60, 100, 100], dtype=torch.int32)
    expected = quantize(x, clamped, rht=True, scale_layout=layout)
    for component, value in zip(quantize(x, offs, rht=True, scale_layout=layout), expected):
        assert torch.equal(component, value)
    options = {"format": "nvfp4", "scale_layout": layout, "columnwise": True, "rows": 100}
    parts = expected.columnwise_data, expected.columnwise_scale
    values = [tgl.group_dequantize(*parts, o, expected.columnwise_amax, **options) for o in (offs, clamped)]
    assert torch.equal(*values)


def test_thread_count_changes_nothing():
    """Steps grow with the number of threads, so there they are cut elsewhere."""
    x = torch.randn(3000, 96).bfloat16()
    offs = torch.tensor([1000, 1001, 2900], dtype=torch.int32)
    expected = quantize(x, offs, rht=True, rng=SEED)
    torch.set_num_threads(2)
    for component, value in zip(quantize(x, offs, rht=True, rng=SEED), expected):
        assert torch.equal(component, value)


@pytest.mark.parametrize("rht", [False, True])
def test_requantize(rht):
    """Requantising equals quantising the float32 values of the rowwise components."""
    x, offs = rows(SMALL, 34, torch.bfloat16), SMALL.ends()
    made = quantize(x, offs)
    values = tgl.group_dequantize(made.data, made.scale, offs, made.amax, format="nvfp4", out_dtype=torch.float32)
    expected = quantize(values, offs, rowwise=False, rht=rht)
    result = tgl.group_requantize(made.data, made.scale, offs, made.amax, format="nvfp4", rht=rht)
    for component, value in zip(result, expected[3:6]):
        assert torch.equal(component, value)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_stay_in_their_block(bad):
    clean = rows(SMALL, 48, torch.float32, broken=False)
    clean[40, 20] = 0.0
    x = clean.clone()
    x[40, 20] = bad
    offs = SMALL.ends()
    expected, result = quantize(clean, offs), quantize(x, offs)
    for name in ("amax", "columnwise_amax"):
        assert torch.equal(getattr(result, name), getattr(expected, name))
    for columnwise in (False, True):
        values = [
            tgl.group_dequantize(
                *((c.columnwise_data, c.columnwise_scale) if columnwise else (c.data, c.scale)),
                offs,
                c.columnwise_amax if columnwise else c.amax,
                format="nvfp4",
                columnwise=columnwise,
                rows=SMALL.rows,
                out_dtype=torch.float32,
            )
            for c in (expected, result)
        ]
        block = torch.zeros_like(clean, dtype=torch.bool)
        if columnwise:
            block[38:54, 20] = True  # the group of 66 begins at row 38
        else:
            block[40, 16:32] = True
        assert torch.equal(values[1].isnan(), block)
        assert torch.equal(values[1][~block], values[0][~block])


@pytest.mark.parametrize("layout", ["compact", "blocked"])
@pytest.mark.parametrize("rht", [False, True])
@pytest.mark.parametrize("routing", ["ragged_tail", "above_tile", "all_empty", "no_rows", "no_groups"])
def test_dequantize_rows_in_groups(routing, rht, layout):
    routing = ROUTINGS[routing]
    x, k = rows(routing, 34, torch.float32), 34
    offs = routing.ends()
    made = quantize(x, offs, rht=rht, scale_layout=layout)
    compact = quantize(x, offs, rht=rht)
    expected, turned = torch.zeros(routing.rows, k), torch.zeros(routing.rows, k)
    for g, segment in enumerate(routing.segments()):
        size = segment.stop - segment.start
        if not size:
            continue
        amax, columnwise_amax = compact.amax[g].item(), compact.columnwise_amax[g].item()
        values = reference.dequantize(compact.data[segment], compact.scale[segment], amax)
        expected[segment] = torch.tensor(np.array(values))
        run = 4 * (segment.start // 64 + g)
        runs = slice(run, run - (-size // 16))
        bytes_ = compact.columnwise_data[:, 8 * runs.start : 8 * runs.stop]
        values = reference.dequantize(bytes_, compact.columnwise_scale[:, runs], columnwise_amax)
        if rht:
            values = [
                [v for r in range(0, len(row), 16) for v in reference.hadamard_back(row[r : r + 16])] for row in values
            ]
        turned[segment] = torch.tensor(np.array(values)).t()[:size]
    options = {"format": "nvfp4", "scale_layout": layout, "rows": routing.rows}
    for dtype in (torch.float32, torch.bfloat16):
        result = tgl.group_dequantize(made.data, made.scale, offs, made.amax, **options, out_dtype=dtype)
        assert torch.equal(result.nan_to_num(7e4), expected.to(dtype).nan_to_num(7e4))
        result = tgl.group_dequantize(
            made.columnwise_data,
            made.columnwise_scale,
            offs,
            made.columnwise_amax,
            **options,
            columnwise=True,
            rht=rht,
            out_dtype=dtype,
        )
        assert torch.equal(result.nan_to_num(7e4), turned.to(dtype).nan_to_num(7e4))


@pytest.mark.parametrize("layout", ["compact", "blocked"])
@pytest.mark.parametrize("square", [False, True])
def test_dequantize_weights(square, layout):
    x = torch.randn(2, 34, 40)
    x[0, 17, 3] = math.inf
    made = quantize(x, None, block_2d=square, scale_layout=layout)
    compact = quantize(x, None, block_2d=square)
    options = {"format": "nvfp4", "scale_layout": layout, "block_2d": square, "out_dtype": torch.float32}
    rowwise = tgl.group_dequantize(made.data, made.scale, None, made.amax, **options)
    columnwise = tgl.group_dequantize(
        made.columnwise_data, made.columnwise_scale, None, made.columnwise_amax, **options, columnwise=True
    )
    for g in range(2):
        for result, data, scale in (
            (rowwise[g], compact.data[g], compact.scale[g]),
            (columnwise[g].t(), compact.columnwise_data[g], compact.columnwise_scale[g]),
        ):
            expected = torch.tensor(np.array(reference.dequantize(data, scale, compact.amax[g].item())))
            assert torch.equal(result.nan_to_num(7e4), expected.nan_to_num(7e4))


# --- stochastic rounding ----------------------------------------------------------------------------------------------


def test_random_bits_are_philox():
    """The known answers of its authors, and the same numbers as plain integers give."""
    ones = 2**32 - 1
    assert reference.philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert reference.philox([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    positions = [0, 1, 77, 2**31, 2**40 + 5]
    for seed, offset, stream in ((0, 0, 0), (-1, 2**62, 1), (2**33 + 1, -7, 0)):
        bits = fp4.random_bits(torch.tensor(positions), seed, offset, stream)
        assert bits.tolist() == [reference.random_bits(p, seed, offset, stream) for p in positions]


def unit_scale(values, blocks):
    """Rows of blocks ``[6, v, v, ...]`` in a group whose amax makes every scale 1: elements are rounded as they are."""
    x = torch.empty(len(values), blocks, 16)
    x[:] = torch.tensor(values)[:, None, None]
    x[:, :, 0] = 6.0
    x[0, 0, 0] = 2688.0
    return x.flatten(1)


def draws(values, blocks, rng):
    """E2M1 values of ``blocks * 15`` elements of each value, but for the first block of the first row."""
    x = unit_scale(values, blocks)
    result = quantize(x, torch.tensor([len(values)], dtype=torch.int32), rng=rng, columnwise=False)
    assert result.scale[:, 1:].eq(0x38).all()  # 1.0
    return numbers(result.data).unflatten(1, (-1, 16))[:, 1:, 1:].flatten(1)


VALUES = [0.0625, 0.3, 0.5, 0.74, 1.1, 1.25, 1.9, 2.01, 2.5, 3.3, 4.5, 5.9, 6.0, -0.2, -3.75, 2.0**-12]


def neighbours(value):
    grid = sorted(E2M1.tolist())
    return max(v for v in grid if v <= value), min(v for v in grid if v >= value)


def test_draws_are_unbiased():
    """Hoeffding: a mean of n draws within one step leaves its expectation by more than eps * step with a probability of
    at most 2 exp(-2 n eps^2), here 1e-9 for each value; the 2^-17 is the granularity of 16 bits."""
    drawn = draws(VALUES, 1 << 14, SEED).double()
    n = drawn.shape[1]
    eps = math.sqrt(math.log(2e9) / (2 * n)) + 2**-17
    assert eps < 0.007
    for value, row in zip(VALUES, drawn):
        low, high = neighbours(value)
        assert set(row.unique().tolist()) <= {low, high}  # never more than a step from the nearest
        assert abs(row.mean().item() - value) <= eps * (high - low)
        if low < value < high and value != 2.0**-12:
            assert row.unique().numel() == 2


def test_draws_of_neighbours_are_independent():
    """The product of two elements' roundings is a draw as well, so the same bound holds for its mean."""
    up = draws([0.3, 0.3], 1 << 14, SEED)[1].view(-1, 15).double() / 0.5
    pairs = [(up[:, i] * up[:, j]).mean().item() for i, j in ((0, 1), (1, 2), (6, 7), (0, 8), (3, 14))]
    rows_apart = (up[1:, 4] * up[:-1, 4]).mean().item()
    eps = math.sqrt(math.log(2e9) / (2 * (up.shape[0] - 1))) + 2**-16
    assert eps < 0.027
    for mean in (*pairs, rows_apart):
        assert abs(mean - 0.36) <= eps


def test_seed_and_offset_decide():
    x = torch.randn(200, 64)
    offs = torch.tensor([120, 200], dtype=torch.int32)
    first = quantize(x, offs, rng=SEED)
    for other in (SEED + torch.tensor([1, 0]), SEED + torch.tensor([0, 1])):
        changed = quantize(x, offs, rng=other)
        assert torch.equal(changed.scale, first.scale)
        assert changed.data.ne(first.data).float().mean() > 0.3
        assert changed.columnwise_data.ne(first.columnwise_data).float().mean() > 0.2
    for component, again in zip(first, quantize(x, offs, rng=SEED.clone())):
        assert torch.equal(component, again)


def test_an_element_s_draw_depends_on_its_position_alone():
    x = torch.randn(300, 64)
    x[0, 0] = 50.0  # the amax of every prefix
    whole = quantize(x, torch.tensor([300], dtype=torch.int32), rng=SEED, columnwise=False)
    part = quantize(x[:100], torch.tensor([100], dtype=torch.int32), rng=SEED, columnwise=False)
    assert torch.equal(whole.data[:100], part.data)


def test_stochastic_rounding_moves_an_element_by_one_code_at_most():
    """An element with the seed and without differs by at most one code."""
    x = torch.randn(100, 64) * 3
    offs = torch.tensor([100], dtype=torch.int32)
    plain, drawn = quantize(x, offs, rht=True), quantize(x, offs, rht=True, rng=SEED)
    for name in ("data", "columnwise_data"):
        codes = [(numbers(getattr(c, name)).abs()[..., None] > E2M1[:8] - 0.1).sum(-1) for c in (plain, drawn)]
        assert (codes[0] - codes[1]).abs().max() == 1
        signs = [torch.signbit(numbers(getattr(c, name))) for c in (plain, drawn)]
        assert torch.equal(*signs)
        assert getattr(plain, name.replace("data", "scale")).equal(getattr(drawn, name.replace("data", "scale")))


# --- as an op ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"rht": True, "scale_layout": "blocked", "dbias": True}])
@pytest.mark.parametrize("rng", [None, SEED])
def test_opcheck(options, rng):
    x = torch.nan_to_num(rows(SMALL, 34, torch.bfloat16, broken=False))
    torch.library.opcheck(
        torch.ops.tgl.group_quantize.default, (x, SMALL.ends(), None, None, rng), {"format": "nvfp4", **options}
    )


def test_one_graph_for_all_routings(fresh_compiler):
    """Seed and offset are a tensor, so draws need no graph of their own and a compiled call gives eager's bytes."""

    def there_and_back(x, offs, rng):
        c = quantize(x, offs, rng=rng, rht=True)
        back = tgl.group_dequantize(c.data, c.scale, offs, c.amax, format="nvfp4", out_dtype=torch.float32)
        return *c, back

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(there_and_back, backend=counter, fullgraph=True, dynamic=True)
    for i, (sizes, total) in enumerate((((5, 0, 130), 140), ((140, 0, 0), 140), ((3, 3, 3), 9), ((64, 64, 2), 300))):
        x = rows(GroupSizes("", sizes, total), 32, torch.bfloat16, broken=False)
        offs, rng = GroupSizes("", sizes, total).ends(), SEED + i
        for result, value in zip(compiled(x, offs, rng), there_and_back(x, offs, rng)):
            assert torch.equal(result, value)
    assert counter.frame_count == 1


BAD = [
    ({"x": torch.zeros(108, 33)}, ValueError, "`x` must be .* with an even K .*pad"),
    ({"x": torch.zeros(2, 3, 32), "offs": None}, ValueError, "`x` must be .* with an even N .*pad"),
    ({"rng": torch.zeros(3, dtype=torch.int64)}, ValueError, r"`rng` must be of shape \[seed, offset\] = \(2,\)"),
    ({"rng": torch.zeros(2, dtype=torch.int32)}, TypeError, "`rng` must be torch.int64, but got torch.int32"),
    ({"rng": SEED.to("meta")}, ValueError, "`rng` must be on cpu like `x`"),
    ({"block_2d": True}, ValueError, "`block_2d` must be False when `offs` is given"),
    ({"rht": True, "columnwise": False}, ValueError, "`rht` must be False without `columnwise`"),
    ({"rht": True, "x": torch.zeros(2, 4, 32), "offs": None}, ValueError, "`rht` must be False when `offs` is None"),
    ({"scaling": "floor"}, ValueError, "`scaling` must be left at its default for nvfp4"),
    ({"dtype": torch.float8_e5m2}, TypeError, "`dtype` must be torch.uint8 for nvfp4"),
    ({"format": "mxfp8", "rng": SEED}, ValueError, r"`rng` must be left at its default for mxfp8 \(it is for nvfp4\)"),
    ({"format": "mxfp8", "rht": True}, ValueError, r"`rht` must be left at its default for mxfp8 \(it is for nvfp4\)"),
]


@pytest.mark.parametrize("change, error, message", BAD)
def test_bad_input(change, error, message):
    arguments = {"x": torch.zeros(108, 32), "offs": SMALL.ends(), "format": "nvfp4", **change}
    with pytest.raises(error, match=message):
        tgl.group_quantize(**arguments)
