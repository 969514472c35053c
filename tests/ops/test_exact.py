"""Integer inputs give exactly what plain int64 loops give, in every dtype, layout and routing."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tgl
from tests import oracle
from tgl.testing import GroupSizes, sample_inputs
from tgl.testing.samples import DTYPES, LAYOUTS, SampleInput

SMALL = (
    "ragged_tail",
    "even",
    "empty_first",
    "empty_middle",
    "empty_last",
    "all_empty",
    "no_rows",
    "no_groups",
    "one_token",
)
LARGE = ("below_tile", "above_tile", "groups_300")
OPS = {
    "grouped_gemm": (tgl.grouped_gemm, oracle.grouped_gemm),
    "grouped_gemm_wgrad": (tgl.grouped_gemm_wgrad, oracle.grouped_gemm_wgrad),
    "grouped_dbias": (tgl.grouped_dbias, oracle.grouped_dbias),
    "grouped_dbias_dscales": (tgl.grouped_dbias_dscales, oracle.grouped_dbias_dscales),
}


def compare(name: str, sample: SampleInput) -> None:
    op, reference = OPS[name]
    tensors = sample.tensors()
    results, expected = op(**tensors), reference(**{name: oracle.numpy_int(t) for name, t in tensors.items()})
    if isinstance(results, torch.Tensor):
        results, expected = (results,), (expected,)
    for result, value in zip(results, expected):
        assert torch.equal(result, oracle.rounded(value, result.dtype)), sample.name


@pytest.mark.parametrize("name", OPS)
def test_small_routings(name):
    for sample in sample_inputs(name, routings=SMALL):
        compare(name, sample)


@pytest.mark.parametrize("name", OPS)
def test_large_routings(name):
    for sample in sample_inputs(name, routings=LARGE, dtypes=(torch.bfloat16,)):
        if sample.layout == "row" and not sample.widened:
            compare(name, sample)


@given(
    name=st.sampled_from(sorted(OPS)),
    sizes=st.lists(st.integers(0, 9), max_size=12),
    tail=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    depth=st.integers(1, 9),
    width=st.integers(1, 9),
    choice=st.integers(0, 2),
)
def test_random_routings(name, sizes, tail, dtype, layout, depth, width, choice):
    signature = next(iter(sample_inputs(name))).signature
    dimensions = {"K": depth, "M": depth, "N": width}
    signature = type(signature)(signature.text, signature.requires, signature.wide, dimensions=dimensions)
    presence = signature.presence()
    routing = GroupSizes("random", tuple(sizes), sum(sizes) + tail)
    compare(name, SampleInput(signature, routing, dtype, layout, presence[choice % len(presence)]))


@given(
    sizes=st.lists(st.integers(0, 100), max_size=400),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]),
    strided=st.booleans(),
)
def test_splits_to_offsets(sizes, dtype, strided):
    splits = torch.tensor(sizes, dtype=dtype)
    if strided:
        splits = torch.stack([splits, splits + 1], dim=1)[:, 0]
    offs = tgl.splits_to_offsets(splits)
    assert offs.dtype == torch.int32
    assert offs.is_contiguous()
    assert offs.tolist() == np.cumsum(sizes, dtype=np.int64).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("main_dtype", ["operand", "accumulator"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_accumulate(dtype, main_dtype, layout):
    for sample in sample_inputs(
        "grouped_gemm_wgrad_accumulate_", dtypes=(dtype,), routings=("ragged_tail", "one_token")
    ):
        if sample.layout != layout or sample.widened:
            continue
        operands = sample.tensors()
        main = operands.pop("main_grad")
        if main_dtype == "accumulator" and dtype != torch.float64:
            main = main.float()
        product = oracle.grouped_gemm_wgrad(**{name: oracle.numpy_int(t) for name, t in operands.items()})
        expected = product + oracle.numpy_int(main)
        tgl.grouped_gemm_wgrad_accumulate_(**operands, main_grad=main)
        assert torch.equal(main, oracle.rounded(expected, main.dtype))


@pytest.mark.parametrize("zero", ["K", "N"])
def test_a_dimension_of_size_zero(zero):
    signature = next(iter(sample_inputs("grouped_gemm"))).signature
    signature = type(signature)(signature.text, signature.requires, dimensions={"K": 3, "N": 4, zero: 0})
    for sample in signature.samples(dtypes=DTYPES, routings=("ragged_tail",)):
        a, b, offs, bias, scale = sample.tensors().values()
        expected = oracle.grouped_gemm(*(oracle.numpy_int(t) for t in (a, b, offs, bias, scale)))
        assert torch.equal(tgl.grouped_gemm(a, b, offs, bias, scale), oracle.rounded(expected, a.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_out_dtype(dtype, out_dtype):
    mixes = dtype == out_dtype or torch.float64 not in (dtype, out_dtype)
    for name in ("grouped_gemm", "grouped_gemm_wgrad"):
        sample = next(iter(sample_inputs(name, dtypes=(dtype,))))
        op, reference = OPS[name]
        tensors = sample.tensors().values()
        if not mixes:
            with pytest.raises(TypeError, match="`out_dtype` must be"):
                op(*tensors, out_dtype=out_dtype)
            continue
        expected = reference(*(oracle.numpy_int(t) for t in tensors))
        assert torch.equal(op(*tensors, out_dtype=out_dtype), oracle.rounded(expected, out_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_integers(dtype):
    """da, db, dbias and dscale, each against its own loop; the tails of everything are NaN."""
    for sample in sample_inputs("grouped_gemm", dtypes=(dtype,), routings=("ragged_tail", "empty_first", "one_token")):
        tensors = sample.tensors()
        a, b, offs, bias, scale = list(tensors.values())[:5]
        rows = oracle.numpy_int(tensors["rows"]) if "rows" in tensors else None
        leaves = {n: t.requires_grad_() for n, t in tensors.items() if t is not None and t.is_floating_point()}
        y = tgl.grouped_gemm(**tensors)
        dy = sample.cotangent(y, sample.signature.outputs[0])
        grads = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy)))
        ia, ib, io, ibias, iscale, idy = (oracle.numpy_int(t) for t in (a, b, offs, bias, scale, dy))
        expected = {
            "a": oracle.grouped_gemm(idy, ib.transpose(0, 2, 1), io),
            "b": oracle.grouped_gemm_wgrad(ia, idy, io, rows),
        }
        if rows is not None:
            by_row, expected["a"] = expected["a"][: sample.routing.routed], np.zeros_like(ia)
            np.add.at(expected["a"], rows[: sample.routing.routed], by_row)
        if scale is not None:
            expected["bias"], expected["bias_scale"] = oracle.grouped_dbias_dscales(idy, ibias, iscale, io)
        elif bias is not None:
            expected["bias"] = oracle.grouped_dbias(idy, io)
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert torch.equal(grad, oracle.rounded(expected[name], leaves[name].dtype)), (name, sample.name)
