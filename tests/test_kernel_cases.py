"""``tests.kernel_cases``: frames see what is written around an output, and the oracle is that of plain loops."""

import pytest
import torch

from tests import oracle
from tests.kernel_cases import (
    F32,
    ROUTINGS,
    column_major,
    ends,
    exact,
    framed,
    framed_like,
    gradient,
    integers,
    poisoned,
    product,
    row_sums,
    spans,
    stored,
)

SIZES = (3, 0, 5, 1)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7)])
def test_a_frame_sees_every_element_around_its_output(shape):
    frame = framed(*shape, dtype=torch.bfloat16)
    assert frame.inside.shape == shape
    frame.inside.fill_(1)
    assert frame.intact()
    flat, seen = frame.room.view(-1), 0
    for i in range(flat.numel()):
        before = flat[i].item()
        flat[i] = 3
        seen += not frame.intact()
        flat[i] = before
    assert seen == frame.room.numel() - frame.inside.numel()
    frame.refill()
    assert frame.inside.eq(7).all()


def test_frames_of_bytes():
    frame = framed_like([torch.empty(3, 5, dtype=torch.float8_e4m3fn), torch.empty(4, 6).t(), torch.empty(0)])
    assert [t.stride() for t in frame.inside] == [(5, 1), (1, 6), (1,)]
    assert frame.untouched()
    frame.inside[1].fill_(1)
    assert frame.intact()
    assert not frame.untouched()
    frame.refill()
    assert frame.untouched()
    for room in frame.rooms:
        for at in (0, 63, -64, -1):
            room[at] = 0
            assert not frame.intact()
            frame.refill()


def test_groups():
    assert ends(SIZES).tolist() == [3, 3, 8, 9]
    assert ends(SIZES).dtype == torch.int32
    assert ends(()).shape == (0,)
    assert list(spans(SIZES)) == [(0, slice(0, 3)), (1, slice(3, 3)), (2, slice(3, 8)), (3, slice(8, 9))]
    assert all(min(sizes) >= 0 for sizes in ROUTINGS.values())


@pytest.mark.parametrize("dtype", [torch.float64, F32])
def test_the_oracle_is_that_of_plain_loops(dtype):
    torch.manual_seed(0)
    a, b, dy = poisoned(integers(11, 6), SIZES), integers(4, 6, 5), poisoned(integers(11, 5), SIZES)
    bias, scale, offs = integers(4, 5), poisoned(integers(11), SIZES), ends(SIZES)
    numbers = [oracle.numpy_int(t) for t in (a, b, dy, bias, scale)]
    a_, b_, dy_, bias_, scale_ = numbers
    for vectors, plain in (((), ()), ((bias,), (bias_,)), ((bias, scale), (bias_, scale_))):
        got = product(a, b, SIZES, *vectors, dtype=dtype)
        assert got.dtype == dtype
        assert got.tolist() == oracle.grouped_gemm(a_, b_, offs, *plain).tolist()
    assert gradient(a, dy, SIZES, dtype).tolist() == oracle.grouped_gemm_wgrad(a_, dy_, offs).tolist()
    assert row_sums(dy, SIZES, dtype).tolist() == oracle.grouped_dbias(dy_, offs).tolist()


def test_operands():
    values = torch.arange(12.0).view(3, 4)
    assert torch.equal(column_major(values), values)
    assert column_major(values).stride() == (1, 3)
    for row_major, strides in ((True, (8, 1)), (False, (1, 8))):
        kept = stored(values.bfloat16(), row_major)
        assert torch.equal(kept, values.bfloat16())
        assert kept.stride() == strides
    assert set(integers(40, 40).unique().tolist()) == {-1.0, 0.0, 1.0}
    assert exact(40, 40).abs().unique().tolist() == [0.0, 1.0, 2.0, 4.0]
    tail = poisoned(torch.zeros(11, 2), SIZES)
    assert tail.isnan().all(1).tolist() == [False] * 9 + [True] * 2
