"""A CuTe DSL kernel whose CTAs hand a result on through global memory and a flag."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

STORE = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], 16;"


class Publish:
    """CTA 0 stores 16 bytes by a bulk copy and raises a flag; CTA 1 spins on the flag and copies the bytes on.

    ``read`` waits only until the copy has read shared memory, which does not say that its writes are done.
    """

    def __init__(self, read=False):
        self.read = read

    @cute.jit
    def __call__(self, shelf: cute.Tensor, flag: cute.Tensor, dst: cute.Tensor, stream: cuda.CUstream):
        self.kernel(shelf, flag, dst).launch(grid=(2, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, shelf: cute.Tensor, flag: cute.Tensor, dst: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        tile = SmemAllocator().allocate_tensor(cutlass.Int32, cute.make_layout(4), 16)
        if cta == 0 and tid == 0:
            for i in cutlass.range_constexpr(4):
                tile[i] = 10 + i
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.inline_ptx(STORE, read_only_args=[shelf.iterator.toint(), tile.iterator.toint()])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=self.read)
            cute.arch.store(flag.iterator, cutlass.Int32(1), sem="release", scope="gpu")
        if cta == 1 and tid == 0:
            raised = cutlass.Int32(0)
            while raised == 0:
                raised = cute.arch.load(flag.iterator, cutlass.Int32, sem="acquire", scope="gpu")
            for i in cutlass.range_constexpr(4):
                dst[i] = shelf[i]


def publish(arch):
    """``Publish`` for the mutation score: (call, output, expected output); to be called inside ``emulate``."""
    shelf, flag, dst = (torch.zeros(n, dtype=torch.int32) for n in (4, 1, 4))
    args = [from_dlpack(t, assumed_align=16) for t in (shelf, flag, dst)]
    function = cute.compile(Publish(), *args, cuda.CUstream(0))

    def call():
        shelf.zero_()
        flag.zero_()
        function(*args, cuda.CUstream(0))

    return call, dst, torch.arange(10, 14, dtype=torch.int32)
