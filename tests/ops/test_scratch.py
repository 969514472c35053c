"""Buffers that a thread keeps between the calls of CPU implementations."""

import torch

from tgl.backends.cpu import scratch as _scratch
from tgl.backends.cpu.scratch import Scratch


def test_the_next_call_gets_the_same_tensors():
    first = Scratch()
    lent = first.room("a", 3, 4), first.room("b", 5, dtype=torch.int32)
    first.keep()
    again = Scratch()
    assert again.room("a", 3, 4) is lent[0]
    assert again.room("b", 5, dtype=torch.int32) is lent[1]


def test_a_tensor_of_another_shape_or_dtype():
    for shape, dtype in (
        ((3, 4), torch.float32),
        ((2, 4), torch.float32),
        ((2, 4), torch.int32),
        ((9, 9), torch.int32),
    ):
        scratch = Scratch()
        lent = scratch.room("c", *shape, dtype=dtype)
        assert (lent.shape, lent.dtype) == (shape, dtype)
        assert lent.is_contiguous()
        scratch.keep()


def test_two_users_at_a_time_share_nothing():
    one, other = Scratch(), Scratch()
    one.room("d", 8).fill_(1)
    other.room("d", 8).fill_(2)
    assert one.room("d", 8).eq(1).all()


def test_nothing_large_is_kept():
    scratch = Scratch()
    large = scratch.room("e", _scratch._KEPT)
    scratch.keep()
    assert Scratch().room("e", 1).untyped_storage().data_ptr() != large.untyped_storage().data_ptr()
