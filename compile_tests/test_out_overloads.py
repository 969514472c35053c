"""Why ``.out`` overloads return nothing and carry no ``torch.Tag.out``: what PyTorch makes of ones that do.

Each test is a reason. One that fails tells that PyTorch has changed, so that the tag may be tried again.
"""

import pytest
import torch

OF_TORCH = "_tgl_test_out_overloads"

pytestmark = [
    pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="PyTorch 2.11 has no such tag"),
    pytest.mark.usefixtures("fresh_compiler"),
]


def product(a, bias, b):
    return a * b if bias is None else a * b + bias


def product_out(a, bias, b, *, out):
    """Writes the rows of a group, and leaves the tail."""
    out[:2].copy_(product(a, bias, b)[:2])
    return out


@pytest.fixture(scope="module")
def op():
    library = torch.library.Library(OF_TORCH, "DEF")
    arguments = "Tensor a, Tensor? bias, Tensor b"
    library.define(f"f({arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.out)
    library.define(f"f.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)", tags=tags)
    library.impl("f", product, "CompositeExplicitAutograd")
    library.impl("f.out", product_out, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{OF_TORCH}::f", lambda a, bias, b: torch.empty_like(a), lib=library)
    torch.library.register_fake(f"{OF_TORCH}::f.out", lambda a, bias, b, *, out: out, lib=library)
    yield getattr(torch.ops, OF_TORCH).f
    library._destroy()


def test_inductor_passes_an_absent_tensor_in_another_place(op):
    """Inductor passes the tensors first and the absent one after them, which raises."""
    a = torch.arange(4.0)
    compiled = torch.compile(lambda a, b: op(a, None, b) + 0, fullgraph=True)
    with pytest.raises((RuntimeError, TypeError)):
        compiled(a, a + 1)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_tail_of_a_buffer_is_lost(op, backend):
    """The tag says that all of the buffer is written, so a graph writes into another one and copies it."""
    a, out = torch.arange(4.0), torch.full((4,), 7.0)

    def call(a, out):
        op.out(a, None, a + 1, out=out)
        return out

    call(a, out)
    assert out.tolist() == [0, 2, 7, 7]
    torch.compile(call, fullgraph=True, backend=backend)(a, out)
    assert out.tolist() != [0, 2, 7, 7]
