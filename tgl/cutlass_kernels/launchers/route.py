"""Top-k slots of a router, sorted by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import backends
from .. import overlap
from ..router.sizes import CHUNK, MOST_EXPERTS, QUAD, TILE
from ..runtime import device
from ..runtime.launcher import Launcher, Plan
from ..runtime.names import name
from ..runtime.requirements import MAX_ROWS
from .reduce import INTEGERS


class RouteKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    element: str
    bits: int
    alone: bool
    few: int = 0  # top-k slots that the decode kernel takes; 0: the general kernel


class RouteCall(NamedTuple):
    """Arguments of ``route``."""

    top_k_index: Tensor
    num_experts: int
    source: Tensor
    position: Tensor
    token: Tensor
    offs: Tensor


class RouteLauncher(Launcher[RouteCall]):
    """Sorts the top-k slots by expert: the row of every slot, and the slot of every row."""

    op = "route"
    call = RouteCall
    note = "a counting sort, in one launch or two"

    def reject_reason(self, c: RouteCall) -> backends.Reason:
        """Return why the kernel does not take the dtype or the sizes, or None."""
        reason = device.packages_reason()
        if reason is not None:
            return reason
        if c.top_k_index.dtype not in INTEGERS:
            return f"takes {', '.join(map(str, INTEGERS))}, got {c.top_k_index.dtype}"
        if c.num_experts > MOST_EXPERTS:
            return f"takes up to {MOST_EXPERTS} experts, got {c.num_experts}"
        if c.position.shape[0] > MAX_ROWS:
            return f"takes up to {MAX_ROWS} top-k slots, got {c.position.shape[0]}"
        if c.source.shape[0] > MAX_ROWS:
            return f"takes up to {MAX_ROWS} rows, got {c.source.shape[0]}"
        return None

    def plan_key(self, c: RouteCall) -> tuple | None:
        """Return the plan key: dtype, bits of the number of experts, whether one block suffices, and overlap."""
        pairs, experts = c.position.shape[0], c.num_experts
        if not 0 < pairs <= MAX_ROWS or c.source.shape[0] > MAX_ROWS or not 0 < experts <= MOST_EXPERTS:
            return None
        return c.top_k_index.dtype, experts.bit_length(), pairs <= TILE, overlap.overlaps(pairs)

    def is_empty(self, c: RouteCall) -> bool:
        """Return whether there are no top-k slots or no experts."""
        return c.position.shape[0] == 0 or c.num_experts == 0

    def zero_outputs(self, c: RouteCall) -> None:
        """Write offsets of zero and indices of -1: no expert has rows."""
        c.offs.zero_()
        for t in (c.source, c.position, c.token):
            t.fill_(-1)

    def key(self, c: RouteCall, arch: str) -> RouteKey:
        """Return the key: the bits of the number of experts; with few top-k slots one kernel serves any number."""
        pairs, element, emulated = c.position.shape[0], name(c.top_k_index), not c.top_k_index.is_cuda
        if overlap.overlaps(pairs):
            return RouteKey(arch, emulated, element, bits=0, alone=True, few=overlap.FEW_CHOICES)
        return RouteKey(arch, emulated, element, c.num_experts.bit_length(), alone=pairs <= TILE)

    def build(self, key: RouteKey) -> Callable:
        """Compile the kernel for ``key``."""
        return build(key)

    def arguments(self, c: RouteCall) -> tuple:
        """Return the arguments of the kernel except the table of counts and whether it overlaps."""
        return c.top_k_index, (c.source, c.position, c.token), c.offs

    def start(self, plan: Plan, c: RouteCall) -> None:
        """Launch."""
        table = None
        if not plan.key.alone:
            pairs = c.position.shape[0]
            blocks = min(device.multiprocessors(c.offs.device), -(-pairs // CHUNK))
            table = c.offs.new_empty(blocks, -(-c.num_experts // QUAD) * QUAD)
        plan.launch(*self.arguments(c), table, int(overlap.overlaps(c.position.shape[0])))

    def warmup_call(self, c: RouteCall) -> RouteCall:
        """Return the warm-up call: pairs that select the first expert, one or as many as need a table."""
        pairs = 1 if c.position.shape[0] <= TILE else TILE + 1
        index = c.top_k_index.new_zeros(pairs, 1)
        source, position, token = torch.empty(3, pairs, dtype=torch.int32, device=index.device)
        offs = c.offs.new_empty(c.num_experts, device=index.device)
        return RouteCall(index, c.num_experts, source, position, token, offs)


def build(key: RouteKey) -> Callable:
    """Compile the kernel for ``key``. Needs no GPU."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor

    from ..router.route_few import RouteFewKernel
    from ..router.route_kernel import RouteKernel
    from ..router.route_one import RouteOneKernel
    from ..runtime.compiling import compiled, strided, vector
    from ..runtime.elements import TYPES

    table = None
    if not key.alone:
        shape = (cute.sym_int32(), cute.sym_int32(divisibility=QUAD))
        table = make_fake_compact_tensor(TYPES["int32"], shape, stride_order=(1, 0), assumed_align=4 * QUAD)
    places = vector("int32"), vector("int32"), vector("int32")
    arguments = strided(key.element, 2), places, vector("int32"), table, cutlass.Int32(1)
    kernel = RouteFewKernel(key.few) if key.few else RouteOneKernel(key.bits) if key.alone else RouteKernel(key.bits)
    return compiled(key.arch, kernel, *arguments)


ROUTE = RouteLauncher()
LAUNCHERS = (ROUTE,)
