"""Sums over a few parts, each by one thread in order of the parts, so that the bits depend on nothing else."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..runtime.function_names import named
from ..scheduler import ceil_div

THREADS = 256
UNROLLED = 8  # loads in flight, if there are as many parts


@named
class PartialSumsKernel:
    """The kernel for ``out[t] = parts[0, t] + parts[1, t] + ...``."""

    @cute.jit
    def __call__(self, parts: cute.Tensor, out: cute.Tensor, stream):
        """Launch.

        Args:
            parts: float32 ``[P, T]``.
            out: float32 ``[T]``.
        """
        blocks = ceil_div(Int32(cute.size(out)), THREADS)
        self.kernel(parts, out).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, parts: cute.Tensor, out: cute.Tensor):
        """Sum the parts."""
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        t = bid * THREADS + tid
        if t < cute.size(out):
            total = Float32(0.0)
            for part in cutlass.range(0, cute.size(parts, mode=[0]), 1, unroll=UNROLLED):
                total += parts[part, t]
            out[t] = total
