"""Operands and gradients at any strides, with the bits of contiguous ones."""

import pytest
import torch

import tgl
from tests.odd_strides import MATRICES, VECTORS, laid_out, plain
from tgl.testing import SIGNATURES, GroupSizes
from tgl.testing.samples import DIMENSIONS, SampleInput

ROUTING = GroupSizes("few", (3, 0, 40, 1), 47)
WIDE = {"K": 24, "M": 24, "N": 40, "I": 24}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WHERE = list(dict.fromkeys((*MATRICES, *VECTORS)))
DIFFERENTIABLE = [
    (name, i)
    for name, signatures in SIGNATURES.items()
    for i, signature in enumerate(signatures)
    if signature.differentiable and not signature.written
]


def sample(name, signature, dtype):
    """A call with all optional arguments, and the first of all options."""
    signature = SIGNATURES[name][signature]
    sizes = {**signature.dimensions, **{n: size for n, size in WIDE.items() if n in DIMENSIONS}}
    options = {key: values[0] for key, values in signature.options.items()}
    given = max(signature.presence(), key=len)
    return SampleInput(
        type(signature)(**{**vars(signature), "dimensions": sizes}), ROUTING, dtype, given=given, options=options
    )


def drawn(t, seed):
    """Values off the grid of integers, as those show the order of a sum; an index or ends as they are."""
    if t is None or not t.is_floating_point():
        return t
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(seed)).to(t.dtype)


def operands(made):
    drawable = {o.name for o in made.signature.operands if o.role == "data"}
    tensors = made.tensors(tail=0.0).items()
    return {name: drawn(t, seed) if name in drawable else t for seed, (name, t) in enumerate(tensors)}


def call(made, name, tensors):
    op = getattr(torch.ops.tgl, name).default
    args, kwargs = made.call(op, tensors)
    results = op(*args, **kwargs)
    return results if isinstance(results, tuple) else (results,)


def same(found, wanted, where):
    """Equal to the bit, strides included."""
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted)):
        assert (a is None) == (b is None), f"{where}: {i}"
        if a is not None:
            assert a.stride() == b.stride(), f"{where}: {i}"
            assert torch.equal(a, b), f"{where}: {i}"


@pytest.mark.cover(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, signature", DIFFERENTIABLE, ids=[f"{n}-{i}" for n, i in DIFFERENTIABLE])
def test_gradients(name, signature, dtype):
    """Gradients have the bits of contiguous ones; those of the second order, partly ATen's, agree up to a rounding."""
    made = sample(name, signature, dtype)
    tensors = operands(made)
    leaves = [t.requires_grad_() for t in tensors.values() if t is not None and t.is_floating_point()]
    results = [t for t in call(made, name, tensors) if t.requires_grad]

    def gradients(layout):
        grads = [layout(drawn(t, 7)) for t in results]
        first = torch.autograd.grad(results, leaves, grads, create_graph=True, allow_unused=True)
        used = [g for g in first if g is not None and g.requires_grad]
        grads = [layout(drawn(g, 8)) for g in used]
        return first, torch.autograd.grad(used, leaves, grads, retain_graph=True, allow_unused=True)

    for where in WHERE:
        first, second = gradients(lambda t, where=where: laid_out(t, where))
        wanted, wanted_second = gradients(lambda t, where=where: plain(laid_out(t, where)))
        same(first, wanted, where)
        torch.testing.assert_close(second, wanted_second, msg=lambda text, where=where: f"{where}: {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, signature", DIFFERENTIABLE, ids=[f"{n}-{i}" for n, i in DIFFERENTIABLE])
def test_operands(name, signature, dtype):
    made = sample(name, signature, dtype)
    tensors = operands(made)
    for where in WHERE:
        for argument, t in tensors.items():
            if t is None or not t.is_floating_point():
                continue
            odd = laid_out(t, where)
            if odd is not t:
                found = call(made, name, {**tensors, argument: odd})
                same(found, call(made, name, {**tensors, argument: plain(odd)}), f"{argument}, {where}")


def test_vectors_of_one_element():
    """Their stride is never used, so any is as good as 1."""
    a, b = torch.randn(3, 8), torch.randn(2, 8, 16)
    offs, slots, rows = torch.tensor([[1], [1], [2]], dtype=torch.int32).as_strided((3, 1), (1, 3))
    assert {t.stride() for t in (offs, slots, rows)} == {(3,)}
    found = tgl.grouped_gemm(a, b, offs, slots=slots, rows=rows)
    assert torch.equal(found, tgl.grouped_gemm(a[2:], b[1:], torch.tensor([1], dtype=torch.int32)))


COPIES = {
    "grouped_gemm": (torch.float32, {"a", "b"}),
    "grouped_gemm_wgrad": (torch.float32, {"a", "b"}),
    "grouped_gemm_low_rank": (torch.float32, {"a", "b", "low", "up"}),
    "grouped_dbias": (torch.bfloat16, {"dy"}),
    "grouped_activation": (torch.float32, {"x"}),
    "grouped_activation_backward": (torch.float32, {"dy", "x"}),
    "grouped_gemm_dactivation": (torch.float32, {"dy", "b", "h"}),
}


@pytest.mark.parametrize("name", COPIES)
def test_explain_reports_copies(name):
    dtype, copied = COPIES[name]
    made = sample(name, 0, dtype)
    tensors = operands(made)

    def copies(layout):
        args, kwargs = made.call(getattr(torch.ops.tgl, name).default, {n: layout(n, t) for n, t in tensors.items()})
        return dict(tgl.explain(name, *args, **kwargs).copies)

    assert copies(lambda _, t: t) == {}
    odd = copies(lambda n, t: laid_out(t, "every other element") if n in copied else t)
    assert odd == {n: tensors[n].nbytes for n in copied}


def test_explain_reports_copies_of_parts():
    x, w1, w2 = torch.randn(47, 24), torch.randn(4, 24, 80), torch.randn(4, 40, 24)
    found = tgl.explain(torch.ops.tgl.grouped_mlp, laid_out(x, "every other element"), w1, w2, ROUTING.ends())
    assert f"of which grouped_gemm copies `a` ({x.nbytes} bytes)" in str(found)


def test_explain_reports_copies_of_routing():
    logits, y, place = torch.randn(12, 6), torch.randn(24, 16), torch.randperm(24).int()
    for op, name, t, *more in (("topk_router", "logits", logits, 2), ("combine", "y", y, place, place, 2)):
        assert dict(tgl.explain(op, t, *more).copies) == {}
        assert dict(tgl.explain(op, laid_out(t, "every other element"), *more).copies) == {name: t.nbytes}
