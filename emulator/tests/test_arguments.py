"""Tensors among the arguments of compiled functions."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
import tvm_ffi

from cute_emulator.arguments import as_cuda, pretend_cuda, storage_spans, tensor_span, walk


class Pair(NamedTuple):
    first: object
    second: object


@dataclasses.dataclass(frozen=True)
class Operand:
    data: object
    scale: int


@dataclasses.dataclass
class Slotted:
    __slots__ = ("data",)
    data: object


@pytest.mark.parametrize(
    "view, start, size",
    [
        (lambda t: t, 0, 96),
        (lambda t: t[1:3, 2:4], 32, 32),
        (lambda t: t[:, 1], 4, 76),
        (lambda t: t.t(), 0, 96),
        (lambda t: t[:, :0], 0, 0),
        (lambda t: t[0].expand(5, 6), 0, 24),
    ],
)
def test_the_span_of_a_view_is_what_it_can_reach(view, start, size):
    t = torch.zeros(4, 6)
    v = view(t)
    assert tensor_span(v) == (v.data_ptr(), size)
    if size:
        assert v.data_ptr() - t.data_ptr() == start
        assert pretend_cuda(v.__dlpack__()) == (v.data_ptr(), size)


@pytest.mark.parametrize("dtype, size", [(torch.bfloat16, 2), (torch.float8_e4m3fn, 1), (torch.int64, 8)])
def test_spans_count_bytes(dtype, size):
    t = torch.zeros(3, 5).to(dtype)
    assert tensor_span(t) == (t.data_ptr(), 15 * size)
    assert pretend_cuda(t.__dlpack__()) == (t.data_ptr(), 15 * size)


def test_a_consumed_capsule_has_no_span():
    capsule = torch.zeros(3).__dlpack__()
    torch.from_dlpack(capsule)
    assert pretend_cuda(capsule) is None


def test_containers_are_opened():
    a, b, c, d = (torch.zeros(i + 1) for i in range(4))
    found = list(walk([a, Pair(b, [c]), {"k": Operand(d, 3)}, Slotted(a), 7]))
    assert [id(x) for x in found if isinstance(x, torch.Tensor)] == [id(x) for x in (a, b, c, d, a)]
    assert [x for x in found if isinstance(x, int)] == [3, 7]


def test_nested_tensors_become_cuda_tensors_of_the_same_memory():
    t = torch.arange(6.0).view(2, 3)
    pair = as_cuda(Pair(t, [t, None]))
    assert type(pair) is Pair
    operand = as_cuda(Operand(t, 3))
    assert (type(operand), operand.scale) == (Operand, 3)
    for x in (pair.first, pair.second[0], operand.data):
        assert isinstance(x, tvm_ffi.Tensor)
        assert x.device.type == "cuda"
        assert tuple(x.shape) == (2, 3)
    assert pair.second[1] is None


def _of_a_transform() -> torch.Tensor:
    left = []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(torch.zeros(3))
    return left[0]


def _freed() -> torch.Tensor:
    t = torch.zeros(3)
    t.untyped_storage().resize_(0)
    return t


STAND_INS = {
    "of a transform": _of_a_transform,
    "functional, as compilers trace": lambda: torch._to_functional_tensor(torch.zeros(3)),
    "fake": lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.zeros(3)),
    "without bytes": _freed,
    "of oneDNN's layout": lambda: torch.zeros(3).to_mkldnn(),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "meta": lambda: torch.zeros(3, device="meta"),
}


@pytest.mark.parametrize("kind", STAND_INS)
def test_storages_are_found_beside_tensors_without_memory(kind):
    left, t = STAND_INS[kind](), torch.zeros(100)
    assert storage_spans([t.data_ptr()]) == [(t.data_ptr(), 400)]
    assert isinstance(left, torch.Tensor)  # alive until here


def test_storages_of_addresses():
    t = torch.zeros(100)
    span = (t.untyped_storage().data_ptr(), 400)
    for _ in range(2):
        assert storage_spans([t.data_ptr() + 8, t.data_ptr() + 399]) == [span]
    address = t.data_ptr()
    del t
    assert span not in storage_spans([address + 400])
