"""A forward of the expert parallel layer in which FC1 and FC2 of a rank's own rows run beside its exchanges.

A token that a rank sends to itself needs no link: a quarter of the rows of four ranks. So a dispatch runs beside FC1 of
the own rows, and the answers to other ranks leave beside FC2 and the sums of the own ones. Exchanges get as many blocks
as fit on the multiprocessors that GEMMs leave. Made of the layer's own kernels; no gradient, and no rank without
tokens.

    routing, and places of own rows
    dispatch                            |  FC1 of own rows, places of all others
    FC1, FC2 and sums of all others
    barrier, answers to other ranks     |  FC2 and sums of own rows
    sums over ranks
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from tgl import backends
from tgl.cutlass_kernels.archs import arch_of
from tgl.cutlass_kernels.launchers import expert_parallel as steps
from tgl.cutlass_kernels.launchers.gemm import GROUPED_GEMM, GemmCall
from tgl.cutlass_kernels.launchers.gemm_activation import GROUPED_GEMM_ACTIVATION, GemmActivationCall
from tgl.cutlass_kernels.launchers.wire import FLOW
from tgl.cutlass_kernels.runtime import device
from tgl.cutlass_kernels.runtime.launcher import Launcher, compiled
from tgl.distributed import ExpertParallelMLP
from tgl.meta import symmetric_memory
from tgl.nn.routing import Routing, dispatch_weights, route
from tgl.ops.grouped_activation import Params

OPS = torch.ops.tgl
LATE = 10_000  # cycles, in which CTAs of a GEMM find their place
Call = Callable[[], Any]


class Share(NamedTuple):
    """Blocks of the exchange, at most, and multiprocessors for which the GEMM starts no CTA."""

    blocks: int
    left: int

    def __str__(self) -> str:
        return f"{self.blocks}, {self.left}"


class Started:
    """GEMMs by fewer CTAs than there is room for; holds what is compiled."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[str, Any], Callable] = {}

    def __call__(self, launcher: Launcher, call: Any, left: int) -> Call:
        where = call[0].device
        key = launcher.key(call, arch_of(backends.device_arch(where)).name)
        if (launcher.op, key) not in self.kernels:
            self.kernels[launcher.op, key] = compiled(launcher.op, key, where, lambda: launcher.build(key))
        ctas = device.multiprocessors(where) - left
        start = device.on_its_device(self.kernels[launcher.op, key], ctas // key.config.ctas)
        return functools.partial(start, *launcher.arguments(call))


@contextmanager
def blocks_of(share: Share) -> Iterator[None]:
    """Exchanges get at most so many."""
    with mock.patch.object(steps, "BLOCKS", share.blocks):
        yield


@contextmanager
def beside(stream: Any, share: Share) -> Iterator[None]:
    """What is called here runs on ``stream``, behind what the current one has, and late if CTAs have to be first."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if share.blocks > share.left > 0:
            torch.cuda._sleep(LATE)
        yield


class Rows(NamedTuple):
    """Rows of a rank's experts: where they are, the tensor and the index that they are read by, and their weights."""

    routing: Routing
    source: Tensor
    index: Tensor
    probs: Tensor
    h: Tensor
    y: Tensor
    answers: Tensor


class OwnFirst:
    """The forward.

    Args:
        layer: over symmetric memory, without a recipe and biases.
        rank: this one.
        share: of what runs side by side.
        stream: of a higher priority.
    """

    def __init__(self, layer: ExpertParallelMLP, rank: int, share: Share, stream: Any) -> None:
        self.layer, self.share, self.stream, self.started = layer, share, stream, Started()
        exchange, self.sizes = layer.exchange, layer.exchange.sizes
        self.group, rows = exchange.group, exchange.pair_rows
        self.own = slice(rank * rows, (rank + 1) * rows)
        self.others = slice(0, rank * rows), slice((rank + 1) * rows, self.sizes.ranks * rows)
        self.w1, self.w2 = (one.weight.detach().transpose(1, 2) for one in (layer.fc1, layer.fc2))

    def __call__(self, x: Tensor, top_k_index: Tensor, weights: Tensor) -> Tensor:
        layer, group, sizes = self.layer, self.group, self.sizes
        room = {"group_size": sizes.ranks, "pair_rows": layer.pair_rows, "expert_rows": layer.expert_rows}
        position, token, choices, needed = OPS.ep_route(
            top_k_index, sizes.num_experts, **room, invariant=False, **group
        )
        factor = torch.where(layer.exchange._full(needed), math.nan, 1.0).to(weights.dtype)
        to_self = self.routed(choices[self.own])
        places = token[self.own].clamp(min=0)
        index = places.index_select(0, to_self.token.clamp(min=0))
        own = self.rows(to_self, x, index, weights.index_select(0, places) * factor)

        here = torch.cuda.current_stream()
        fc1 = self.first(own, self.share.left)
        with beside(self.stream, self.share), blocks_of(self.share):
            arrived, row_weights = OPS.ep_dispatch(x, weights, token, position, sizes.copies, **group)
        fc1()
        theirs = choices.clone()
        theirs[self.own] = -1
        to_others = self.routed(theirs)
        here.wait_stream(self.stream)

        rest = self.rows(to_others, arrived, to_others.token, row_weights * factor)
        self.first(rest, 0)()
        self.second(rest, 0)()
        answers = torch.empty_like(arrived)
        for part in self.others:
            self.sum(rest, part, answers[part])

        return self.answer(own, answers, (token, position), torch.empty_like(x))

    def answer(self, own: Rows, answers: Tensor, places: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        """Answers to others leave beside FC2 of the own rows."""
        ends = self.sizes.copies, self.group["group_name"], self.group["engine"], y, y.new_empty(0)
        call = steps.MovingCall(answers, None, *places, *ends)
        (meet, barrier), (_, flow) = steps.combine_steps(call, symmetric_memory.memory_of(call.group_name))
        here = torch.cuda.current_stream()
        fc2 = self.second(own, self.share.left)
        with beside(self.stream, self.share):
            meet.run(barrier)
            nothing = tuple((rows, part, out[:0]) for rows, part, out in flow.moved)
            FLOW.run(flow._replace(position=flow.position[:0], moved=nothing, blocks=self.share.blocks))
        fc2()
        self.sum(own, slice(None), answers[self.own])
        here.wait_stream(self.stream)
        FLOW.run(flow)  # all pieces have been drawn
        return y

    def routed(self, choices: Tensor) -> Routing:
        """Places of rows of some choices."""
        return route(choices, self.layer.num_gemms, min(choices.numel(), self.layer.expert_rows))

    def rows(self, routing: Routing, source: Tensor, index: Tensor, weights: Tensor) -> Rows:
        count, (_, width, both) = len(routing.token), self.w1.shape
        h, y, answers = (source.new_empty(count, n) for n in (both, both // 2, width))
        return Rows(routing, source, index, dispatch_weights(weights, routing), h, y, answers)

    def first(self, rows: Rows, left: int) -> Call:
        """FC1 and its activation."""
        operands = rows.source, self.w1, rows.routing.offs, None, rows.probs, Params(), rows.y, rows.h, rows.index
        return self.started(GROUPED_GEMM_ACTIVATION, GemmActivationCall(*operands, zero_tail=False), left)

    def second(self, rows: Rows, left: int) -> Call:
        """FC2."""
        operands = rows.y, self.w2, rows.routing.offs, None, None, rows.answers
        return self.started(GROUPED_GEMM, GemmCall(*operands, zero_tail=False), left)

    def sum(self, rows: Rows, part: slice, out: Tensor) -> None:
        """The sums of some of the tokens that have come, or gone to this rank itself."""
        if len(out):
            position = rows.routing.position.view(-1, rows.routing.top_k)[part].reshape(-1)
            backends.run("combine", out.device, rows.answers, position, None, top_k=rows.routing.top_k, out=out)
