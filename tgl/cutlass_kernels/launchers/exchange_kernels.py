"""Launchers of the kernels that write to the memory of other ranks; ``expert_parallel`` combines them to ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ... import backends
from ..expert_parallel.sizes import TOKENS
from ..permute.tiling import PermuteTiling, cut_of
from ..runtime import device
from ..runtime.launcher import Call, Launcher, Plan
from ..runtime.names import name
from ..runtime.requirements import ALIGNMENT
from .permutation import vector_of

LOADS = 8  # of a lane in flight: with few warps each needs many


class ExchangeKernelLauncher(Launcher[Call]):
    """Launcher of a part of an exchange op; calls are not checked here, because the op has been checked already."""

    def reject_reason(self, c: Any) -> backends.Reason:
        """Return why kernels cannot be compiled, or None."""
        return device.packages_reason()


# --- barrier ----------------------------------------------------------------------------------------------------------


class BarrierKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    ranks: int
    tells: bool


class BarrierCall(NamedTuple):
    """Arguments of a barrier, see ``expert_parallel.barrier_step``."""

    table: Tensor
    control: Tensor
    told: tuple[Tensor, Tensor, Tensor]
    token: Tensor | None
    watch: Tensor
    rank: int


class BarrierLauncher(ExchangeKernelLauncher[BarrierCall]):
    """The barrier of the ranks in the group."""

    op = "ep_meet"
    call = BarrierCall

    def key(self, c: BarrierCall, arch: str) -> BarrierKey:
        """Return the key: a kernel per number of ranks, one that signals numbers of rows and one that does not."""
        return BarrierKey(arch, not c[0].is_cuda, c.table.shape[0], c.token is not None)

    def build(self, key: BarrierKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..expert_parallel import barrier
        from ..runtime.compiling import compiled, vector

        told = barrier.Told(*(vector("int32") for _ in range(3)))
        tensors = vector("int64", 8), vector("int32"), told, vector("int32") if key.tells else None
        return compiled(key.arch, barrier.BarrierKernel(key.ranks), *tensors, vector("int64", 8), cutlass.Int32(0))

    def arguments(self, c: BarrierCall) -> tuple:
        """Return the arguments of the kernel."""
        return tuple(c)


# --- rows -------------------------------------------------------------------------------------------------------------


class PutKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    cut: PermuteTiling
    element: str


class PutCall(NamedTuple):
    """Arguments of a put of rows to places, see ``expert_parallel.route_steps``."""

    rows: Tensor
    table: Tensor
    out: Tensor
    rank: int


class PutLauncher(ExchangeKernelLauncher[PutCall]):
    """Puts rows into the memory of ranks."""

    op = "ep_move"
    call = PutCall

    def key(self, c: PutCall, arch: str) -> PutKey:
        """Return the key of the kernel; the width of accesses follows from where the rows lie."""
        cut = cut_of(c.out.shape[1], vector_of(c.rows, c.out), 1)
        return PutKey(arch, not c[0].is_cuda, cut, name(c.out))

    def build(self, key: PutKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..expert_parallel.put import PutKernel as Kernel
        from ..runtime.compiling import compiled, vector

        rows, out = (rows_of(key.element, key.cut.vector) for _ in range(2))
        return compiled(key.arch, Kernel(key.cut), rows, vector("int64", 8), out, cutlass.Int32(0))

    def arguments(self, c: PutCall) -> tuple:
        """Return the arguments of the kernel."""
        return tuple(c)


def rows_of(element: str, vector: int) -> Any:
    """Return a stand-in for rows that are accessed by ``vector`` elements."""
    from ..runtime.compiling import matrix
    from ..runtime.elements import TYPES

    width = min(vector * TYPES[element].width // 8, ALIGNMENT)
    return matrix(element, pitch=width, columns=vector, align=width)


class ExchangeKey(NamedTuple):
    """Key of a compiled kernel, for rows and, if there are any, for weights."""

    arch: str
    emulated: bool
    cuts: tuple[PermuteTiling, ...]
    sums: tuple[PermuteTiling, ...]
    elements: tuple[str, ...]
    results: tuple[str, ...]


class ExchangeCall(NamedTuple):
    """Arguments of an exchange: rows and weights to ranks or back, and where they arrive and end up.

    See ``expert_parallel.exchange_steps``.
    """

    table: Tensor
    flags: Tensor
    epoch: Tensor
    arrived: Tensor
    leaving: Tensor
    watch: Tensor
    piece: int
    rank: int
    moved: tuple[tuple[Tensor, Tensor, Tensor], ...]
    token: Tensor | None
    position: Tensor | None
    blocks: int
    copies: int


class ExchangeLauncher(ExchangeKernelLauncher[ExchangeCall]):
    """Puts rows into the memory of ranks, and copies arriving rows out of it or adds them up."""

    op = "ep_flow"
    call = ExchangeCall

    def key(self, c: ExchangeCall, arch: str) -> ExchangeKey:
        """Return the key of the kernel; the width of accesses follows from where rows lie."""
        widths = [(out.shape[1], vector_of(rows, part, out)) for rows, part, out in c.moved]
        cuts = tuple(cut_of(*width, 1, loads=LOADS) for width in widths)
        sums = tuple(cut_of(*width, c.copies, most=10, loads=LOADS) for width in widths if c.token is None)
        names = (tuple(name(moved[i]) for moved in c.moved) for i in (0, 2))
        return ExchangeKey(arch, not c[0].is_cuda, cuts, sums, *names)

    def build(self, key: ExchangeKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..expert_parallel import exchange
        from ..runtime.compiling import compiled, contiguous, vector

        moved = tuple(
            exchange.Moved(rows_of(element, cut.vector), rows_of(element, cut.vector), rows_of(result, cut.vector))
            for element, result, cut in zip(key.elements, key.results, key.cuts)
        )
        epoch, arrived, leaving = (vector("int32") for _ in range(3))
        known = contiguous("int32"), epoch, arrived, leaving, vector("int64", 8)
        ways = exchange.ExchangeState(vector("int64", 8), *known, cutlass.Int32(0), cutlass.Int32(0))
        kernel = exchange.ExchangeKernel(key.cuts, key.sums)
        return compiled(key.arch, kernel, vector("int32"), moved, ways, cutlass.Int32(0))

    def arguments(self, c: ExchangeCall) -> tuple:
        """Return the arguments of the kernel."""
        return c.position if c.token is None else c.token, c.moved, c[:8], c.blocks


# --- routing ----------------------------------------------------------------------------------------------------------


class PlacementKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    element: str
    ranks: int
    top_k: int
    bits: int
    invariant: bool
    alone: bool


class PlacementCall(NamedTuple):
    """Arguments for the places and counts of a rank, see ``expert_parallel.route_steps``."""

    top_k_index: Tensor
    position: Tensor
    token: Tensor
    counts: Tensor
    ranks: int
    invariant: bool


class PlacementLauncher(ExchangeKernelLauncher[PlacementCall]):
    """Computes ``position``, ``token`` and counts."""

    op = "ep_places"
    call = PlacementCall

    def key(self, c: PlacementCall, arch: str) -> PlacementKey:
        """Return the key; one kernel serves all numbers of experts with the same number of bits."""
        bits = (c.counts.shape[0] - c.ranks).bit_length()
        emulated = not c[0].is_cuda
        tokens, top_k = c.top_k_index.shape
        return PlacementKey(arch, emulated, name(c.top_k_index), c.ranks, top_k, bits, c.invariant, tokens <= TOKENS)

    def build(self, key: PlacementKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        from ..expert_parallel.placement import PlacementKernel as Kernel
        from ..runtime.compiling import compiled, contiguous, strided, vector

        kernel = Kernel(key.ranks, key.top_k, key.bits, key.invariant, key.alone)
        table = None if key.alone else contiguous("int32")
        return compiled(key.arch, kernel, strided(key.element, 2), *(vector("int32") for _ in range(3)), table)

    def arguments(self, c: PlacementCall) -> tuple:
        """Return the arguments of the kernel except the table of counts."""
        return c[:4]

    def start(self, plan: Plan, c: PlacementCall) -> None:
        """Launch, with a row of counts for every block if there are several."""
        blocks = -(-c.top_k_index.shape[0] // TOKENS)
        table = None if plan.key.alone else c.counts.new_empty(blocks, c.counts.shape[0])
        plan.launch(*self.arguments(c), table)


class SlotExchangeKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool
    element: str
    invariant: bool


class SlotExchangeCall(NamedTuple):
    """Arguments for top-k slots to the ranks of their experts, see ``expert_parallel.route_steps``."""

    top_k_index: Tensor
    position: Tensor
    token: Tensor
    table: Tensor
    counts: Tensor
    part: Tensor
    rank: int
    invariant: bool


class SlotExchangeLauncher(ExchangeKernelLauncher[SlotExchangeCall]):
    """Puts the top-k slots of tokens that go to a rank into its memory."""

    op = "ep_choices"
    call = SlotExchangeCall

    def is_empty(self, c: SlotExchangeCall) -> bool:
        """Return whether there are no tokens."""
        return not c.top_k_index.shape[0]

    def key(self, c: SlotExchangeCall, arch: str) -> SlotExchangeKey:
        """Return the key, which holds for all sizes."""
        return SlotExchangeKey(arch, not c[0].is_cuda, name(c.top_k_index), c.invariant)

    def build(self, key: SlotExchangeKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..expert_parallel.placement import SlotExchangeKernel as Kernel
        from ..runtime.compiling import compiled, strided, vector

        places = vector("int32"), vector("int32")
        rest = vector("int64", 8), vector("int32"), strided("int32", 2), cutlass.Int32(0)
        return compiled(key.arch, Kernel(key.invariant), strided(key.element, 2), *places, *rest)

    def arguments(self, c: SlotExchangeCall) -> tuple:
        """Return the arguments of the kernel."""
        return c[:7]


class ArrivalKey(NamedTuple):
    """Key of a compiled kernel."""

    arch: str
    emulated: bool


class ArrivalCall(NamedTuple):
    """Arguments for what follows from the counts of all ranks, see ``expert_parallel.route_steps``."""

    counts: Tensor
    choices: Tensor
    arrived: Tensor
    position: Tensor
    chosen: Tensor
    needed: Tensor
    expert_rows: int


class ArrivalLauncher(ExchangeKernelLauncher[ArrivalCall]):
    """Computes ``index`` and ``needed``."""

    op = "ep_settle"
    call = ArrivalCall

    def key(self, c: ArrivalCall, arch: str) -> ArrivalKey:
        """Return the key, which holds for all sizes."""
        return ArrivalKey(arch, not c[0].is_cuda)

    def build(self, key: ArrivalKey) -> Callable:
        """Compile the kernel for ``key``. Needs no GPU."""
        import cutlass

        from ..expert_parallel.placement import ArrivalKernel as Kernel
        from ..runtime.compiling import compiled, strided, vector

        read = strided("int32", 2), strided("int32", 2), vector("int32")
        written = vector("int32"), strided("int32", 2), vector("int32")
        return compiled(key.arch, Kernel(), *read, *written, cutlass.Int32(0))

    def arguments(self, c: ArrivalCall) -> tuple:
        """Return the arguments of the kernel."""
        return tuple(c)


BARRIER, PUT, EXCHANGE, PLACEMENT, SLOT_EXCHANGE, ARRIVAL = (
    BarrierLauncher(),
    PutLauncher(),
    ExchangeLauncher(),
    PlacementLauncher(),
    SlotExchangeLauncher(),
    ArrivalLauncher(),
)
