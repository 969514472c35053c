"""The sample generator: signatures, routings, layouts, and that it makes what it says."""

import pytest
import torch

from tgl.testing import ROUTINGS, SIGNATURES, GroupSizes, Signature, sample_inputs
from tgl.testing.samples import LAYOUTS, SampleInput, lay_out
from tgl.testing.scaled_samples import QuantizedSignature

TEXT = "a[T,2K], b[G,K,N], offs[G]:ends, bias[G,N]?, scale[T]?, out[T,N]! -> y[T,N], z[G]"


def test_signature():
    signature = Signature(TEXT, requires={"scale": "bias"}, dimensions={"K": 3, "N": 5})
    assert [o.name for o in signature.operands] == ["a", "b", "offs", "bias", "scale", "out"]
    assert [o.name for o in signature.outputs] == ["y", "z"]
    assert [o.name for o in signature.written] == ["out"]
    assert signature.presence() == [(), ("bias",), ("bias", "scale")]
    routing = GroupSizes("r", (2, 0), 4)
    assert [signature.shape(o, routing) for o in signature.operands] == [(4, 6), (2, 3, 5), (2,), (2, 5), (4,), (4, 5)]


@pytest.mark.parametrize("text", ["a", "a[T", "a[T] b[T]", "a[T]:rows", "a[T]??"])
def test_malformed_signatures(text):
    with pytest.raises(ValueError, match="expected `name"):
        _ = Signature(text).operands


def test_routings_cover_what_they_should():
    every = list(ROUTINGS.values())
    assert any(r.sizes and not r.sizes[0] and any(r.sizes) for r in every)
    assert any(len(r.sizes) > 2 and not r.sizes[1] and r.sizes[0] and r.sizes[-1] for r in every)
    assert any(r.sizes and not r.sizes[-1] and any(r.sizes) for r in every)
    assert any(r.sizes and not any(r.sizes) and r.rows for r in every)
    assert any(not r.sizes for r in every)
    assert any(r.rows == 1 for r in every)
    assert {127, 128, 129} <= {size for r in every for size in r.sizes}
    assert any(len(r.sizes) == 300 for r in every)
    assert sum(r.rows > r.routed for r in every) > 4
    for r in every:
        assert r.ends().tolist() == [sum(r.sizes[: g + 1]) for g in range(len(r.sizes))]
        assert [s.stop - s.start for s in r.segments()] == list(r.sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6), (5,)], ids=str)
def test_layouts_keep_the_values(layout, shape):
    values = torch.randn(shape)
    if layout == "expanded" and len(shape) > 1:
        values = values[..., :1].expand(shape)
    laid = lay_out(values, layout)
    assert torch.equal(laid, values)
    if len(shape) > 1:
        strides = {"row": (6, 1), "column": (1, 4), "padded": (14, 1), "expanded": (1, 0)}
        assert laid.stride()[-2:] == strides[layout]
    if layout == "padded":
        assert not laid.is_contiguous()
        assert laid.storage_offset()


def test_tail_and_dtypes():
    signature = Signature("x[T,N], w[G,N], offs[G]:ends, probs[T]?, buf[T,N]! ->", wide=("probs",))
    sample = SampleInput(signature, GroupSizes("r", (2, 1), 5), torch.bfloat16, given=("probs",), widened=True)
    tensors = sample.tensors()
    assert tensors["x"][3:].isnan().all()
    assert tensors["probs"][3:].isnan().all()
    assert not any(tensors[n].isnan().any() for n in ("w", "buf"))
    assert not tensors["x"][:3].isnan().any()
    assert tensors["probs"].dtype == torch.float32
    assert tensors["x"].dtype == torch.bfloat16
    assert (sample.tensors(tail=7.0)["x"][3:] == 7).all()
    assert torch.equal(sample.tensors(tail=7.0)["x"][:3], tensors["x"][:3])


def test_derived_arguments():
    """Derived arguments see the others, the options and the tail, keep their place, and may be written by the op."""

    def derive(sample, made, tail):
        assert made["scale"] is None
        rows = made["x"].shape[0]
        return {"scale": torch.full((rows,), tail), "out": torch.zeros(rows, dtype=torch.uint8)}

    text = "x[T,N], scale[]:derived, offs[G]:ends, out[]:derived! ->"
    signature = Signature(text, derive=derive, dtypes=(torch.bfloat16,))
    assert [o.name for o in signature.written] == ["out"]
    assert not any(o.by_row for o in signature.operands if o.role == "derived")
    sample = next(signature.samples(routings=("even",)))
    tensors = sample.tensors(tail=3.0)
    assert sample.dtype == tensors["x"].dtype == torch.bfloat16
    assert list(tensors) == ["x", "scale", "offs", "out"]
    assert (tensors["scale"] == 3).all()
    assert tensors["out"].dtype == torch.uint8


@pytest.mark.parametrize("name", SIGNATURES)
def test_samples_cover_every_axis_and_have_unique_names(name):
    for signature in SIGNATURES[name]:
        samples = list(signature.samples())
        assert {s.routing.name for s in samples} == set(ROUTINGS)
        assert {s.dtype for s in samples} == set(signature.dtypes)
        if not isinstance(signature, QuantizedSignature):  # components have one layout, and their axes vary in turn
            assert {(s.routing.name, s.dtype) for s in samples} == {(r, d) for r in ROUTINGS for d in signature.dtypes}
            assert {(s.dtype, s.layout) for s in samples} == {(d, x) for d in signature.dtypes for x in LAYOUTS}
        assert {s.given for s in samples} == set(signature.presence())
        assert len({s.name for s in samples}) == len(samples)


def test_own_routings_and_the_full_product():
    mine = GroupSizes("mine", (1, 2), 4)
    samples = list(sample_inputs("grouped_dbias", routings=(mine, "even"), dtypes=(torch.float32,), full=True))
    assert [(s.routing.name, s.layout) for s in samples] == [(r, x) for r in ("mine", "even") for x in LAYOUTS]


def test_an_op_without_a_signature():
    with pytest.raises(ValueError, match=r"`op` must be one of .*grouped_gemm"):
        next(sample_inputs("matmul"))
