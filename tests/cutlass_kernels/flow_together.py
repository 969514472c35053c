"""Rows between several ranks on one device, in one launch, in which blocks take turns: block b is of rank b % W."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from tests.cutlass_kernels.wire_together import PATIENT
from tests.ranks_on_one_device import World
from tgl.cutlass_kernels.expert_parallel.flow import WARPS, Flow, Moved, Peer, Ways
from tgl.cutlass_kernels.permute.cut import LANES, MOST, cut_of
from tgl.cutlass_kernels.runtime.compiling import compiled, matrix, strided, vector
from tgl.meta import symmetric_memory

BLOCKS = 2  # of a rank
VECTOR = 4
TURNS = 20


class Together(Flow):
    """Operands of ``Flow``, one behind the other, whose parts and flags begin at so many bytes of a memory."""

    parts: tuple[int, int] = (0, 0)

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        out: cute.Tensor,
        token: cute.Tensor | None,
        position: cute.Tensor | None,
        tables: cute.Tensor,
        epochs: cute.Tensor,
        arrived: cute.Tensor,
        watch: cute.Tensor,
        piece: Int32,
        stream,
    ):
        """Launch."""
        self.together(rows, out, token, position, tables, epochs, arrived, watch, piece).launch(
            grid=(tables.shape[0] * BLOCKS, 1, 1), block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def together(
        self,
        rows: cute.Tensor,
        out: cute.Tensor,
        token: cute.Tensor | None,
        position: cute.Tensor | None,
        tables: cute.Tensor,
        epochs: cute.Tensor,
        arrived: cute.Tensor,
        watch: cute.Tensor,
        piece: Int32,
    ):
        """Some blocks of every rank."""
        block, _, _ = cute.arch.block_idx()
        ranks, columns = Int32(tables.shape[0]), Int32(rows.shape[2])
        rank = block % ranks
        places = Int32(rows.shape[1] if cutlass.const_expr(token is None) else out.shape[1])
        mine, (flags_at, part_at) = tables[rank, rank], self.parts
        flag = cute.make_ptr(Int32, mine + flags_at, cute.AddressSpace.gmem, assumed_align=4)
        first = cute.make_ptr(rows.element_type, mine + part_at, cute.AddressSpace.gmem, assumed_align=16)
        flags = cute.make_tensor(
            flag, cute.make_layout((ranks, symmetric_memory.FLAGS), stride=(symmetric_memory.FLAGS, 1))
        )
        part = cute.make_tensor(first, cute.make_layout((places, columns), stride=(columns, 1)))
        owners, choices = None, None
        if cutlass.const_expr(token is not None):
            owners = token[rank, None]
        if cutlass.const_expr(position is not None):
            choices = position[rank, None]
        told = epochs[rank, None], arrived[rank, None], arrived[rank, None]  # as many rows go as come
        ways = Ways(tables[rank, None], flags, *told, watch, piece, rank)
        moved = [Moved(rows[rank, None, None], part, out[rank, None, None])]
        self.flow(moved, owners, choices, ways, block // ranks, Int32(BLOCKS))


class Early(Together):
    """A mutant: flags before the rows that they stand for."""

    @cute.jit
    def send(self, all_moved: Any, token: Any, ways: Ways, peer: Peer, first: Int32, count: Int32):
        """Too late: others have a turn while this warp waits for an atomic operation."""
        self.release(ways, peer, first // ways.piece)
        for _ in cutlass.range(TURNS, unroll=1):
            cute.arch.atomic_add((ways.epoch.iterator + 1).llvm_ptr, Int32(0), sem="relaxed", scope="gpu")
        super().send(all_moved, token, ways, peer, first, count)


def kernel(
    kind: type[Together], arch: str, world: World, columns: int, answers: bool, top_k: int, most: int = MOST
) -> Any:
    """A compiled one, of float32 rows; ``most`` choices of a token at a time."""
    known = symmetric_memory.memory_of(world.names[0])
    cut = cut_of(columns, VECTOR, 1)
    made = kind((cut,), (cut_of(columns, VECTOR, top_k, most=most),) if answers else ())
    begin = known.memory.data_ptr()
    places = known.ranks, columns, torch.float32
    made.parts = known.flags.data_ptr() - begin, known.parts([places])[0].data_ptr() - begin
    rows, out = (matrix("float32", dims=3, columns=VECTOR) for _ in range(2))
    ints = [strided("int32", 2) for _ in range(3)]
    choices = (None, ints[0]) if answers else (ints[0], None)
    tensors = rows, out, *choices, strided("int64", 2), *ints[1:], vector("int64", 8)
    return compiled(arch, made, *tensors, Int32(0))


def flow(launch: Any, world: World, given: tuple[Tensor | None, ...], piece: int) -> None:
    """One exchange of all ranks, behind a barrier."""
    for name in world.names:
        symmetric_memory.memory_of(name).flags.zero_()
    world.poison(0xFF)
    world.epochs.copy_(torch.tensor([7, 0]).expand(world.ranks, 2))
    launch(*given, world.tables, world.epochs, world.arrived, PATIENT, piece)
