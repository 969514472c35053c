"""Components of a GroupedTensor: the bytes of ``group_quantize``, however the tensor was made."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tgl
from tests.tensor.cases import MATRICES, QUANTIZED, ROWS, arguments, assert_same_bytes, rows
from tgl.meta.formats import FORMATS
from tgl.meta.quantized import Options
from tgl.meta.table import OnePerName
from tgl.tensor import GroupedTensor

CLASSES = OnePerName(
    ("dense", *FORMATS),
    "CLASSES",
    {
        "dense": tgl.DenseGroupedTensor,
        "mxfp8": tgl.MXFP8GroupedTensor,
        "nvfp4": tgl.NVFP4GroupedTensor,
        "mxfp4": tgl.MXFP4GroupedTensor,
        "fp8_tensor": tgl.FP8TensorGroupedTensor,
        "fp8_block": tgl.FP8BlockGroupedTensor,
    },
)
DIRECTIONS = {"both": {}, "rowwise": {"columnwise": False}, "columnwise": {"rowwise": False}}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", QUANTIZED)
def test_rows_in_groups(case, direction):
    x, offs, t = rows(case, **DIRECTIONS[direction])
    expected = tgl.group_quantize(x, offs, **arguments(case, **DIRECTIONS[direction]))
    assert type(t) is CLASSES[t.format]
    assert (t.shape, t.dtype, t.num_groups) == (x.shape, x.dtype, 4)
    for actual, part in zip(t.components(), expected):
        assert_same_bytes(actual, part)
    values = t.dequantize(torch.float32)
    assert not values[44:].any(), "zero tail"
    assert (values[:44] - x[:44].float()).abs().max() <= x[:44].abs().max() / 3


@pytest.mark.parametrize("case", [c for c in MATRICES if c != "dense"])
def test_matrices(case):
    w = torch.randn(3, 32, 48)
    t = tgl.quantize(w, None, **arguments(case))
    for actual, part in zip(t.components(), tgl.group_quantize(w, None, **arguments(case))):
        assert_same_bytes(actual, part)
    for g, matrix in enumerate(w):
        one = tgl.quantize(matrix, None, **arguments(case))
        assert (one.shape, one.num_groups) == ((32, 48), 1)
        assert_same_bytes(one, t[g])
        assert torch.equal(one.dequantize(), t.dequantize()[g])


@pytest.mark.parametrize("case", ROWS)
def test_ways_to_give_the_groups(case):
    x = torch.randn(96, 32)
    offs = torch.tensor([24, 48, 72, 96], dtype=torch.int32)
    expected = tgl.quantize(x, offs, **arguments(case))
    for splits in (torch.tensor([24] * 4), torch.tensor([24] * 4, dtype=torch.uint8)):
        assert_same_bytes(tgl.quantize(x, None, m_splits=splits, **arguments(case)), expected)
    assert_same_bytes(tgl.quantize(x, None, num_groups=4, **arguments(case)), expected)
    offs.zero_()
    assert torch.equal(expected.offs, torch.tensor([24, 48, 72, 96], dtype=torch.int32)), "its own copy"


@pytest.mark.parametrize("case", ["dense", "mxfp8-blocked", "nvfp4", "fp8_tensor"])
def test_no_groups_and_no_rows(case):
    for sizes, tail in (((), 3), ((0, 0), 0), ((), 0)):
        x, _, t = rows(case, sizes, tail)
        assert (t.num_groups, t.shape) == (len(sizes), x.shape)
        assert torch.equal(t.dequantize(), torch.zeros_like(x))
        assert len(t.split_host()) == len(sizes)


@pytest.mark.parametrize("case", ROWS)
def test_values_of_dense_and_dtypes(case):
    x, _, t = rows(case, dtype=torch.float16)
    assert t.dequantize().dtype == torch.float16
    for dtype in (torch.float32, torch.bfloat16):
        wide = t.dequantize(torch.float32)
        assert torch.equal(t.dequantize(dtype), wide.to(dtype))
        assert torch.equal(t.to(dtype).dequantize(), wide.to(dtype))
    if case == "dense":
        assert torch.equal(t.dequantize()[:44], x[:44])
    elif t.rowwise_data is not None:
        assert_same_bytes(t.to(torch.float32).rowwise_data, t.rowwise_data)


def test_dense_values_are_contiguous():
    x = torch.randn(2, 6, 4).mT
    t = tgl.quantize(x, None, "dense")
    assert torch.equal(t.rowwise_data, x)
    assert t.rowwise_data.is_contiguous()


def test_options_of_another():
    _, offs, t = rows("mxfp8-e5m2-floor", columnwise=False)
    x = torch.randn(t.shape)
    expected = tgl.quantize(x, offs, **arguments("mxfp8-e5m2-floor", columnwise=False))
    assert_same_bytes(tgl.quantize(x, offs, t.options), expected)
    assert_same_bytes(tgl.quantize(x, offs, Options("mxfp8")), tgl.quantize(x, offs, "mxfp8"))
    dense = tgl.quantize(x, offs, "dense")
    assert_same_bytes(tgl.quantize(x, offs, dense.options), dense)


def test_a_list_of_one_shape_is_a_stack():
    w = torch.randn(3, 32, 64)
    assert_same_bytes(tgl.quantize(list(w), None, "mxfp8"), tgl.quantize(w, None, "mxfp8"))


@pytest.mark.parametrize("case", MATRICES)
def test_a_list_of_any_shapes(case):
    matrices = [torch.randn(n, k) for n, k in ((32, 64), (6, 130), (128, 2), (0, 16))]
    t = tgl.quantize(matrices, None, **arguments(case))
    assert (t.shape, t.num_groups) == ((32 * 64 + 6 * 130 + 128 * 2,), 4)
    parts = t.split()
    for part, matrix in zip(parts, matrices):
        assert_same_bytes(part, tgl.quantize(matrix, None, **arguments(case)))
        if part.rowwise_data.numel():
            assert part.rowwise_data.storage_offset() * part.rowwise_data.itemsize % 256 == 0
    assert torch.equal(t.dequantize(), torch.cat([part.dequantize().reshape(-1) for part in parts]))


@pytest.mark.parametrize("case", MATRICES)
def test_empty_has_the_structure_that_quantize_gives(case):
    options = arguments(case)
    w = torch.randn(3, 32, 48)
    assert GroupedTensor.empty(w.shape, source_dtype=w.dtype, **options).same_structure(
        tgl.quantize(w, None, **options)
    )
    assert GroupedTensor.empty((32, 48), source_dtype=w.dtype, **options).same_structure(
        tgl.quantize(w[0], None, **options)
    )
    shapes = [(4, 32), (6, 16)]
    matrices = [torch.randn(shape) for shape in shapes]
    assert GroupedTensor.empty(shapes, source_dtype=w.dtype, **options).same_structure(
        tgl.quantize(matrices, None, **options)
    )
    if "block_2d" not in options:
        _, _, t = rows(case)
        buffer = GroupedTensor.empty(t.shape, num_groups=4, source_dtype=t.dtype, **options)
        assert buffer.same_structure(t)
        assert not buffer.offs.any(), "empty groups until it is filled"


def test_nothing_is_read_on_the_host():
    """Fake tensors have no values; sizes follow from (T, K, G)."""
    with FakeTensorMode():
        x, offs = torch.empty(70, 64, dtype=torch.bfloat16), torch.empty(5, dtype=torch.int32)
        t = tgl.quantize(x, offs, "mxfp8", scale_layout="blocked")
        assert "groups=5" in repr(t)
        assert t.columnwise_scale.shape == (512 * 5,)
        assert t.quantize_(x, offs=offs).dequantize().shape == x.shape
    assert "shape=(7, 64)" in repr(GroupedTensor.empty((7, 64), "nvfp4", num_groups=3, device="meta"))


def test_repr():
    _, _, t = rows("mxfp8-blocked", scaling="even")
    assert repr(t) == (
        "MXFP8GroupedTensor(shape=(48, 96), dtype=torch.bfloat16, device=cpu, groups=4, element=float8_e4m3fn, "
        "rowwise, columnwise, scaling=even, scale_layout=blocked)"
    )
    dense = tgl.quantize(torch.ones(2, 4, 4, requires_grad=True), None, "dense")
    assert repr(dense) == (
        "DenseGroupedTensor(shape=(2, 4, 4), dtype=torch.float32, device=cpu, groups=2, grad_fn=<WrapBackward>)"
    )
