"""Scales in the layouts of other libraries: the bytes of plain loops, and the same bytes after a round trip."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tgl
from tests.kernel_cases import ends
from tgl import backends
from tgl.meta.formats import FORMATS
from tgl.testing import ROUTINGS, GroupSizes

BLOCK = {"mxfp8": 32, "nvfp4": 16, "mxfp4": 32, "fp8_block": 128}
UNIT = {"mxfp8": 128, "nvfp4": 64, "mxfp4": 128, "fp8_block": 128}
LAYOUTS = ("blocked", "torch", "te", "te_swizzled")
CASES = [(f, layout) for f in ("mxfp8", "nvfp4") for layout in LAYOUTS]
CASES += [("mxfp4", layout) for layout in LAYOUTS if layout != "te"] + [("fp8_block", "te")]
SMALL = GroupSizes("small", (5, 0, 130, 66), 204)


def convert(direction, layout, scale, offs, **kwargs):
    name = "te_scale_layout" if layout.startswith("te") else f"{layout}_scale" + "_layout" * (layout == "torch")
    extra = {"swizzled": layout == "te_swizzled"} if layout.startswith("te") else {}
    return getattr(tgl, f"{direction}_{name}")(scale, offs, **kwargs, **extra)


def up(n, multiple):
    return -(-n // multiple) * multiple


def padded(matrix, rows, columns):
    return [
        [matrix[y][x] if y < len(matrix) and x < len(matrix[y]) else 0 for x in range(columns)] for y in range(rows)
    ]


def tiled(matrix, rows, columns):
    """The bytes of a matrix in the order of memory: tile by tile, 32 x 4 x 4 in each."""
    rows, columns = up(rows, 128), up(columns, 4)
    matrix = padded(matrix, rows, columns)
    order = itertools.product(range(0, rows, 128), range(0, columns, 4), range(32), range(4), range(4))
    return [matrix[tile_y + 32 * quarter + y][tile_x + x] for tile_y, tile_x, y, quarter, x in order]


def flat(matrix, rows, columns):
    return [value for row in padded(matrix, rows, columns) for value in row]


def transposed(matrix, columns):
    return [[row[x] for row in matrix] for x in range(columns)]


def one_group(format, layout, columnwise, square, matrix, along, across):
    """A group's scales ``[along][across]`` as the layout holds them."""
    swapped = transposed(matrix, across)
    if layout != "te":
        return tiled(swapped, across, along) if columnwise else tiled(matrix, along, across)
    if format == "mxfp8":
        return (
            flat(matrix, up(along, 4), up(across, 128)) if columnwise else flat(matrix, up(along, 128), up(across, 4))
        )
    if FORMATS[format].transposed_scale:
        return (
            flat(swapped, up(across, 128), up(along, 4)) if columnwise else flat(matrix, up(along, 128), up(across, 4))
        )
    if square != columnwise:
        return flat(matrix, along, up(across, 4))
    return flat(swapped, across, up(along, 4))


def random_scales(shape, format):
    values = torch.randint(1, 256, shape)
    return values.float() if format == "fp8_block" else values.to(torch.uint8)


def rows_of_groups(routing, k, format, columnwise, fill):
    """A compact component, and each group's part of it ``[along][across]``; bytes of no group are ``fill``."""
    block, unit, groups = BLOCK[format], UNIT[format], len(routing.sizes)
    blocks = -(-k // block)
    if not columnwise:
        scale = random_scales((routing.rows, blocks), format)
        scale[routing.routed :] = fill
        return scale, [scale[s].tolist() for s in routing.segments()]
    units = max(-(-routing.rows // unit) + groups - 1, 0)
    scale = torch.full((units * unit // block, k), fill, dtype=torch.float32 if format == "fp8_block" else torch.uint8)
    parts = []
    for g, segment in enumerate(routing.segments()):
        first, count = (segment.start // unit + g) * unit // block, -(-(segment.stop - segment.start) // block)
        scale[first : first + count] = random_scales((count, k), format)
        parts.append(scale[first : first + count].tolist())
    return (scale.t().contiguous() if FORMATS[format].transposed_scale else scale), parts


def expected(routing, k, format, layout, columnwise, parts):
    block, groups = BLOCK[format], len(routing.sizes)
    across = k if columnwise else -(-k // block)
    if layout == "blocked":  # one matrix for all groups, which lie where the placement says
        unit = UNIT[format] if columnwise else 128
        units = max(-(-routing.rows // unit) + groups - 1, 0)
        whole = [[0] * across for _ in range(units * unit // (block if columnwise else 1))]
        for g, (segment, part) in enumerate(zip(routing.segments(), parts)):
            first = (segment.start // unit + g) * unit // (block if columnwise else 1)
            whole[first : first + len(part)] = part
        return tiled(transposed(whole, across), across, len(whole)) if columnwise else tiled(whole, len(whole), across)
    return [value for part in parts for value in one_group(format, layout, columnwise, False, part, len(part), across)]


@pytest.mark.cover(2)
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=lambda r: r.name)
@pytest.mark.parametrize("format, layout", CASES)
@pytest.mark.parametrize("columnwise", [False, True])
def test_rows_in_groups(format, layout, columnwise, routing):
    if routing.name == "groups_300" and columnwise and layout != "blocked":
        routing = GroupSizes("groups_60", routing.sizes[:60], sum(routing.sizes[:60]) + 1)
    k = 70 if format != "fp8_block" else 300
    clean, parts = rows_of_groups(routing, k, format, columnwise, 0)
    arguments = {"shape": (routing.rows, k), "format": format, "columnwise": columnwise}
    result = convert("to", layout, clean, routing.ends(), **arguments)
    values = expected(routing, k, format, layout, columnwise, parts)
    assert result.numel() >= len(values)
    assert result.flatten()[: len(values)].tolist() == values
    assert not result.flatten()[len(values) :].any()
    back = convert("from", layout, result, routing.ends(), **arguments)
    assert back.shape == clean.shape
    assert torch.equal(back, clean)
    torch.manual_seed(0)
    clean, _ = rows_of_groups(routing, k, format, columnwise, 0)
    torch.manual_seed(0)
    dirty, _ = rows_of_groups(routing, k, format, columnwise, 99)  # bytes of no group go nowhere
    assert torch.equal(
        convert("to", layout, dirty, routing.ends(), **arguments),
        convert("to", layout, clean, routing.ends(), **arguments),
    )


@pytest.mark.parametrize("format, layout, square", [*((*case, False) for case in CASES), ("fp8_block", "te", True)])
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("groups, n, k", [(3, 130, 68), (1, 256, 512), (2, 4, 300), (0, 32, 32), (2, 0, 64)])
def test_weights(format, layout, columnwise, square, groups, n, k):
    block = BLOCK[format]
    along = -(-n // block) if columnwise or square else n
    across = k if columnwise and not square else -(-k // block)
    scale = random_scales((groups, along, across), format)
    values = [v for part in scale for v in one_group(format, layout, columnwise, square, part.tolist(), along, across)]
    turned = columnwise and (FORMATS[format].transposed_scale or square)
    compact = scale.transpose(1, 2).contiguous() if turned else scale
    arguments = {"shape": (groups, n, k), "format": format, "columnwise": columnwise}
    if square:
        arguments["block_2d"] = True
    result = convert("to", layout, compact, None, **arguments)
    assert result.dim() == (1 if layout.startswith("te") else 2)
    assert result.flatten().tolist() == values
    assert torch.equal(convert("from", layout, result, None, **arguments), compact)


def test_shapes_bound_every_routing():
    shape = {"shape": (204, 70), "format": "mxfp8"}
    rowwise, _ = rows_of_groups(SMALL, 70, "mxfp8", False, 0)
    columnwise, _ = rows_of_groups(SMALL, 70, "mxfp8", True, 0)
    assert tgl.to_torch_scale_layout(rowwise, SMALL.ends(), **shape).shape == (204 + 4 * 128, 4)
    assert tgl.to_torch_scale_layout(columnwise, SMALL.ends(), **shape, columnwise=True).shape == (128, 7 + 4 * 4)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("grouped", [True, False])
def test_blocked_is_what_group_quantize_makes(format, grouped):
    x = torch.randn(204, 96) if grouped else torch.randn(3, 68, 96)
    offs = SMALL.ends() if grouped else None
    compact = tgl.group_quantize(x, offs, format=format)
    blocked = tgl.group_quantize(x, offs, format=format, scale_layout="blocked")
    for columnwise, name in ((False, "scale"), (True, "columnwise_scale")):
        scale = getattr(compact, name)
        result = tgl.to_blocked_scale(scale, offs, shape=x.shape, format=format, columnwise=columnwise)
        assert torch.equal(result, getattr(blocked, name))


WILD = (-1, -(1 << 31), (1 << 31) - 1, 30, 4, 4, 4)  # numbers of no token, and some of one, in a tail


@pytest.mark.parametrize("format, layout", CASES)
def test_scales_of_rows_by_an_index(format, layout):
    """Scales by an index are those of a copy of the rows in order; zeros for an index out of range."""
    k, offs = 70 if format != "fp8_block" else 300, ends((5, 0, 130, 62))
    rows = torch.cat([torch.randint(0, 30, (197,)), torch.tensor(WILD)]).int()
    rows[[0, 7, 190]] = torch.tensor(WILD[:3], dtype=torch.int32)
    tokens = random_scales((30, -(-k // BLOCK[format])), format)
    ordered = tokens[rows.clamp(0, 29).long()]
    ordered[[0, 7, 190]] = 0
    options = {"shape": (204, k), "layout": layout, "format": format}
    wanted = torch.ops.tgl.scale_to_layout(ordered, offs, **options)
    assert torch.equal(torch.ops.tgl.scale_to_layout(tokens, offs, rows, **options), wanted)
    torch.library.opcheck(torch.ops.tgl.scale_to_layout.default, (tokens, offs, rows), options)
    wanted = torch.ops.tgl.scale_to_layout(torch.zeros_like(ordered), offs, **options)
    assert torch.equal(torch.ops.tgl.scale_to_layout(tokens[:0], offs, rows, **options), wanted)


def test_blocked_is_what_group_quantize_makes_of_rows_by_an_index():
    """MXFP8, whose rowwise scales follow from the row."""
    x, offs = torch.randn(30, 96), ends((5, 0, 130, 62))
    rows = torch.cat([torch.randint(0, 30, (197,)), torch.tensor(WILD)]).int()
    rows[3] = -1
    options = {"format": "mxfp8", "columnwise": False}
    tokens = tgl.group_quantize(x, ends((30,)), **options).scale
    wanted = tgl.group_quantize(x, offs, rows=rows, scale_layout="blocked", **options).scale
    assert torch.equal(tgl.to_blocked_scale(tokens, offs, rows, shape=(204, 96), format="mxfp8"), wanted)


BAD_ROWS = [
    ({"rows": torch.zeros(204)}, TypeError, r"`rows` must be int32 \(numbers of rows of `scale`\), but got"),
    ({"rows": torch.zeros(204, 1, dtype=torch.int32)}, ValueError, r"`rows` must be 1-D \[T\]"),
    ({"rows": torch.zeros(408, dtype=torch.int32)[::2]}, ValueError, "`rows` must be contiguous"),
    ({"rows": torch.zeros(203, dtype=torch.int32)}, ValueError, "`rows` must be of length 204, the first size of `sha"),
    ({"rows": torch.zeros(204, dtype=torch.int32, device="meta")}, ValueError, "`rows` must be on cpu like `scale`"),
    ({"columnwise": True}, ValueError, "`rows` must be None unless `scale` is rowwise and `offs` is given"),
    ({"offs": None, "shape": (2, 102, 64)}, ValueError, "`rows` must be None unless `scale` is rowwise and `offs` is"),
    ({"scale": torch.zeros(30, dtype=torch.uint8)}, ValueError, r"`scale` must be 2-D \[S, columns\]"),
    ({"scale": torch.zeros(30, 3, dtype=torch.uint8)}, ValueError, r"compact mxfp8 scales = \(30, 2\), but got"),
]


@pytest.mark.parametrize("change, error, message", BAD_ROWS)
def test_bad_indices(change, error, message):
    good = {"scale": random_scales((30, 2), "mxfp8"), "offs": SMALL.ends(), "rows": torch.zeros(204).int(), **GOOD}
    tgl.to_blocked_scale(**good)
    with pytest.raises(error, match=message):
        tgl.to_blocked_scale(**{**good, **change})


def test_debug_checks_find_row_indices_out_of_range():
    scale, rows = random_scales((30, 2), "mxfp8"), torch.arange(30).repeat(7)[:204].int()
    rows[201:] = -1  # the tail
    with tgl.debug_checks():
        tgl.to_blocked_scale(scale, SMALL.ends(), rows, **GOOD)
        rows[200] = 30
        with pytest.raises(ValueError, match=r"`rows` must be numbers below 30 before row offs\[-1\] = 201"):
            tgl.to_blocked_scale(scale, SMALL.ends(), rows, **GOOD)


def test_bad_offsets_stay_in_bounds():
    """Ends that descend or lie outside the rows give empty or cut groups."""
    scale = random_scales((8, 2), "mxfp8")
    offs = torch.tensor([6, 3, 100, -5], dtype=torch.int32)
    clamped = torch.tensor([6, 6, 8, 8], dtype=torch.int32)
    for layout in LAYOUTS:
        arguments = {"shape": (8, 64), "format": "mxfp8"}
        good = convert("to", layout, scale, clamped, **arguments)
        assert torch.equal(convert("to", layout, scale, offs, **arguments), good)
        assert torch.equal(convert("from", layout, good, offs, **arguments), scale)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("columnwise", [False, True])
def test_opcheck(layout, columnwise):
    for format in ("mxfp8", "nvfp4", "mxfp4"):
        if (format, layout) not in CASES:
            continue
        scale, _ = rows_of_groups(SMALL, 70, format, columnwise, 0)
        options = {"shape": [204, 70], "layout": layout, "format": format, "columnwise": columnwise}
        args = (scale, SMALL.ends())
        torch.library.opcheck(torch.ops.tgl.scale_to_layout.default, args, options)
        args = (torch.ops.tgl.scale_to_layout(*args, **options), SMALL.ends())
        torch.library.opcheck(torch.ops.tgl.scale_from_layout.default, args, options)


def test_one_graph_for_all_routings(fresh_compiler):
    """Compiled whole; the sizes of groups and the number of rows are data."""

    def there_and_back(scale, offs):
        arguments = {"shape": (scale.shape[0], 70), "format": "mxfp8"}
        other = tgl.to_torch_scale_layout(scale, offs, **arguments)
        backwards = torch.arange(scale.shape[0] - 1, -1, -1, dtype=torch.int32, device=scale.device)
        blocked = tgl.to_blocked_scale(scale, offs, backwards, **arguments)
        return other, tgl.from_torch_scale_layout(other, offs, **arguments), blocked

    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(there_and_back, backend=counter, fullgraph=True, dynamic=True)
    for sizes, rows in (((5, 0, 130), 140), ((140, 0, 0), 140), ((3, 3, 3), 9), ((128, 128, 44), 300)):
        routing = GroupSizes("", sizes, rows)
        scale, _ = rows_of_groups(routing, 70, "mxfp8", False, 0)
        for result, value in zip(compiled(scale, routing.ends()), there_and_back(scale, routing.ends())):
            assert torch.equal(result, value)
    assert counter.frame_count == 1


GOOD = {"shape": (204, 64), "format": "mxfp8"}
BAD = [
    ({"format": "int8"}, ValueError, "`format` must be one of .*nvfp4, mxfp4, fp8_tensor, fp8_block, but got 'int8'"),
    ({"format": "fp8_block"}, ValueError, "`format` must be mxfp8 .* for layout 'torch', but got 'fp8_block'"),
    ({"format": "fp8_tensor"}, ValueError, "`format` must be mxfp8 .* for layout 'torch', but got 'fp8_tensor'"),
    ({"shape": (204, 32)}, ValueError, r"`scale` must be of shape of compact mxfp8 scales = \(204, 1\), but got"),
    ({"shape": (200, 64)}, ValueError, r"`scale` must be of shape of compact mxfp8 scales = \(200, 2\), but got"),
    ({"shape": (4, 51, 64)}, ValueError, r"`shape` must be \(T, K\) when `offs` is given, but got \(4, 51, 64\)"),
    ({"shape": (-1, 64)}, ValueError, r"`shape` must be free of negative sizes, but got \(-1, 64\)"),
    ({"columnwise": True}, ValueError, "`scale` must be of shape of compact columnwise mxfp8 scales"),
    ({"offs": torch.tensor([204])}, TypeError, "`offs` must be int32"),
    ({"offs": torch.tensor([[204]], dtype=torch.int32)}, ValueError, "`offs` must be 1-D"),
    ({"offs": torch.tensor([204], dtype=torch.int32, device="meta")}, ValueError, "`offs` must be on cpu like `scale`"),
    ({"offs": None}, ValueError, r"`shape` must be \(G, N, K\) when `offs` is None, but got \(204, 64\)"),
    ({"scale": torch.zeros(204, 2)}, TypeError, "`scale` must be torch.uint8, but got torch.float32"),
]


@pytest.mark.parametrize("change, error, message", BAD)
def test_bad_input(change, error, message):
    arguments = {"scale": random_scales((204, 2), "mxfp8"), "offs": SMALL.ends(), **GOOD, **change}
    with pytest.raises(error, match=message):
        tgl.to_torch_scale_layout(**arguments)
    fake = {**arguments, "scale": arguments["scale"].to("meta")}
    if isinstance(fake["offs"], torch.Tensor) and fake["offs"].device.type == "cpu":
        fake["offs"] = fake["offs"].to("meta")
        with pytest.raises(error, match=message):
            tgl.to_torch_scale_layout(**fake)


def test_bad_layouts():
    scale, offs = random_scales((204, 2), "mxfp8"), SMALL.ends()
    with pytest.raises(ValueError, match="`layout` must be one of blocked, torch, te, te_swizzled, but got 'cutlass'"):
        torch.ops.tgl.scale_to_layout(scale, offs, shape=[204, 64], layout="cutlass", format="mxfp8")
    with pytest.raises(ValueError, match="`scale` must be of shape of blocked mxfp8 scales"):
        tgl.from_blocked_scale(scale, offs, **GOOD)
    with pytest.raises(ValueError, match="`block_2d` must be False except for weights in fp8_block"):
        tgl.to_te_scale_layout(scale, offs, **GOOD, block_2d=True)
    with pytest.raises(ValueError, match="`format` must be mxfp8 or nvfp4 or mxfp4 for layout 'te_swizzled'"):
        tgl.to_te_scale_layout(scale.float(), offs, shape=(204, 200), format="fp8_block", swizzled=True)
    with pytest.raises(RuntimeError, match="has no derivative, so no argument may require grad, but `scale` does"):
        scale = torch.zeros(204, 2, requires_grad=True)
        tgl.to_te_scale_layout(scale, offs, shape=(204, 200), format="fp8_block")


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("format, layout", CASES)
def test_nothing_is_read_on_the_host_of_a_device(format, layout, columnwise, grouped):
    """Meta tensors allow computation, and reading a value of theirs raises."""
    x, offs = (torch.zeros(204, 72), SMALL.ends()) if grouped else (torch.zeros(3, 68, 72), None)
    parts = tgl.group_quantize(x, offs, format=format)
    options = {"shape": tuple(x.shape), "layout": layout, "format": format, "columnwise": columnwise}
    scale = (parts.columnwise_scale if columnwise else parts.scale).to("meta")
    ends = None if offs is None else offs.to("meta")
    for name in ("scale_to_layout", "scale_from_layout"):
        implementation = backends.registry.registered(name, torch.device("cuda"))[-1]  # which serves every call
        assert not implementation.syncs
        _, args, keywords = backends.registry.described[name](scale, ends, **options)
        implementation.run(*args, **keywords)
        scale = keywords["out"]
