"""As many ``mma.sync`` as tensor cores take: operands and sums stay in registers, and nothing is loaded."""

from __future__ import annotations

import functools
from collections.abc import Callable

import cutlass
from cutlass import BFloat16, Float32, Int32, cute

from tgl.cutlass_kernels.gemm.mma_sync.mma import MMA, tiled_mma
from tgl.cutlass_kernels.runtime.compiling import compiled, vector

WARPS = 8
THREADS = 32 * WARPS
ROWS = COLUMNS = 64  # of a warp's sums, as in the kernels' largest tiles
TURN = 2 * WARPS * ROWS * COLUMNS * MMA[2]  # FLOPs of a block in a turn of the loop


class Ceiling:
    """The loop. What it sums is written at the end, one number per thread, so that nothing of it can be left out."""

    @cute.jit
    def __call__(self, out: cute.Tensor, turns: Int32, blocks: Int32, stream):
        """Launch ``blocks`` of ``THREADS``; ``out`` is float32, as many."""
        self.kernel(out, turns).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor, turns: Int32):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        mma = tiled_mma(BFloat16)
        a = cute.make_rmem_tensor(mma.partition_shape_A((ROWS, MMA[2])), BFloat16)
        b = cute.make_rmem_tensor(mma.partition_shape_B((COLUMNS, MMA[2])), BFloat16)
        sums = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, COLUMNS)), Float32)
        a.fill(BFloat16(Float32(thread % 2)))
        b.fill(BFloat16(1.0))
        sums.fill(0.0)
        for _ in cutlass.range(turns, unroll=1):
            cute.gemm(mma, sums, a[None, None, 0], b[None, None, 0], sums)
        out[block * THREADS + thread] = sums.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


@functools.cache
def build(arch: str) -> Callable:
    """The kernel for an architecture. Needs no GPU."""
    return compiled(arch, Ceiling(), vector("float32"), Int32(1), Int32(1))
