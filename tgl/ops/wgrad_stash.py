"""``tgl::wgrad_stash_``: copy the operands of a weight gradient into buffers that outlive the graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..meta import specs
from ._library import register
from ._requested_gradients import define_requested

NAME = "wgrad_stash_"


def _kernel(sources: Sequence[Tensor], state: Tensor, buffers: Sequence[Tensor]) -> None:
    specs.wgrad_stash_(sources, state, buffers)
    room = buffers[0].shape[0]
    if state.device.type == "cpu":
        held = int(state[0])
        if held < 0:
            raise ValueError(f"tgl::{NAME}: `state` must hold a number of microbatches, but got {held}")
        if held >= room:
            raise RuntimeError(f"tgl::{NAME}: `buffers` hold {held} microbatches already, which is their capacity")
    else:
        torch._assert_async(state[0] >= 0, f"tgl::{NAME}: `state` must hold a number of microbatches")
        torch._assert_async(state[0] < room, f"tgl::{NAME}: `buffers` hold as many microbatches as their capacity")
    for source, buffer in zip(sources, buffers):
        corner = buffer[tuple(slice(size) for size in (room, *source.shape))]
        corner, source = _writable(corner), _writable(source)
        corner.index_copy_(0, state[:1], source.unsqueeze(0))  # only the device knows the index
    state[:1] += 1
    state[1:] += sum(source.numel() * source.element_size() for source in sources)


def _writable(t: Tensor) -> Tensor:
    """Return 8-bit floats viewed as bytes, which every device can copy by index."""
    return t.view(torch.uint8) if t.dtype.is_floating_point and t.element_size() == 1 else t


_SCHEMA = f"{NAME}(Tensor[] sources, Tensor(a!) state, Tensor(b!)[] buffers) -> ()"
_op = register(_SCHEMA, _kernel, specs.wgrad_stash_)
define_requested(_SCHEMA, _op, specs.wgrad_stash_)


def wgrad_stash_(sources: Sequence[Tensor], state: Tensor, buffers: Sequence[Tensor]) -> None:
    """Copy ``sources`` into the next free entry of ``buffers``, without reading anything on the host.

    Args:
        sources: tensors of any dtype and shape.
        state: int64 ``[2]``: the microbatches held, which is the index written to, and the bytes copied so far.
        buffers: for each source one buffer ``[M, *capacity]`` of its dtype, for M microbatches. The source, no larger
            than ``capacity`` in any dimension, fills the leading part, and the rest keeps its bytes.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        RuntimeError: there are M microbatches already (a device-side assertion on CUDA).
    """
    _op(list(sources), state, list(buffers))
