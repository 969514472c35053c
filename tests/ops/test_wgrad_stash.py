"""``tgl.wgrad_stash_``: places, corners, bytes, and what it refuses."""

import pytest
import torch

import tgl

OP = torch.ops.tgl.wgrad_stash_.default


def buffers(microbatches=2, rows=5, dtype=torch.float32):
    return [torch.full((microbatches, rows, 3), 7.0).to(dtype), torch.full((microbatches, 2), 7, dtype=torch.int32)]


def sources(rows=4, dtype=torch.float32):
    return [torch.randn(rows, 3).to(dtype), torch.tensor([1, rows], dtype=torch.int32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_each_call_takes_the_next_place_and_leaves_the_rest(dtype):
    room, state = buffers(dtype=dtype), torch.zeros(2, dtype=torch.int64)
    given = [sources(rows, dtype) for rows in (4, 5)]
    for parts in given:
        tgl.wgrad_stash_(parts, state, room)
    assert state.tolist() == [2, sum(t.numel() * t.element_size() for parts in given for t in parts)]
    for place, (x, offs) in enumerate(given):
        assert torch.equal(room[0][place, : x.shape[0]].float(), x.float())
        assert (room[0][place, x.shape[0] :].float() == 7).all()
        assert torch.equal(room[1][place], offs)


def test_a_source_smaller_than_its_buffer():
    """Components whose last dimension runs over rows fill a corner too."""
    room, state = [torch.zeros(1, 3, 8)], torch.zeros(2, dtype=torch.int64)
    tgl.wgrad_stash_([torch.ones(3, 6)], state, room)
    assert (room[0][0, :, :6] == 1).all()
    assert (room[0][0, :, 6:] == 0).all()


def test_full_buffers():
    room, state = buffers(1), torch.tensor([1, 0])
    with pytest.raises(RuntimeError, match="`buffers` hold 1 microbatches already, which is their capacity"):
        tgl.wgrad_stash_(sources(), state, room)
    assert (room[0] == 7).all()
    assert state.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])  # allclose lacks fp8
def test_opcheck(dtype):
    torch.library.opcheck(OP, (sources(dtype=dtype), torch.zeros(2, dtype=torch.int64), buffers(dtype=dtype)))


BAD = {
    "state dtype": (lambda s, c, b: (s, c.int(), b), TypeError, "`state` must be int64, but got torch.int32"),
    "state shape": (lambda s, c, b: (s, c[:1], b), ValueError, r"`state` must be of shape \[2\] = \(2,\), but got"),
    "state device": (lambda s, c, b: (s, c.to("meta"), b), ValueError, r"`state` must be on cpu like `sources\[0\]`"),
    "state twice": (
        lambda s, c, b: (s, c[:1].expand(2), b),
        ValueError,
        "`state` must be free of elements that overlap",
    ),
    "negative": (lambda s, c, b: (s, c - 1, b), ValueError, "`state` must hold a number of microbatches, but got -1"),
    "places twice": (
        lambda s, c, b: (s, c, [b[0][:1].expand(2, 5, 3), b[1]]),
        ValueError,
        r"`buffers\[0\]` must be free of elements that overlap, but got strides \(0, 3, 1\)",
    ),
    "nothing": (lambda s, c, b: ([], c, []), ValueError, "`sources` must be one tensor or more, but got 0"),
    "counts": (lambda s, c, b: (s, c, b[:1]), ValueError, "`buffers` must be 2, one per source, but got 1"),
    "dtype": (
        lambda s, c, b: (s, c, [b[0].half(), b[1]]),
        TypeError,
        r"`buffers\[0\]` must be torch.float32 like `sour",
    ),
    "device": (lambda s, c, b: (s, c, [b[0].to("meta"), b[1]]), ValueError, r"`buffers\[0\]` must be on cpu like"),
    "rank": (lambda s, c, b: (s, c, [b[0][0], b[1]]), ValueError, r"`buffers\[0\]` must be 3-D \[M, \*capacity\]"),
    "places": (lambda s, c, b: (s, c, [b[0], b[1][:1]]), ValueError, r"`buffers\[1\]` must be \[2, \*capacity\]"),
    "rows": (
        lambda s, c, b: (s, c, [b[0][:, :3], b[1]]),
        ValueError,
        r"`buffers\[0\]` must be at least \(4, 3\) in each",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments(what):
    change, error, message = BAD[what]
    room = buffers()
    with pytest.raises(error, match=f"^tgl::wgrad_stash_: {message}"):
        tgl.wgrad_stash_(*change(sources(), torch.zeros(2, dtype=torch.int64), room))
    assert all((b == 7).all() for b in room)


def test_sources_that_require_grad():
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"writes into `state, buffers` and has no derivative.* `sources` does"):
        tgl.wgrad_stash_([x], torch.zeros(2, dtype=torch.int64), buffers()[:1])


def test_versions_move():
    """Autograd must see that the buffers have changed."""
    room, state = buffers(), torch.zeros(2, dtype=torch.int64)
    before = [t._version for t in (state, *room)]
    tgl.wgrad_stash_(sources(), state, room)
    assert all(t._version > v for t, v in zip((state, *room), before))
