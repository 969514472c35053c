"""Grouped GEMM for sm_90a: persistent, warp-specialised, accumulators in registers.

=====================  ==========================================================================
warps                  role
=====================  ==========================================================================
0 to 4 W - 1           W warpgroups (1 or 2) of consumers: wgmma, then epilogue arithmetic, rounding,
                       staging, TMA store. They share a tile, ``tile_m / W`` rows each; or, ping-pong,
                       take tiles alternately, so that one multiplies while the other stores
4 W                    load: TMA of A and B
4 W + 1                load of block scales, where operands have them
4 W to 4 W + 3         load, with a gathered operand: gather it; the first warp loads the other one by TMA
4 W to 4 W + 7         load, with a packed operand: decode it; the first warp loads the other one by TMA
other warps of the 4   idle; they complete the warpgroup that gives its registers to the consumers
=====================  ==========================================================================

Every warp walks the same sequence of tiles on its own. Load warps and consumers synchronise on a ring of ``stages``
buffers, which the load warp keeps filling with the next tile's operands while the consumers store.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute, memory
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ... import instructions
from ...activation.activation_spec import ActivationSpec
from ...config import LINE, VARLEN_K, VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.dactivation import SLOTS, open_slots
from ...epilogue.vectors import allocate_vectors, vector_bytes
from ...scheduler import ceil_div
from ...scheduler.gated import varlen_m
from ...scheduler.problem import Problem, Share, VarlenK
from ...scheduler.ragged import ragged_tensor
from ..activation_call import ActivationKernelCall
from ..factors import LANES, factor_count, load_factors
from ..gather_call import Gathered, check
from ..gemm_call import GemmKernelCall
from ..operand_formats import DENSE, OperandFormat
from ..ring import RingBarriers, allocate_ring, open_ring
from ..two_products_call import lengthened
from . import gather_load, store
from .decode_load import load_few_tiles
from .load import TmaOperand, load_tiles
from .mma import consume_tiles
from .tilings import SMEM_BYTES, gathering_reason

WARPGROUP = 128
BARRIER_SMEM = 512  # at most
FEW_BARRIER_SMEM = 256  # at most, of 13 stages
ALIGNED = 1024


def depth_major(tensor: cute.Tensor) -> bool:
    """Return whether an operand ``[rows, depth, ...]`` is contiguous along the contraction."""
    return isinstance(tensor.stride[1], int) and tensor.stride[1] == 1


class Sm90GemmKernel(GemmKernelCall):
    """A kernel of one kind, tiling, epilogue and element type; layouts come with the tensors it is compiled for.

    Attributes:
        gradient: the activation of the dactivation epilogue, or None.
        chunk: rows and columns of a chunk, which a warp stages and stores at a time.
        buffers: chunks that each consumer warp stages.
        gathered: the operand whose rows are gathered by an index, ``"a"`` or ``"b"``, or None; see ``gather_load``.
        paired: whether there is a second pair of operands; see ``two_products_call``.
        symmetric: whether a triangle of the result is computed, and stored twice; see ``syrk_kernel``.
        alternates: whether the two warpgroups that share a tile issue the MMAs of a stage alternately.
        by_lanes: the operand that threads write to the ring, while the other one is loaded by TMA; or None.
        aside: bytes of shared memory that these threads have for themselves.
        load_warpgroups: number of warpgroups whose warps load.
    """

    gradient: ActivationSpec | None = None
    hidden: Any  # of a kernel with ``gradient``
    paired = symmetric = False
    buffers = aside = 0
    load_warpgroups = 1

    def __init__(
        self,
        kind: str,
        config: GemmConfig,
        spec: EpilogueSpec,
        a_element: type[cutlass.Numeric],
        b_element: type[cutlass.Numeric] | None = None,
        form: OperandFormat = DENSE,
        gathered: str | None = None,
    ):
        check(kind, gathered, gathering_reason(config))
        self.gathered = self.by_lanes = gathered
        self.config, self.spec, self.form = config, spec, form
        self.a_element, self.b_element = a_element, b_element or a_element
        tiles = (*config.cluster_tile, config.band)
        self.policy: Any = varlen_m(spec, *tiles) if kind == VARLEN_M else VarlenK(*tiles, config.longest_first)
        self.out_element = getattr(
            cutlass, {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}[spec.out]
        )
        self.tiler = (config.tile_m, config.tile_n, config.tile_k)
        self.b_tile = ((config.tile_n // 2, 2) if spec.gated else config.tile_n, config.tile_k)
        self.teams = 2 if config.pingpong else 1  # of warpgroups that share a tile
        self.sharing = 1 if config.pingpong else min(config.tile_m // store.MMA_ROWS, 2)
        self.warpgroups = self.teams * self.sharing
        self.consumers = self.warpgroups * WARPGROUP
        self.stage_bytes = (config.tile_m + config.tile_n) * config.tile_k * a_element.width // 8
        line, buffers = store.staging(config, spec.gated)
        self.chunk = store.CHUNK_ROWS, line * 8 // self.out_element.width
        self.buffers = self.buffers or buffers
        vectors = vector_bytes(spec, *self.vector_tile)
        front = (FEW_BARRIER_SMEM + vectors) if config.few else BARRIER_SMEM + self.policy.smem_bytes
        fixed = (
            (0 if config.few else vectors)
            + ceil_div(front, ALIGNED) * ALIGNED
            + 4 * self.warpgroups * self.buffers * store.CHUNK_ROWS * line
            + self.aside
        )
        self.factors = factor_count(kind, config, form)  # of a stage
        # Of 64512, or 32768: a warp that finds rows, or scales of rows, anywhere needs more registers than one that
        # only issues TMA loads.
        finds = gathered is not None or (self.factors and kind == VARLEN_M)
        self.load_registers = 56 if finds else 40
        self.consumer_registers = (256 if config.few else 280 if finds else 272) - self.load_registers
        # Where a factor per column makes the additions longer than the MMAs, concurrent MMAs of both warpgroups delay
        # both.
        self.alternates = form.block > 0 and kind == VARLEN_K and self.sharing == 2
        # Pairs of columns whose factors stay in registers for all rows of a stage: with 256 rows there is no space for
        # all.
        self.held_pairs = config.tile_n // 8 - (2 if form.block and kind == VARLEN_K and config.tile_m == 256 else 0)
        self.stages = (SMEM_BYTES - fixed) // (self.stage_bytes + self.factors * Float32.width // 8)

    @property
    def finds_late(self) -> bool:
        """Return whether consumers find their next tile while the last MMAs of one run, instead of before the first.

        The dactivation epilogue has no registers to spare. The compiler spills less with the late look-up where rows
        are gathered, and with the early one elsewhere.
        """
        return self.a_element.width > 8 and (self.gradient is None or self.gathered is not None)

    @property
    def vector_tile(self) -> tuple[int, int]:
        """Return the rows and columns that bias and row scale are kept for: a tile per team."""
        return self.teams * self.config.tile_m, self.teams * self.config.tile_n

    @cute.jit
    def start(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        scales,
        offs: cute.Tensor,
        out: cute.Tensor | None,
        args,
        clusters: Int32,
        stream,
        second: cute.Tensor | None = None,
        extra=None,
        slots: cute.Tensor | None = None,
        begin: cute.Tensor | None = None,
        index: cute.Tensor | None = None,
        packed=None,
        pair=None,
        settled=None,
    ):
        """Make the tensor maps and launch.

        Args:
            scales: block scales of A and B, or None.
            out: None where the epilogue does not keep it.
            second: the activation's output, or None.
            extra: further operands of the dactivation epilogue, see ``hidden``.
            slots: index of each group's matrix, or None.
            begin: row offset of the first group, or None.
            index: rows of the ``gathered`` operand; None if nothing is gathered.
            packed: packed operand that threads decode instead of B, which then has a layout and no values; or None.
            pair: second pair of operands like A and B whose product is added, see ``two_products_call``; or None.
            settled: for a tiling of ``decode_kernels``, see there.
        """
        problem = self.policy.problem(a, b, offs, out, slots)._replace(begin=begin)
        source = packed
        if cutlass.const_expr(self.gathered is not None):
            source = Gathered(a if cutlass.const_expr(self.gathered == "a") else b, index)
            problem = problem._replace(rows=Int32(source.index.shape[0]))
        a, b, target = self.policy.views(a, b, out)
        a_depth, b_depth = depth_major(a), depth_major(b)
        tiled_mma = self.tiled_mma(a_depth, b_depth)
        row_major, column_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        a_smem = hopper_helpers.make_smem_layout_a(
            row_major if a_depth else column_major, self.tiler, self.a_element, self.stages
        )
        b_smem = hopper_helpers.make_smem_layout_b(
            row_major if b_depth else column_major, self.tiler, self.b_element, self.stages
        )
        ctas = self.config.ctas
        (a_map, a_coords), (b_map, b_coords) = self.maps(a, b, a_smem, b_smem)
        if cutlass.const_expr(pair is not None):
            problem = lengthened(problem, pair[0], self.config.tile_k)
            low, up, _ = self.policy.views(*pair, out)
            source = self.maps(low, up, a_smem, b_smem)
        if cutlass.const_expr(self.spec.reduces):
            save = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
        else:
            save = cpasync.CopyBulkTensorTileS2GOp()
        out_smem = store.chunk_layout(self.out_element, self.chunk, 4 * self.warpgroups * self.buffers)
        out_map: Any = None
        out_coords: Any = None
        if cutlass.const_expr(self.spec.keeps):
            out_map, out_coords = cpasync.make_tiled_tma_atom(save, target, out_smem, self.chunk)
        second_map, second_coords = self.second_map(save, second, target, out_smem)
        hidden: Any = None
        if cutlass.const_expr(self.gradient is not None):
            hidden = self.hidden(*extra, out_smem)
        running = cutlass.max(cutlass.min(self.policy.tiles_at_most(problem), clusters), 1)
        self.kernel(
            tiled_mma,
            (a_map, a_coords, a_smem),
            (b_map, b_coords, b_smem),
            (out_map, out_coords, out_smem),
            (second_map, second_coords),
            target if cutlass.const_expr(self.spec.reads_output) else None,
            scales,
            args,
            hidden,
            problem,
            source,
            settled,
        ).launch(
            grid=(running * ctas, 1, 1),
            block=(self.consumers + WARPGROUP * self.load_warpgroups, 1, 1),
            cluster=(ctas, 1, 1) if ctas > 1 else None,
            min_blocks_per_mp=2 if self.config.few else 1,  # sets the register limit: 128 for each of 256 threads
            preferred_smem_carveout=100 if self.config.few else None,  # in %; without it the compiler queries a driver
            stream=stream,
            use_pdl=self.config.few,
        )

    def second_map(self, save: Any, second: cute.Tensor | None, target: Any, out_smem: Any) -> tuple:
        """Return the tensor map of the second output and its coordinate tensor, or Nones."""
        if second is None:
            return None, None
        return cpasync.make_tiled_tma_atom(save, ragged_tensor(second, 0), out_smem, self.chunk)

    def maps(self, a: cute.Tensor, b: cute.Tensor, a_smem: Any, b_smem: Any) -> tuple[tuple, tuple]:
        """Return ``(map, coordinate tensor of the map)`` of A and of B, Nones for an operand that threads write."""
        tile_m, _, tile_k = self.tiler

        def of(name: str, operand: cute.Tensor, smem: Any, tile: tuple) -> tuple:
            if self.by_lanes == name:
                return None, None
            parts = self.shares(name)
            kind = cpasync.CopyBulkTensorTileG2SMulticastOp if parts > 1 else cpasync.CopyBulkTensorTileG2SOp
            return cpasync.make_tiled_tma_atom(kind(), operand, smem, tile, parts)

        return of("a", a, a_smem, (tile_m, tile_k)), of("b", b, b_smem, self.b_tile)

    def tiled_mma(self, a_depth: bool, b_depth: bool) -> cute.TiledMma:
        """Return the MMA of a team, for operands that are contiguous along the contraction or not.

        Raises:
            ValueError: the halves of a tile of B, contiguous along its columns, would not be whole lines.
        """
        if self.spec.gated and not b_depth and self.config.tile_n % (2 * LINE):
            raise ValueError(
                f"tile_n must be a multiple of {2 * LINE} for a gated B contiguous along N, not {self.config.tile_n}"
            )
        return hopper_helpers.make_trivial_tiled_mma(
            self.a_element,
            self.b_element,
            OperandMajorMode.K if a_depth else OperandMajorMode.MN,
            OperandMajorMode.K if b_depth else OperandMajorMode.MN,
            Float32,
            (self.sharing, 1, 1),
            (store.MMA_ROWS, self.config.tile_n),
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        a,
        b,
        out,
        second,
        out_values: cute.Tensor | None,
        scales,
        args,
        hidden,
        problem: Problem,
        source,
        settled,
    ):
        """Set up what the roles share, then branch into them."""
        a_map, a_coords, a_smem = a
        b_map, b_coords, b_smem = b
        out_map, out_coords, out_smem = out
        second_map, _ = second
        (low_map, low_coords), (up_map, up_coords) = source if self.paired else ((None, None), (None, None))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        ctas = self.config.ctas
        rank, first, step = block % ctas, block // ctas, blocks // ctas
        load_warp = self.consumers // 32
        if warp == load_warp:
            for tma in (a_map, b_map, low_map, up_map, out_map, second_map):
                if cutlass.const_expr(tma is not None):
                    cpasync.prefetch_descriptor(tma)

        allocator = memory.SmemAllocator()
        ring = allocate_ring(allocator, self.stages)
        if cutlass.const_expr(hidden is not None):
            full = open_slots(allocator, 4 * self.warpgroups * SLOTS, warp == load_warp)
            hidden = hidden._replace(full=full)
        problem = self.policy.arrange(problem, allocator, warp, load_warp + 4 * self.load_warpgroups, first, step)
        vectors: Any = None
        if cutlass.const_expr(self.config.few):
            vectors = allocate_vectors(allocator, self.spec, *self.vector_tile)
        a_buffers = allocator.allocate_tensor(self.a_element, a_smem.outer, ALIGNED, swizzle=a_smem.inner)
        b_buffers = allocator.allocate_tensor(self.b_element, b_smem.outer, ALIGNED, swizzle=b_smem.inner)
        out_buffers = allocator.allocate_tensor(self.out_element, out_smem.outer, ALIGNED, swizzle=out_smem.inner)
        if cutlass.const_expr(not self.config.few):
            vectors = allocate_vectors(allocator, self.spec, *self.vector_tile)
        factors: Any = None
        if cutlass.const_expr(self.factors):
            factors = allocator.allocate_tensor(Float32, cute.make_layout((self.factors, self.stages)), 16)
        aside: Any = None
        if cutlass.const_expr(self.aside):
            aside = allocator.allocate_array(Int64, num_elems=self.aside // 8, byte_alignment=16).toint()
        if warp == load_warp:
            with cute.arch.elect_one():
                lanes = (LANES if self.factors else 0) + self.arrivals
                open_ring(ring, self.stages, 1 + lanes, 4 * self.sharing * ctas)
        self.meet()

        if warp >= load_warp:
            cute.arch.setmaxregister_decrease(self.load_registers)
            operands = TmaOperand(a_map, a_coords, a_buffers), TmaOperand(b_map, b_coords, b_buffers)
            pair = TmaOperand(low_map, low_coords, a_buffers), TmaOperand(up_map, up_coords, b_buffers)
            if cutlass.const_expr(self.by_lanes is not None):
                if cutlass.const_expr(self.config.few):
                    instructions.wait()
                self.fill(source, *operands, ring, aside, Share(problem, rank, first, step))
            else:
                if warp == load_warp:
                    if cutlass.const_expr(self.config.few):
                        load_few_tiles(self, operands, ring, Share(problem, rank, first, step), settled)
                    else:
                        load_tiles(self, operands, pair, ring, Share(problem, rank, first, step))
            if cutlass.const_expr(self.factors):  # noqa: SIM102 - decided while tracing
                if warp == load_warp + 1:
                    load_factors(self, scales, factors, ring, Share(problem, rank, first, step))
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            if cutlass.const_expr(self.config.few):
                instructions.wait()
            output = store.OutputTarget(out_map, out_coords, out_buffers, out_values, second)
            consume_tiles(
                self,
                tiled_mma,
                a_buffers,
                b_buffers,
                factors,
                ring,
                output,
                vectors,
                args,
                hidden,
                problem,
                rank,
                first,
                step,
            )
        if cutlass.const_expr(ctas > 1):
            self.meet()  # no CTA leaves while another may still load into its shared memory

    def shares(self, name: str) -> int:
        """Return into how many parts a tile of operand ``name`` is split: one per CTA of the cluster that shares it."""
        return {"a": self.config.cluster_n, "b": self.config.cluster_m}[name]

    @property
    def arrivals(self) -> int:
        """Return the arrivals, at the barrier of a stage, of threads that write an operand."""
        return gather_load.LANES if self.gathered else 0

    def fill(self, source: Any, a: TmaOperand, b: TmaOperand, ring: RingBarriers, own: Any, share: Share):
        """Load the operand ``by_lanes``; the load warps call it.

        Args:
            source: the operand in global memory.
            own: address of ``aside`` bytes, or None.
        """
        gather_load.gather_tiles(self, source, a, b, ring, share)

    @cute.jit
    def meet(self):
        """Synchronise the cluster."""
        if cutlass.const_expr(self.config.ctas > 1):
            cute.arch.cluster_arrive(aligned=True)
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()


class Sm90GemmActivationKernel(ActivationKernelCall, Sm90GemmKernel):
    """A kernel with an activation as a second output."""
