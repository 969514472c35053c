"""``tgl::offload`` and ``tgl::reload``: move a tensor saved for the backward to host memory and back.

On CUDA both copies run on one side stream per device, between pinned memory and the device, while the current stream
continues to compute. They are ordered by:

- a snapshot: the copy to the host reads a copy made on the current stream. The source may be overwritten at once, as
  Inductor does when it reuses a buffer, and no event could prevent that;
- events: the copy to the host waits for the snapshot, and the current stream waits for the copy back;
- the side stream's own order: nothing is copied back before it has arrived on the host;
- ``record_stream``: memory that one stream allocated and the other still uses is not reused. The caching host allocator
  does the same for the pinned side of a non-blocking copy.

The memory that ``reload`` fills is allocated on the side stream, so that the copy does not wait for the current stream:
it starts as soon as the host issues it, which is well ahead of the device.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import backends
from ._library import Formula, register

OFFLOAD, RELOAD = "offload", "reload"


class Meter(Protocol):
    """Counter of offloaded tensors."""

    def count(self, nbytes: int) -> None: ...


class _Meters(threading.local):
    """The open meters of a thread; the last one counts."""

    def __init__(self) -> None:
        self.stack: list[Meter] = []


meters = _Meters()

# --- kernels ----------------------------------------------------------------------------------------------------------


# The copies keep the strides of their source, unlike the outputs of other ops: a GEMM that reads the tensor after the
# round trip must see the same layout, so that it takes the same path and returns the same bits.


def _offload(x: Tensor) -> Tensor:
    if x.is_cuda:
        host = _offload_cuda(x)
    else:
        host = torch.empty_like(x, device="cpu").copy_(x)
    if meters.stack:
        meters.stack[-1].count(host.numel() * host.element_size())
    return host


def _reload(x: Tensor, device: torch.device, after: Tensor | None = None) -> Tensor:
    return _reload_cuda(x, device) if device.type == "cuda" else torch.empty_like(x, device=device).copy_(x)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _stream_pair(op: str, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the current stream and the copy stream of ``device``."""
    if torch.cuda.is_current_stream_capturing():
        raise backends.GraphCaptureError(
            f"tgl::{op} copies on a stream of its own, which CUDA graph capture would leave unjoined; capture outside "
            "of tgl.cpu_offload"
        )
    current = torch.cuda.current_stream(device)
    return current, _copy_stream(current.device)


def _offload_cuda(x: Tensor) -> Tensor:
    current, copies = _stream_pair(OFFLOAD, x.device)
    snapshot = torch.empty_like(x).copy_(x)
    host = torch.empty_like(snapshot, device="cpu", pin_memory=True)
    copies.wait_stream(current)
    with torch.cuda.stream(copies):
        host.copy_(snapshot, non_blocking=True)
    snapshot.record_stream(copies)
    return host


def _reload_cuda(x: Tensor, device: torch.device) -> Tensor:
    current, copies = _stream_pair(RELOAD, device)
    with torch.cuda.stream(copies):
        out = torch.empty_like(x, device=current.device)
        out.copy_(x, non_blocking=True)
    current.wait_stream(copies)
    out.record_stream(current)
    return out


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save_offload(ctx: Any, needs: tuple[bool, ...], x: Tensor, *, output: Tensor) -> None:
    ctx.device = x.device


def _backward_offload(ctx: Any, needs: tuple[bool, ...], g: Tensor) -> tuple[Tensor]:
    return (torch.ops.tgl.reload(g, ctx.device),)


def _save_reload(
    ctx: Any, needs: tuple[bool, ...], x: Tensor, device: torch.device, after: Tensor | None, *, output: Tensor
) -> None:
    pass


def _backward_reload(ctx: Any, needs: tuple[bool, ...], g: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.tgl.offload(g), None, None


# --- registration -----------------------------------------------------------------------------------------------------

offload = register(
    f"{OFFLOAD}(Tensor x) -> Tensor",
    _offload,
    lambda x: torch.empty_like(x, device="cpu"),
    formula=Formula(_save_offload, _backward_offload),
)
reload = register(
    f"{RELOAD}(Tensor x, Device device, Tensor? after=None) -> Tensor",
    _reload,
    lambda x, device, after=None: torch.empty_like(x, device=device),
    formula=Formula(_save_reload, _backward_reload),
)
"""Copy ``x`` to ``device``, after ``after``, which is neither read nor waited for on the device.

Ops that depend only on saved tensors look to a partitioner like part of the forward: it would copy everything back at
once and save that for the backward. A dependency on the gradient as ``after`` prevents that.
"""
