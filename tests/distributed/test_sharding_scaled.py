"""Sharding rules of the ops on quantised operands, two ranks against one, without communication."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import tgl
import tgl.distributed
from tests.memory import same_bytes
from tgl.meta.formats import FORMATS
from tgl.meta.table import OnePerName

T, G, K, N = 160, 3, 256, 512
OFFS = torch.tensor([40, 40, 129], dtype=torch.int32)
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
# Of columnwise scales, by features.
SCALES = OnePerName(FORMATS, "SCALES", {"mxfp8": S1, "nvfp4": S0, "mxfp4": S0, "fp8_tensor": R, "fp8_block": S1})


def place(t: Tensor | None, placement) -> DTensor | None:
    """This rank's part of ``t``, which every rank has: gloo does not carry FP8."""
    if t is None:
        return None
    part = t if placement == R else t.chunk(2, placement.dim)[dist.get_rank()].contiguous()
    return DTensor.from_local(part, init_device_mesh("cpu", (2,)), [placement], run_check=False)


def whole(t: DTensor) -> Tensor:
    local = t.to_local()
    if local.dtype.is_floating_point and local.dtype.itemsize == 1:
        local = local.view(torch.uint8)
    return DTensor.from_local(local, t.device_mesh, t.placements, run_check=False).full_tensor()


def components(format: str):
    """Rows ``[T, K]``, ``[T, N]`` and a weight ``[G, N, K]``; amax only where there is one."""
    made = [
        tgl.group_quantize(torch.randn(T, K, dtype=torch.bfloat16), OFFS, format=format),
        tgl.group_quantize(torch.randn(T, N, dtype=torch.bfloat16), OFFS, format=format),
        tgl.group_quantize(
            torch.randn(G, N, K, dtype=torch.bfloat16), None, format=format, block_2d=format == "fp8_block"
        ),
    ]
    return [c._replace(amax=used(c.amax), columnwise_amax=used(c.columnwise_amax)) for c in made]


def used(amax: Tensor) -> Tensor | None:
    return amax if amax.numel() else None


def scale_placement(format: str, placement):
    return R if format == "fp8_tensor" else placement


def check(actual: DTensor, expected: Tensor, placement, counter: CommDebugMode) -> None:
    assert counter.get_total_counts() == 0
    assert actual.placements == (placement,)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-5, atol=1e-4)


def check_gemm(format: str, direction: str) -> None:
    """Fprop contracts over K and dgrad over N; each can be sharded, and so can what is left."""
    x, dy, w = components(format)
    amax = format == "nvfp4"
    transposed = format != "mxfp8"
    if direction == "rowwise":
        a, b = (x.data, x.scale), (w.data, w.scale)
        amaxes, kept, contracted = (x.amax, w.amax), S1, S2
        bias = torch.randn(G, N)
    else:
        a, b = (dy.data, dy.scale), (w.columnwise_data, w.columnwise_scale)
        amaxes, kept, contracted = (dy.amax, w.columnwise_amax), (S1 if transposed else S2), (S2 if transposed else S1)
        bias = torch.randn(G, K)
    amaxes = amaxes if amax else (None, None)
    options = {"format": format, "b_direction": direction, "out_dtype": torch.float32}
    expected = tgl.grouped_gemm_scaled(*a, *b, OFFS, *amaxes, bias, **options)
    for result, a_placement, b_placement, bias_placement in ((S1, R, kept, S1), (Partial(), S1, contracted, R)):
        operands = (
            place(a[0], a_placement),
            place(a[1], scale_placement(format, a_placement)),
            place(b[0], b_placement),
            place(b[1], scale_placement(format, b_placement)),
            place(OFFS, R),
            *(place(t, R) for t in amaxes),
            place(bias, bias_placement),
        )
        with CommDebugMode() as counter:
            y = tgl.grouped_gemm_scaled(*operands, **options)
        check(y, expected, result, counter)


def check_packed(format: str, over_rows: bool) -> None:
    """Rows N and columns K of the matrices; either is what is contracted."""
    f, w = FORMATS[format], components(format)[2]
    a = torch.randn(T, N if over_rows else K, dtype=torch.bfloat16)
    bias = torch.randn(G, K if over_rows else N)
    amax = w.amax if f.decodes_with_amax else None
    options = {"format": format, "over_rows": over_rows, "out_dtype": torch.float32}
    expected = tgl.grouped_gemm_packed(a, w.data, w.scale, OFFS, amax, bias, **options)
    for placement, contracted in ((S1, over_rows), (S2, not over_rows)):
        operands = (
            place(a, S1 if contracted else R),
            place(w.data, placement),
            place(w.scale, scale_placement(format, placement)),
            place(OFFS, R),
            place(amax, R),
        )
        # Of a partial sum every rank adds its part of the bias.
        added = R if contracted else S1
        with CommDebugMode() as counter:
            y = tgl.grouped_gemm_packed(*operands, place(bias, added), **options)
        check(y, expected, Partial() if contracted else S1, counter)


def check_row_scaled() -> None:
    """FP8 operands with a scale for each row: rows of the matrices, and what is contracted; rows of a gradient."""
    a, b, c = (torch.randint(-2, 3, shape).float().to(torch.float8_e4m3fn) for shape in ((T, K), (G, N, K), (N, T)))
    a_scale, b_scale = torch.exp2(torch.randint(-2, 3, (T,)).float()), torch.rand(G, N)
    options = {"out_dtype": torch.float32}
    expected = tgl.grouped_gemm_row_scaled(a, a_scale, b, b_scale, OFFS, **options)
    for result, *placements in ((S1, R, R, S1, S1), (Partial(), S1, R, S2, R)):
        operands = [place(t, p) for t, p in zip((a, a_scale, b, b_scale, OFFS), (*placements, R))]
        with CommDebugMode() as counter:
            y = tgl.grouped_gemm_row_scaled(*operands, **options)
        check(y, expected, result, counter)
    of_a = torch.rand(G, K)
    expected = tgl.grouped_gemm_row_scaled_wgrad(a.t().contiguous(), of_a, c, b_scale, OFFS, **options)
    for result, *placements in ((S1, S0, S1, R, R), (S2, R, R, S0, S1)):
        given = (a.t().contiguous(), of_a, c, b_scale, OFFS)
        operands = [place(t, p) for t, p in zip(given, (*placements, R))]
        with CommDebugMode() as counter:
            dw = tgl.grouped_gemm_row_scaled_wgrad(*operands, **options)
        check(dw, expected, result, counter)


def check_wgrad(format: str) -> None:
    x, dy, _ = components(format)
    operands = dy.columnwise_data, dy.columnwise_scale, x.columnwise_data, x.columnwise_scale
    amaxes = (dy.columnwise_amax, x.columnwise_amax) if format == "nvfp4" else (None, None)
    options = {"format": format, "out_dtype": torch.float32}
    expected = tgl.grouped_gemm_scaled_wgrad(*operands, OFFS, *amaxes, **options)
    data = S1 if format == "mxfp8" else S0
    scale = SCALES[format]
    for result, placements in ((S1, (data, scale, R, R)), (S2, (R, R, data, scale))):
        shards = [place(t, p) for t, p in zip(operands, placements)]
        offs, scales = place(OFFS, R), [place(t, R) for t in amaxes]
        with CommDebugMode() as counter:
            dw = tgl.grouped_gemm_scaled_wgrad(*shards, offs, *scales, **options)
        check(dw, expected, result, counter)


def check_quantize(format: str) -> None:
    """Every component of a shard is the shard of the component."""
    x, w = torch.randn(T, K, dtype=torch.bfloat16), torch.randn(G, N, K, dtype=torch.bfloat16)
    rows = torch.arange(T - 1, -1, -1, dtype=torch.int32)
    cases = [(x, OFFS, (1,), {"dbias": True}), (x[:5], OFFS, (1,), {"rows": rows % 5}), (w, None, (1, 2), {})]
    if format == "fp8_block":
        cases.append((w, None, (1, 2), {"block_2d": True}))
    for t, offs, dims, more in cases:
        for rowwise, columnwise in ((True, True), (True, False), (False, True)):
            options = {"format": format, "rowwise": rowwise, "columnwise": columnwise, **more}
            expected = tgl.group_quantize(t, offs, **options)
            for dim in dims:
                shard, ends = place(t, Shard(dim)), place(offs, R)
                placed = {name: place(value, R) if name == "rows" else value for name, value in options.items()}
                with CommDebugMode() as counter:
                    actual = tgl.group_quantize(shard, ends, **placed)
                assert counter.get_total_counts() == 0
                for name, mine, theirs in zip(actual._fields, actual, expected):
                    if theirs.numel():
                        assert mine.placements[0].is_shard(), name
                        assert mine.shape == theirs.shape, name
                        assert same_bytes(whole(mine), theirs), name


def check_activation_quantize(format: str, direction: str, kind: str) -> None:
    """Columns of the weights give columns of the product, and those, in whole pairs, columns of the components."""
    x, dy, w = components(format)
    a, b, width = (x.data, x.scale), (w.data, w.scale), N
    kept = S1
    if direction == "columnwise":
        a, b, width = (dy.data, dy.scale), (w.columnwise_data, w.columnwise_scale), K
        kept = S2 if format == "mxfp8" else S1
    bias, probs = torch.randn(G, width), torch.rand(T)
    activation, quantizing = {"kind": kind, "interleaved": True}, {"format": format}
    operands = (place(a[0], R), place(a[1], R), place(b[0], kept), place(b[1], kept), place(OFFS, R), None, None)
    with CommDebugMode() as counter:
        h, made = tgl.grouped_gemm_scaled_activation_quantize(
            *operands, place(bias, S1), place(probs, R), b_direction=direction, **activation, **quantizing
        )
    check(h, tgl.grouped_gemm_scaled(*a, *b, OFFS, None, None, bias, b_direction=direction, **quantizing), S1, counter)
    wanted = tgl.grouped_activation_quantize(whole(h), OFFS, probs, **activation, **quantizing)
    with CommDebugMode() as counter:
        apart = tgl.grouped_activation_quantize(h, place(OFFS, R), place(probs, R), **activation, **quantizing)
    assert counter.get_total_counts() == 0
    for name, mine, again, theirs in zip(made._fields, made, apart, wanted):
        if theirs.numel():
            assert mine.placements == again.placements, name
            assert mine.placements[0].is_shard(), name
            assert mine.shape == again.shape == theirs.shape, name
            assert same_bytes(whole(mine), theirs), name
            assert same_bytes(whole(again), theirs), name


def check_activation_quantize_of_the_whole() -> None:
    """Calls whose shard needs the other shards' data: halves side by side, half a block, scales of a whole group."""
    cases = {
        "mxfp8": ({"interleaved": False}, {}),
        "fp8_block": ({"interleaved": True}, {"b_direction": "columnwise"}),
        "fp8_tensor": ({"kind": "srelu"}, {}),
    }
    for format, (activation, direction) in cases.items():
        x, dy, w = components(format)
        a, b, width = (x.data, x.scale), (w.data, w.scale), N
        if direction:
            a, b, width = (dy.data, dy.scale), (w.columnwise_data, w.columnwise_scale), K
        bias, options = torch.randn(G, width), {"format": format, **activation, **direction}
        expected = tgl.grouped_gemm_scaled_activation_quantize(*a, *b, OFFS, None, None, bias, **options)
        operands = (*(place(t, R) for t in (*a, *b, OFFS)), None, None, place(bias, S1))
        h, made = tgl.grouped_gemm_scaled_activation_quantize(*operands, **options)
        for mine, theirs in zip((h, *made[:-1]), (expected[0], *expected[1][:-1])):
            assert mine.placements == (R,)
            assert same_bytes(whole(mine), theirs)
        again = tgl.grouped_activation_quantize(place(whole(h), S1), place(OFFS, R), **activation, format=format)
        for mine, theirs in zip(again[:-1], made[:-1]):
            assert mine.placements == (R,)
            assert same_bytes(whole(mine), whole(theirs))


def check_whole_tensor_scales_are_made_of_the_whole() -> None:
    """Formats with one scale for a group: a shard's amax is not the tensor's, so the shards are gathered."""
    x = torch.randn(T, K, dtype=torch.bfloat16)
    for format in ("fp8_tensor", "nvfp4"):
        actual = tgl.group_quantize(place(x, S1), place(OFFS, R), format=format)
        for mine, theirs in zip(actual, tgl.group_quantize(x, OFFS, format=format)):
            assert same_bytes(whole(mine), theirs)


def check_what_does_not_divide() -> None:
    """Blocks are not torn apart: 48 columns are three blocks of 16."""
    x, w = torch.randn(T, 48, dtype=torch.bfloat16), torch.randn(G, N, 48, dtype=torch.bfloat16)
    a, b = tgl.group_quantize(x, OFFS, format="nvfp4"), tgl.group_quantize(w, None, format="nvfp4")
    expected = tgl.grouped_gemm_scaled(a.data, a.scale, b.data, b.scale, OFFS, a.amax, b.amax, format="nvfp4")
    operands = place(a.data, S1), place(a.scale, R), place(b.data, S2), place(b.scale, R), place(OFFS, R)
    operands += place(a.amax, R), place(b.amax, R)
    actual = tgl.grouped_gemm_scaled(*operands, format="nvfp4")
    assert actual.placements == (R,)
    assert torch.equal(actual.full_tensor(), expected)
    mxfp8 = tgl.group_quantize(place(x, S1), place(OFFS, R), format="mxfp8")
    assert torch.equal(whole(mxfp8.scale), tgl.group_quantize(x, OFFS, format="mxfp8").scale)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_gemm(ranks, format, direction):
    ranks(check_gemm, format, direction)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("over_rows", [False, True])
def test_packed(ranks, format, over_rows):
    ranks(check_packed, format, over_rows)


@pytest.mark.parametrize("format", FORMATS)
def test_wgrad(ranks, format):
    ranks(check_wgrad, format)


def test_row_scaled_gemms(ranks):
    ranks(check_row_scaled)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "fp8_block"])
def test_quantize(ranks, format):
    ranks(check_quantize, format)


@pytest.mark.parametrize("format", ["mxfp8", "fp8_block"])
@pytest.mark.parametrize(("direction", "kind"), [("rowwise", "swiglu"), ("rowwise", "srelu"), ("columnwise", "srelu")])
def test_activation_quantize(ranks, format, direction, kind):
    ranks(check_activation_quantize, format, direction, kind)


def test_activation_quantize_with_tensor_wise_scales(ranks):
    ranks(check_activation_quantize_of_the_whole)


def test_tensor_wise_scales_come_from_all_shards(ranks):
    ranks(check_whole_tensor_scales_are_made_of_the_whole)


def test_blocks_that_the_mesh_does_not_divide(ranks):
    ranks(check_what_does_not_divide)
