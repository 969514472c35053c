"""``group_quantize`` of matrices at slots of a packed tensor: the bytes of the matrices in order, and no copy."""

import math

import pytest
import torch

import tgl
from tests.memory import raw
from tests.quantize.comparing import spread
from tgl.meta.components import Components

G = 4
LOW, HIGH = -(1 << 31), (1 << 31) - 1
DELAYED = torch.tensor([1.0, 0.5, 4.0, 2.0])
OPTIONS = {
    "mxfp8": {"format": "mxfp8", "scale_layout": "blocked"},
    "mxfp8, compact": {"format": "mxfp8", "dtype": torch.float8_e5m2},
    "nvfp4": {"format": "nvfp4", "scale_layout": "blocked"},
    "nvfp4, squares": {"format": "nvfp4", "block_2d": True},
    "nvfp4, stochastic": {"format": "nvfp4", "rng": torch.tensor([3, 5])},
    "fp8_tensor": {"format": "fp8_tensor"},
    "fp8_tensor, delayed": {"format": "fp8_tensor", "scale": DELAYED},
    "fp8_block": {"format": "fp8_block"},
    "fp8_block, squares": {"format": "fp8_block", "block_2d": True},
}
options_of = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def table(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def uneven(matrices, transposed=False):
    """``matrices`` from the last to the first at uneven distances in a buffer of NaN, and which slots they are."""
    groups, rows, columns = matrices.shape
    unit = math.gcd(rows * columns, 8)
    size = rows * columns // unit
    starts = [1 + i * size + i * i for i in range(groups)][::-1]
    buffer = matrices.new_full(((starts[0] + size) * unit,), float("nan"))
    if transposed:
        view = buffer.as_strided((starts[0] + 1, rows, columns), (unit, 1, rows))
    else:
        view = buffer.as_strided((starts[0] + 1, rows, columns), (unit, columns, 1))
    for start, matrix in zip(starts, matrices):
        view[start] = matrix
    return view, table(*starts)


def differing(ours, theirs):
    """The names of the components that are not equal to the byte, or whose layouts differ."""
    return [
        name
        for name, a, b in zip(Components._fields, ours, theirs)
        if a.dtype != b.dtype or a.stride() != b.stride() or not torch.equal(raw(a), raw(b))
    ]


@options_of
@pytest.mark.parametrize("directions", [(True, True), (True, False), (False, True)], ids=["both", "rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_the_matrices_in_order(options, directions, dtype):
    options = dict(options, rowwise=directions[0], columnwise=directions[1])
    w = spread(G, 72, 200, dtype=dtype)
    wanted = tgl.group_quantize(w, None, **options)
    assert not differing(tgl.group_quantize(w.flip(0), None, slots=table(3, 2, 1, 0), **options), wanted)
    for transposed in (False, True):
        view, slots = uneven(w, transposed)
        assert not differing(tgl.group_quantize(view, None, slots=slots, **options), wanted)
    out = tgl.group_quantize(torch.ones_like(w), None, **options)
    view, slots = uneven(w)
    tgl.group_quantize(view, None, slots=slots, noop=torch.tensor(True), out=out, **options)
    assert not differing(out, tgl.group_quantize(torch.ones_like(w), None, **options))
    tgl.group_quantize(view, None, slots=slots, out=out, **options)
    assert not differing(out, wanted)


@options_of
@pytest.mark.parametrize("shape", [(4, 600, 520), (3, 1, 2), (5, 34, 6)], ids=str)
def test_steps_of_parts_and_of_several(options, shape):
    """Matrices larger than a step, of one row, and small ones of which a step takes many."""
    options = {name: value for name, value in options.items() if name != "scale"}
    if options["format"] == "nvfp4":
        shape = (shape[0], shape[1] + shape[1] % 2, shape[2])
    w = spread(*shape, dtype=torch.bfloat16)
    view, slots = uneven(w)
    wanted = tgl.group_quantize(w, None, **options)
    assert not differing(tgl.group_quantize(view, None, slots=slots, **options), wanted)


@options_of
@pytest.mark.parametrize("absent", [LOW, -1, "first beyond", HIGH])
def test_a_slot_out_of_range_reads_zeros(options, absent):
    w = spread(G, 40, 48, dtype=torch.bfloat16)
    view, slots = uneven(w)
    slots[2] = view.shape[0] if absent == "first beyond" else absent
    w[2] = 0
    w[3], slots[3] = w[1], slots[1]  # two groups may share a matrix
    got = tgl.group_quantize(view, None, slots=slots, **options)
    assert not differing(got, tgl.group_quantize(w, None, **options))


@options_of
def test_fewer_and_no_groups(options):
    options = {name: value for name, value in options.items() if name != "scale"}
    w = spread(G, 16, 32)
    got = tgl.group_quantize(w, None, slots=table(2), **options)
    assert not differing(got, tgl.group_quantize(w[2:3], None, **options))
    got = tgl.group_quantize(w, None, slots=table(), **options)
    assert not differing(got, tgl.group_quantize(w[:0], None, **options))


BAD = {
    "int64": (lambda s: s.long(), TypeError, r"`slots` must be int32 \(the slot of every group in `x`\), but got"),
    "2-D": (lambda s: s[None], ValueError, r"`slots` must be 1-D \[G\], but got shape \(1, 4\)"),
    "strided": (lambda s: torch.stack([s, s], 1)[:, 0], ValueError, "`slots` must be contiguous, but got strides"),
    "elsewhere": (lambda s: s.to("meta"), ValueError, "`slots` must be on cpu like `x`, but got meta"),
}


def refused(error, message, x, offs, slots):
    """Every way to quantise ``x`` raises, and writes nothing."""
    out = tgl.group_quantize(torch.ones(4, 16, 32), None, format="mxfp8")
    before = [t.clone() for t in out]
    for into in (None, out):
        with pytest.raises(error, match=message):
            tgl.group_quantize(x, offs, slots=slots, format="mxfp8", out=into)
    assert not differing(out, before)


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_tables(case):
    change, error, message = case
    refused(error, message, spread(G, 16, 32), None, change(table(3, 2, 1, 0)))


def test_bad_packed_tensors():
    w, slots = spread(G, 16, 32), table(3, 2, 1, 0)
    refused(ValueError, r"`slots` must be None when `offs` is given \(they number mat", w[0], table(3, 8, 8, 16), slots)
    refused(ValueError, r"`x` must be 3-D \[G, N, K\] when `offs` is None, but got", w[0], None, slots)
    refused(ValueError, r"`x` must be of 1 to 2\^31 - 1 slots when `slots` is given, but got", w[:0], None, slots)


def test_the_scale_has_one_number_for_each_group():
    with pytest.raises(ValueError, match=r"`scale` must be of shape \[G\] = \(2,\), but got shape \(4,\)"):
        tgl.group_quantize(spread(G, 16, 32), None, DELAYED, slots=table(3, 2), format="fp8_tensor")


def test_debug_checks():
    w = spread(G, 16, 32)
    out = tgl.group_quantize(w, None, format="mxfp8")
    with tgl.debug_checks():
        tgl.group_quantize(w, None, slots=table(1, 1, 1, 1), format="mxfp8", out=out)
        for bad in (-1, 4):
            for into in (None, out):
                with pytest.raises(ValueError, match=rf"stay within the 4 slots of `x`, .*slots\[2\] = {bad}"):
                    tgl.group_quantize(w, None, slots=table(0, 0, bad, 0), format="mxfp8", out=into)


def test_explain():
    w = spread(G, 16, 32)
    slots = table(3, 2, 1, 0)
    explained = tgl.explain(tgl.group_quantize, w, None, slots=slots, format="mxfp8")
    assert explained.chosen.name == "steps of aten"
    overload = torch.ops.tgl.group_quantize.default
    explained = tgl.explain(overload, w, None, None, None, None, slots, format="mxfp8")
    assert explained.chosen.name == "steps of aten"
    with pytest.raises(TypeError, match="`slots` must be int32"):
        tgl.explain(overload, w, None, None, None, None, slots.long(), format="mxfp8")
    offs = torch.tensor([4, 16], dtype=torch.int32)
    with pytest.raises(ValueError, match="`slots` must be None when `offs` is given"):
        tgl.explain(tgl.group_quantize, spread(16, 32), offs, slots=slots, format="mxfp8")


def test_an_implementation_without_slots_is_not_tried():
    w = spread(G, 16, 32)
    wanted = tgl.group_quantize(w, None, format="mxfp8")

    @tgl.register_implementation("group_quantize", "plain", device="cpu")
    def plain(x, offs, scale, row_scale, rng, noop, *, options, out):
        out.data.view(torch.uint8).zero_()

    try:
        assert differing(tgl.group_quantize(w, None, format="mxfp8"), wanted) == [
            "data",
            "scale",
            *Components._fields[3:5],
        ]
        got = tgl.group_quantize(w.flip(0), None, slots=table(3, 2, 1, 0), format="mxfp8")
        assert not differing(got, wanted)
    finally:
        tgl.backends.remove(plain)


def test_a_step_is_all_that_is_gathered():
    """A step copies only the parts of matrices that it takes: never all of x."""
    w, slots = spread(64, 48, 1024, dtype=torch.bfloat16), torch.arange(63, -1, -1, dtype=torch.int32)
    for options in ({"format": "mxfp8"}, {"format": "fp8_block"}, {"format": "fp8_tensor"}, {"format": "nvfp4"}):
        out = tgl.group_quantize(w, None, **options)
        tgl.group_quantize(w, None, slots=slots, out=out, **options)
        with torch.profiler.profile(profile_memory=True) as profiled:
            tgl.group_quantize(w, None, slots=slots, out=out, **options)
        most = max(event.self_cpu_memory_usage for event in profiled.events())
        assert most < w.nbytes, options
