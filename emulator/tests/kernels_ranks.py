"""CuTe DSL kernels of several ranks that add up what all of them hold."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.utils import distributed

from cute_emulator import Ranks

SIZE, THREADS = 512, 64


class OneShot:
    """Every rank publishes its values, and adds up those of all ranks by their addresses."""

    def __init__(self, ranks):
        self.ranks = ranks

    @cute.jit
    def __call__(
        self,
        mine: cute.Tensor,
        data: cute.Tensor,
        flags: cute.Tensor,
        out: cute.Tensor,
        rank: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(mine, data, flags, out, rank).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mine: cute.Tensor, data: cute.Tensor, flags: cute.Tensor, out: cute.Tensor, rank: cutlass.Int32):
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(SIZE // THREADS):
            self.row(cutlass.Float32, data[rank])[i * THREADS + tid] = mine[i * THREADS + tid]
        cute.arch.sync_threads()
        if tid < self.ranks:
            theirs, own = (self.row(cutlass.Int32, flags[r]).iterator for r in (tid, rank))
            cute.arch.store((theirs + rank).llvm_ptr, cutlass.Int32(1), sem="release", scope="sys")
            raised = cutlass.Int32(0)
            while raised == 0:
                raised = cute.arch.load((own + tid).llvm_ptr, cutlass.Int32, sem="acquire", scope="sys")
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(SIZE // THREADS):
            total = cutlass.Float32(0)
            for r in cutlass.range_constexpr(self.ranks):
                total += self.row(cutlass.Float32, data[r])[i * THREADS + tid]
            out[i * THREADS + tid] = total

    @cute.jit
    def row(self, element: cutlass.Constexpr, address: cutlass.Int64):
        pointer = cute.make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=4)
        return cute.make_tensor(pointer, cute.make_layout(SIZE))


class TwoShot:
    """Every rank publishes its values, adds up its part of all by multicast, and stores the sums to all ranks."""

    def __init__(self, ranks):
        self.ranks = ranks

    @cute.jit
    def __call__(
        self,
        mine: cute.Tensor,
        data: cute.Tensor,
        data_mc: cute.Tensor,
        sums: cute.Tensor,
        sums_mc: cute.Tensor,
        flags: cute.Tensor,
        flags_mc: cute.Tensor,
        out: cute.Tensor,
        rank: cutlass.Int32,
        stream: cuda.CUstream,
    ):
        self.kernel(mine, data, data_mc, sums, sums_mc, flags, flags_mc, out, rank).launch(
            grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mine: cute.Tensor,
        data: cute.Tensor,
        data_mc: cute.Tensor,
        sums: cute.Tensor,
        sums_mc: cute.Tensor,
        flags: cute.Tensor,
        flags_mc: cute.Tensor,
        out: cute.Tensor,
        rank: cutlass.Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(SIZE // THREADS):
            data[i * THREADS + tid] = mine[i * THREADS + tid]
        self.barrier(flags.iterator, flags_mc.iterator)
        part = SIZE // self.ranks
        if tid < part // 4:
            at = rank * part + 4 * tid
            x, y, z, w = distributed.multimem_ld_reduce_4xf32(data_mc.iterator + at)
            distributed.multimem_st_4xb32(sums_mc.iterator + at, x, y, z, w)
        self.barrier(flags.iterator + 1, flags_mc.iterator + 1)
        for i in cutlass.range_constexpr(SIZE // THREADS):
            out[i * THREADS + tid] = sums[i * THREADS + tid]

    @cute.jit
    def barrier(self, flag: cute.Pointer, flag_mc: cute.Pointer):
        """Wait for all ranks, and leave the flag at 0."""
        tid, _, _ = cute.arch.thread_idx()
        cute.arch.sync_threads()
        if tid == 0:
            distributed.multimem_red_add1(flag_mc, order="release", scope="sys")
            distributed.spin_lock_atom_cas_acquire_wait(flag, expected_val=self.ranks, reset_val=0, scope="sys")
        cute.arch.sync_threads()


def _values(count):
    mine = torch.randint(-9, 10, (count, SIZE)).float()
    return mine, torch.empty(count, SIZE), mine.sum(0).expand(count, SIZE).contiguous()


def one_shot(arch, count=2):
    """``OneShot``: (call, output, expected output), as the mutation score has it; to be called inside ``emulate``."""
    ranks = Ranks(count)
    data, flags = ranks.symmetric(SIZE), ranks.symmetric(SIZE, dtype=torch.int32)
    mine, out, expected = _values(count)
    tables = [from_dlpack(s.addresses) for s in (data, flags)]

    def args(rank):
        return from_dlpack(mine[rank]), *tables, from_dlpack(out[rank]), cutlass.Int32(rank), cuda.CUstream(0)

    function = cute.compile(OneShot(count), *args(0))

    def call():
        flags.fill_(0)
        data.fill_(-1)
        ranks.run(lambda rank: function(*args(rank)))

    return call, out, expected


def two_shot(arch, count=2):
    """``TwoShot``, likewise."""
    ranks = Ranks(count)
    data, sums, flags = ranks.symmetric(SIZE), ranks.symmetric(SIZE), ranks.symmetric(2, dtype=torch.int32)
    mine, out, expected = _values(count)

    def args(rank):
        shared = [t for s in (data, sums, flags) for t in (s[rank], s.multicast)]
        tensors = [from_dlpack(t, assumed_align=16) for t in (mine[rank], *shared, out[rank])]
        return *tensors, cutlass.Int32(rank), cuda.CUstream(0)

    function = cute.compile(TwoShot(count), *args(0))

    def call():
        flags.fill_(0)
        for s in (data, sums):
            s.fill_(-1)
        ranks.run(lambda rank: function(*args(rank)))

    return call, out, expected
