"""The barrier of several ranks on one device, in one launch: block r is rank r."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import cutlass
import cutlass.cute as cute
import torch
from torch import Tensor

import cute_emulator
from tests.ranks_on_one_device import World
from tgl.cutlass_kernels.expert_parallel.meet import LANES, Meet, Told
from tgl.cutlass_kernels.runtime import launcher
from tgl.cutlass_kernels.runtime.compiling import compiled, strided, vector
from tgl.testing import emulate

PATIENT = torch.tensor([10**12, 0])  # nanoseconds; nobody is missed


def emulated() -> Iterator[cute_emulator.Emulation]:
    """For a fixture: an emulated Hopper, of whose kernels nothing is left afterwards."""
    with emulate("sm_90a") as machine:
        yield machine
    launcher.plans.clear()
    launcher.forget()


class Together(Meet):
    """Operands of ``Meet``, one behind the other."""

    @cute.jit
    def __call__(
        self,
        tables: cute.Tensor,
        epochs: cute.Tensor,
        arrived: cute.Tensor,
        leaving: cute.Tensor,
        tokens: cute.Tensor | None,
        watch: cute.Tensor,
        stream,
    ):
        """Launch."""
        self.together(tables, epochs, arrived, leaving, tokens, watch).launch(
            grid=(tables.shape[0], 1, 1), block=(LANES * self.ranks, 1, 1), stream=stream
        )

    @cute.kernel
    def together(
        self,
        tables: cute.Tensor,
        epochs: cute.Tensor,
        arrived: cute.Tensor,
        leaving: cute.Tensor,
        tokens: cute.Tensor | None,
        watch: cute.Tensor,
    ):
        """A rank for every block."""
        rank, _, _ = cute.arch.block_idx()
        table = tables[rank, None]
        own = cute.make_ptr(cutlass.Int32, table[rank], cute.AddressSpace.gmem, assumed_align=4)
        control = cute.make_tensor(own, cute.make_layout(3 * cute.size(table)))
        token = None
        if cutlass.const_expr(tokens is not None):
            token = tokens[rank, None]
        told = Told(epochs[rank, None], arrived[rank, None], leaving[rank, None])
        self.meet(table, control, told, token, watch, rank)


class Kernels:
    """Compiled once for an emulation."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.made: dict[tuple[int, bool], Callable[..., None]] = {}

    def __call__(self, world: World, tokens: list[Tensor | None]) -> None:
        """The barrier of all ranks; with ``tokens`` the first of an exchange."""
        tells = tokens[0] is not None
        if (world.ranks, tells) not in self.made:
            ints = [strided("int32", 2) for _ in range(4)]
            tensors = strided("int64", 2), *ints[:3], ints[3] if tells else None
            self.made[world.ranks, tells] = compiled(self.arch, Together(world.ranks), *tensors, vector("int64", 8))
        stacked = torch.stack([t for t in tokens if t is not None]) if tells else None
        told = world.epochs, world.arrived, world.leaving
        self.made[world.ranks, tells](world.tables, *told, stacked, PATIENT)
