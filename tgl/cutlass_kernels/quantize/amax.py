"""The largest finite magnitude of every group, for NVFP4, by atomics, which give the same maximum in any order."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from .. import instructions
from ..bits import INFINITY, NAN, as_bits
from ..runtime.function_names import named
from ..scheduler import ceil_div
from .fp4 import hadamard
from .lane_tile import COLUMNS, LANES, MAGNITUDE, STEPS, VECTOR, WARPS, BandValues
from .tensors import QuantizeSource, source_of
from .tiles import ROWS, group_of_unit, group_tile, matrix_tile

CHUNK = 8  # tiles of columns per block, at most
BLOCKS = 1024  # with fewer blocks, each takes fewer tiles
CARVEOUT = 40  # in %, the rest is cache; equal to the next kernel's, or that one waits
CLEARED = 256  # words that a block clears


@cute.jit
def raise_maximum(seen: Int32, amax: Any, columnwise_amax: Any, group: Int32):
    """``amax[group] = max(amax[group], seen)`` over a warp, in both; every NaN becomes the same one."""
    top = cute.arch.warp_redux_sync(seen, kind="max")
    if top > INFINITY:
        top = Int32(NAN)
    if cute.arch.lane_idx() == 0:
        for held in (amax, columnwise_amax):
            if cutlass.const_expr(held is not None):
                cute.arch.atomic_max((held.iterator + group).llvm_ptr, top)


@named
class GroupAmaxKernel(BandValues):
    """The amax kernel for one source, and a kernel before it that clears the results.

    Each is a programmatic dependent launch: it begins while the one before ends, and writes after that has ended.

    Args:
        source: dtype of x, as ``torch`` names it.
        grouped: whether x is rows in groups rather than matrices.
        rht: whether the columnwise maxima are those after the Hadamard transform.
        elementwise: see ``LaneValues``.
        scaled: whether rows have factors.
        spares_registers: a fact of the architecture, see ``Arch``.
    """

    def __init__(
        self,
        source: str,
        grouped: bool,
        rht: bool = False,
        elementwise: bool = False,
        scaled: bool = False,
        spares_registers: bool = True,
    ):
        super().__init__(source, elementwise)
        self.grouped = grouped
        self.transformed = BandValues("bfloat16") if rht else None
        blocks = 3 - rht - (not self.packed) - (rht and (elementwise or scaled))  # limited by registers
        self.blocks_per_sm = max(blocks - (rht and not spares_registers), 1)

    @cute.jit
    def __call__(self, source: QuantizeSource, amax: cute.Tensor | None, columnwise_amax: cute.Tensor | None, stream):
        """Launch both kernels; ``amax`` and ``columnwise_amax`` are bits of float32."""
        raised = [t for t in (amax, columnwise_amax) if t is not None]
        self.clear(source.noop, raised).launch(
            grid=(cutlass.max(ceil_div(Int32(cute.size(raised[0])), CLEARED), 1), 1, 1),
            block=(CLEARED, 1, 1),
            stream=stream,
            preferred_smem_carveout=CARVEOUT,
        )
        grid = source.grid(COLUMNS, CHUNK, BLOCKS)
        self.kernel(source, amax, columnwise_amax, grid.across, grid.chunk).launch(
            grid=grid.shape,
            block=(WARPS * LANES, 1, 1),
            stream=stream,
            min_blocks_per_mp=instructions.sharing(self.blocks_per_sm),
            use_pdl=instructions.overlaps(),
            preferred_smem_carveout=CARVEOUT,
        )

    @cute.kernel
    def clear(self, noop: Any, raised: list[cute.Tensor]):
        """Zero the results, unless ``noop`` is set."""
        instructions.launch_dependents()
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        at = block * CLEARED + thread
        wanted = at < cute.size(raised[0])
        if cutlass.const_expr(noop is not None):
            wanted = wanted and noop[0] == noop.element_type(0)
        if wanted:
            for held in raised:
                held[at] = Int32(0)

    @cute.kernel
    def kernel(
        self,
        source: QuantizeSource,
        amax: cute.Tensor | None,
        columnwise_amax: cute.Tensor | None,
        across: Int32,
        chunk: Int32,
    ):
        """Process one tile of rows, a chunk of its tiles of columns."""
        instructions.launch_dependents()
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        chunks = ceil_div(across, chunk)
        unit = block // chunks
        if cutlass.const_expr(self.grouped):
            group = group_of_unit(source.offs, source.rows, unit)
            tile = group_tile(source.offs, source.rows, unit, group)
        else:
            group = unit // ceil_div(source.matrix_rows, ROWS)
            tile = matrix_tile(source.matrix_rows, unit)
        first = (block - unit * chunks) * chunk
        x, read = source_of(source, group, tile)
        wanted = read.count > 0 and not read.tail
        if cutlass.const_expr(source.noop is not None):
            wanted = wanted and source.noop[0] == source.noop.element_type(0)
        if wanted:
            seen, columnwise_seen = Int32(0), Int32(0)
            for k in cutlass.range(first, cutlass.min(first + chunk, across), unroll=1):
                values = cute.make_rmem_tensor((VECTOR, STEPS), self.source)
                self.load_tile(x, values, read, k, thread)  # reads some again where the tile is not whole
                if cutlass.const_expr(source.row_scale is not None):
                    self.multiply_rows(source.row_scale, values, read, thread)
                if cutlass.const_expr(source.row_scale is not None or self.transformed is not None):
                    self.clear_outside(x, values, read, k, thread)
                if cutlass.const_expr(self.transformed is None or amax is not None):
                    seen = cutlass.max(seen, self.maximum(values, False))
                if cutlass.const_expr(self.transformed is not None):
                    turned = hadamard(values, thread % LANES)
                    columnwise_seen = cutlass.max(columnwise_seen, self.maximum(turned, True))
            instructions.wait()
            if cutlass.const_expr(self.transformed is None):
                raise_maximum(seen, amax, columnwise_amax, group)
            else:
                raise_maximum(columnwise_seen, None, columnwise_amax, group)
                if cutlass.const_expr(amax is not None):
                    raise_maximum(seen, amax, None, group)
        else:
            instructions.wait()  # here too: no later launch may run beside the previous kernel

    @cute.jit
    def maximum(self, values, transformed: cutlass.Constexpr):
        """Return the largest finite magnitude of a lane's values."""
        seen = self.reader(transformed).lane_maximum(values)
        if seen >= INFINITY:
            seen = finite_maximum(values)
        return seen

    def reader(self, transformed: bool) -> BandValues:
        """Return the reader for the dtype of values."""
        return self.transformed if transformed and self.transformed is not None else self


def finite_maximum(values) -> Int32:
    """Return the bits, as float32, of the largest finite magnitude."""
    seen = Int32(0)
    for j in range(VECTOR):
        for i in range(STEPS):
            magnitude = as_bits(values[j, i].to(Float32)) & MAGNITUDE
            seen = cutlass.max(seen, cutlass.select_(magnitude >= INFINITY, Int32(0), magnitude))
    return seen
