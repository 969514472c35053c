"""Grouped GEMM for sm_100a: persistent, warp-specialised, accumulators in tensor memory.

=====  ===========================================================================================
warps  role
=====  ===========================================================================================
0-3    epilogue: tensor memory -> registers -> shared memory -> TMA store, 32 rows each; warp 0 allocates
4      MMA: issues tcgen05.mma for the CTA, or for the pair of CTAs (then in the even one only)
5      load: TMA of A and B
6-7    gather, where rows of an operand are gathered by an index: TMA of that one, four rows at a time
=====  ===========================================================================================

With block scales, two teams of four warps add up the products of stages, and each is the epilogue of half of the
columns, see ``promote``. Then warps 8 and 9 multiply and load, and warp 10 loads the scales.

Every warp walks the same sequence of tiles on its own. Two pipelines connect them: ``stages`` buffers of A and B
between load and MMA, and two accumulators between MMA and epilogue, so that one tile's epilogue runs during the next
tile's mainloop. Where tensor memory is too small for both and the block scales, they share some columns: the epilogue
reads those first and releases the accumulator after them. ``results`` then has one stage, whose phase says which
accumulator it is.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute, memory, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers, blockscaled_layout

from ...activation.activation_spec import ActivationSpec
from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.dactivation import SLOTS, open_slots
from ...epilogue.vectors import EpilogueArgs, allocate_vectors, vector_bytes
from ...scheduler import ceil_div
from ...scheduler.gated import varlen_m
from ...scheduler.problem import Problem, Share, VarlenK
from ...scheduler.ragged import ragged_tensor
from ..activation_call import ActivationKernelCall
from ..factors import load_factors
from ..gather_call import Gathered, check
from ..gemm_call import GemmKernelCall
from ..operand_formats import ATOM_ROWS, DENSE, OperandFormat
from ..two_products_call import lengthened
from . import gather_load, promote
from .dactivation_epilogue import finish_tiles
from .load import load_tiles
from .mma import Buffers, multiply_tiles
from .pieces import WARP_ROWS
from .store import Outputs, store_tiles
from .tilings import SMEM_BYTES, TMEM_COLUMNS, gathering_reason

TEAM_WARPS = 4  # one for each quarter of tensor memory
ACCUMULATORS = 2
STORE_BARRIER, ALLOCATION_BARRIER = 1, 2  # named barriers; 0 is the whole CTA's
BARRIER_SMEM = 512  # at most, and the tensor memory address
ALIGNED = 1024


class Inputs(NamedTuple):
    """Operands that the loading warps read.

    Attributes:
        a, b: (map, coordinate tensor of the map, shared memory layout).
        scales: the same of their scales and the MMA that partitions those of B, or None; see ``scale_maps``.
        factors: block scales of both operands in global memory, or None; see ``promote``.
        gathered: the operand whose rows are gathered by an index, or None.
        pair: (map, coordinate tensor of the map) of both operands of a second pair, or None; see ``two_products_call``.
    """

    a: tuple
    b: tuple
    scales: Any
    factors: Any
    gathered: Gathered | None
    pair: Any


def major(tensor: cute.Tensor, depth_mode: int) -> OperandMajorMode:
    """Return whether an operand is contiguous along the contraction."""
    contiguous = isinstance(tensor.stride[depth_mode], int) and tensor.stride[depth_mode] == 1
    return OperandMajorMode.K if contiguous else OperandMajorMode.MN


def _maps(outputs: tuple | None) -> list[cute.CopyAtom]:
    """Return the tensor maps among the epilogue's outputs."""
    return [part for part in outputs or () if isinstance(part, cute.CopyAtom)]


def turns(pieces: int, room: int) -> int:
    """Return how many buffers the pieces of a tile rotate through, so that every tile begins with the first if
    possible.

    Then the buffer of a piece is known at compile time, and its addresses need no arithmetic.
    """
    return max((n for n in range(2, room + 1) if pieces % n == 0), default=room)


class Sm100GemmKernel(GemmKernelCall):
    """A kernel of one kind, tiling, epilogue and element types; layouts come with the tensors it is compiled for.

    Attributes:
        gradient: the activation of the dactivation epilogue, or None.
        buffers: how many epilogue tiles are staged; None: up to four, as shared memory allows, see ``turns``.
        overlap: columns of tensor memory that both accumulators share, the last of the even and the first of the odd.
        read_first: steps of the epilogue, of a piece or of a pair, after which it releases the accumulator.
        gathered: the operand whose rows are gathered by an index, ``"a"`` or ``"b"``, or None; see ``gather_load``.
        paired: whether there is a second pair of operands; see ``two_products_call``.
    """

    gradient: ActivationSpec | None = None
    hidden: Any  # of a gradient
    buffers: int | None = None
    paired = False

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
        self.kind, self.gathered = kind, gathered
        self.promotes = form.block > 0
        self.teams = promote.TEAMS if self.promotes else 1
        self.mma_warp = TEAM_WARPS * self.teams  # the epilogue's are those before it
        self.load_warp = self.mma_warp + 1
        self.load_warps = 1 if gathered is None else 1 + gather_load.WARPS  # of A and B
        self.warps = self.load_warp + self.load_warps + self.promotes
        self.config, self.spec, self.form = config, spec, form
        self.a_element, self.b_element = a_element, b_element or a_element
        tiles = (config.tile_m, config.tile_n, config.band)
        self.policy: Any = varlen_m(spec, *tiles) if kind == VARLEN_M else VarlenK(*tiles, config.longest_first)
        self.out_element = getattr(
            cutlass, {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}[spec.out]
        )
        self.tiler = (config.tile_m, config.tile_n, config.tile_k)
        self.b_tile = ((config.tile_n // 2, 2) if spec.gated else config.tile_n, config.tile_k)
        # One row of an epilogue tile is one 128-byte swizzle span: conflict-free stores, full TMA boxes.
        widest = config.tile_n // 2 if spec.gated else config.tile_n
        self.epi_tile = (config.cta_m, min(widest, 1024 // self.out_element.width))
        group = tcgen05.CtaGroup.TWO if config.two_cta else tcgen05.CtaGroup.ONE
        self.cta_group = group
        row_bits = config.cta_m * a_element.width + config.tile_n // config.ctas * self.b_element.width
        stage = row_bits * config.tile_k // 8
        scale_columns = 0
        if form.vector:  # both CTAs of a pair hold the scales of all of B
            scale_bytes = form.scale_bytes(config.cta_m) + form.scale_bytes(config.tile_n)
            stage += scale_bytes
            scale_columns = scale_bytes // ATOM_ROWS  # in tensor memory, four scales per column and lane
        epi_stage = self.teams * self.epi_tile[0] * self.epi_tile[1] * self.out_element.width // 8
        head = BARRIER_SMEM + self.policy.smem_bytes + promote.factor_bytes(self)
        fixed = vector_bytes(spec, config.cta_m, config.tile_n) + ceil_div(head, ALIGNED) * ALIGNED
        self.stages = (SMEM_BYTES - fixed - (self.buffers or 2) * epi_stage) // stage
        room = (SMEM_BYTES - fixed - self.stages * stage) // epi_stage
        self.epi_stages = self.buffers or turns(config.tile_n // self.teams // self.epi_tile[1], min(4, room))
        self.stage_bytes = stage * config.ctas
        columns = TMEM_COLUMNS - scale_columns
        self.accumulators = columns // config.tile_n if self.promotes else ACCUMULATORS
        self.overlap = max(self.accumulators * config.tile_n - columns, 0)
        self.hand_overs = 1 if self.overlap else self.accumulators
        halves = 2 if spec.activation is not None and spec.activation.gated else 1
        steps = config.tile_n // self.teams // halves // self.epi_tile[1]
        self.read_first = ceil_div(self.overlap, self.epi_tile[1]) if self.overlap else steps
        self.scale_tiler = (config.cta_m, max(config.tile_n, ATOM_ROWS), config.tile_k)

    def warp_layout(self) -> cute.ComposedLayout:
        """Return the shared-memory layout of one warp's rows of an epilogue tile, which one TMA store moves."""
        tile = (WARP_ROWS, self.epi_tile[1])
        layout = blackwell_helpers.make_smem_layout_epi(self.out_element, LayoutEnum.ROW_MAJOR, tile, 1)
        return cute.slice_(layout, (None, None, 0))

    @cute.jit
    def start(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        scales,
        offs: cute.Tensor,
        out: cute.Tensor | None,
        args: EpilogueArgs,
        clusters: Int32,
        stream,
        second=None,
        extra=None,
        slots: cute.Tensor | None = None,
        begin: cute.Tensor | None = None,
        index: cute.Tensor | None = None,
        pair=None,
    ):
        """Make the tensor maps and launch.

        Args:
            scales: block scales of A and B in global memory, or None.
            out: None where the epilogue does not keep it.
            second: destination of the activation, see the method of this name; or None.
            extra: further operands of the dactivation epilogue, see ``hidden``.
            slots: index of each group's matrix, or None.
            begin: row offset of the first group, or None.
            index: rows of the ``gathered`` operand; None if nothing is gathered.
            pair: second pair of operands like A and B whose product is added, see ``two_products_call``; or None.
        """
        config = self.config
        problem = self.policy.problem(a, b, offs, out, slots)._replace(begin=begin)
        gathered: Any = None
        if cutlass.const_expr(self.gathered is not None):
            gathered = Gathered(a if cutlass.const_expr(self.gathered == "a") else b, index)
            problem = problem._replace(rows=Int32(gathered.index.shape[0]))
        if cutlass.const_expr(pair is not None):
            problem = lengthened(problem, pair[0], config.tile_k)
            pair = self.policy.views(*pair, out)[:2]
        a, b, out = self.policy.views(a, b, out)
        tiled_mma = self.tiled_mma(major(a, 1), major(b, 1), self.cta_group, self.tiler[:2])
        cluster = (config.ctas, 1, 1)
        cluster_vmnk = cute.tiled_divide(cute.make_layout(cluster), (tiled_mma.thr_id.shape,))
        a_smem = blackwell_helpers.make_smem_layout_a(tiled_mma, self.tiler, self.a_element, self.stages)
        b_smem = blackwell_helpers.make_smem_layout_b(tiled_mma, self.tiler, self.b_element, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp(self.cta_group)
        if cutlass.const_expr(self.gathered == "a"):
            a_map, a_coords = gather_load.gather_map(self, gathered, a_smem)
        else:
            a_map, a_coords = self.a_map(load, a, a_smem, tiled_mma, cluster_vmnk)
        if cutlass.const_expr(self.gathered == "b"):
            b_map, b_coords = gather_load.gather_map(self, gathered, b_smem)
        else:
            b_map, b_coords = self.b_map(load, b, b_smem, tiled_mma, cluster_vmnk)
        behind: Any = None
        if cutlass.const_expr(pair is not None):
            low, up = pair
            behind = (
                self.a_map(load, low, a_smem, tiled_mma, cluster_vmnk),
                self.b_map(load, up, b_smem, tiled_mma, cluster_vmnk),
            )
        scale_operands: Any = None
        if cutlass.const_expr(self.form.vector):
            scale_operands = self.scale_maps(tiled_mma, load, cluster_vmnk, *self.policy.scale_views(*scales, problem))
        out_smem = blackwell_helpers.make_smem_layout_epi(
            self.out_element, LayoutEnum.ROW_MAJOR, self.epi_tile, self.epi_stages * self.teams
        )
        if cutlass.const_expr(self.spec.reduces):
            store = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
        else:
            store = cpasync.CopyBulkTensorTileS2GOp()
        piece = (WARP_ROWS, self.epi_tile[1])
        out_map: Any = None
        out_coords: Any = None
        if cutlass.const_expr(self.spec.keeps):
            out_map, out_coords = cpasync.make_tiled_tma_atom(store, out, self.warp_layout(), piece)
        outputs: Any = None
        if cutlass.const_expr(second is not None):
            outputs = self.second(second, store, problem)
        hidden: Any = None
        if cutlass.const_expr(self.gradient is not None):
            hidden = self.hidden(*extra)
        running = cutlass.max(cutlass.min(self.policy.tiles_at_most(problem), clusters), 1)
        self.kernel(
            tiled_mma,
            cluster_vmnk,
            Inputs(
                (a_map, a_coords, a_smem),
                (b_map, b_coords, b_smem),
                scale_operands,
                scales if cutlass.const_expr(self.promotes) else None,
                gathered,
                behind,
            ),
            Outputs(
                (out_map, out_coords, out_smem), outputs, out if cutlass.const_expr(self.spec.reads_output) else None
            ),
            args,
            hidden,
            problem,
        ).launch(
            grid=(running * config.ctas, 1, 1),
            block=(32 * self.warps, 1, 1),
            cluster=cluster,
            stream=stream,
            min_blocks_per_mp=1,  # shared memory allows no more: registers need not be spared
        )

    def a_map(self, load, a: cute.Tensor, a_smem, tiled_mma: cute.TiledMma, cluster_vmnk) -> tuple:
        """Return ``(map, coordinate tensor of the map)`` of an operand like A."""
        stage = cute.slice_(a_smem, (None, None, None, 0))
        return cute.nvgpu.make_tiled_tma_atom_A(load, a, stage, self.tiler, tiled_mma, cluster_vmnk.shape)

    def b_map(self, load, b: cute.Tensor, b_smem, tiled_mma: cute.TiledMma, cluster_vmnk) -> tuple:
        """Return ``(map, coordinate tensor of the map)`` of an operand like B."""
        stage, tiler = cute.slice_(b_smem, (None, None, None, 0)), (self.tiler[0], *self.b_tile)
        return cute.nvgpu.make_tiled_tma_atom_B(load, b, stage, tiler, tiled_mma, cluster_vmnk.shape)

    def second(self, y: cute.Tensor, store, problem: Problem) -> tuple:
        """Return ``(map, coordinate tensor of the map)`` of the activation's output."""
        piece = (WARP_ROWS, self.epi_tile[1])
        return cpasync.make_tiled_tma_atom(store, ragged_tensor(y, 0), self.warp_layout(), piece)

    def tiled_mma(self, a_major, b_major, cta_group, tile: tuple[int, int]) -> cute.TiledMma:
        """Return the MMA for operands of these majors."""
        elements = (self.a_element, self.b_element, a_major, b_major)
        if not self.form.vector:
            return blackwell_helpers.make_trivial_tiled_mma(*elements, Float32, cta_group, tile)
        scale = getattr(cutlass, self.form.scale)
        return blackwell_helpers.make_blockscaled_trivial_tiled_mma(*elements, scale, self.form.vector, cta_group, tile)

    def accumulator_layout(self, tiled_mma: cute.TiledMma) -> cute.Layout:
        """Return ``[..., accumulators]`` in tensor memory, whose columns have stride 1."""
        shape = cute.append(tiled_mma.partition_shape_C(self.tiler[:2]), self.accumulators)
        layout = tiled_mma.make_fragment_C(shape).layout
        return cute.make_layout(layout.shape, stride=(*layout.stride[:-1], layout.stride[-1] - self.overlap))

    def scale_maps(self, tiled_mma: cute.TiledMma, load, cluster_vmnk, a_scale: cute.Tensor, b_scale: cute.Tensor):
        """(map, coordinates, shared memory layout) of the scales of A and of B, and the MMA that partitions B's.

        Both CTAs of a pair need the scales of all of B: each loads half of every box and sends it to both.
        """
        vector, ctas = self.form.vector, self.config.ctas
        shared = load if ctas == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp(self.cta_group)
        single = self.tiled_mma(OperandMajorMode.K, OperandMajorMode.K, tcgen05.CtaGroup.ONE, self.scale_tiler[:2])
        a_smem = blockscaled_layout.make_smem_layout_sfa(tiled_mma, self.tiler, vector, self.stages)
        b_smem = blockscaled_layout.make_smem_layout_sfb(tiled_mma, self.tiler, vector, self.stages)
        # A map's box holds up to 256 elements a mode; an atom of 512 bytes is one as 16-bit elements.
        a_map, a_coords = cute.nvgpu.make_tiled_tma_atom_A(
            load,
            a_scale,
            cute.slice_(a_smem, (None, None, None, 0)),
            self.tiler,
            tiled_mma,
            cluster_vmnk.shape,
            internal_type=cutlass.Int16,
        )
        b_map, b_coords = cute.nvgpu.make_tiled_tma_atom_B(
            shared,
            b_scale,
            cute.slice_(b_smem, (None, None, None, 0)),
            (self.scale_tiler[0], *self.b_tile) if self.spec.gated else self.scale_tiler,
            single,
            (1, ctas, 1, 1),
            internal_type=cutlass.Int16,
        )
        return (a_map, a_coords, a_smem), (b_map, b_coords, b_smem), single

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        cluster_vmnk: cute.Layout,
        inputs: Inputs,
        outputs: Outputs,
        args: EpilogueArgs,
        hidden,
        problem: Problem,
    ):
        """Set up what the roles share, then branch into them."""
        config = self.config
        (a_map, a_coords, a_smem), (b_map, b_coords, b_smem), scales, factors, gathered, pair = inputs
        (out_map, out_coords, out_smem), second, out_values = outputs
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        if warp == self.load_warp:
            for tma in (a_map, b_map, *_maps((out_map,)), *_maps(second)):
                cpasync.prefetch_descriptor(tma)

        allocator = memory.SmemAllocator()
        full = allocator.allocate_array(Int64, 2 * self.stages)
        accumulated = allocator.allocate_array(Int64, 2 * self.hand_overs)
        freed = allocator.allocate(Int64, 8)
        address = allocator.allocate(Int32, 4)
        loads = pipeline.PipelineTmaUmma.create(
            barrier_storage=full,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.load_warps),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            tx_count=self.stage_bytes - (gather_load.gathered_bytes(self) if self.gathered else 0),
            cta_layout_vmnk=cluster_vmnk,
            defer_sync=True,
        )
        results = pipeline.PipelineUmmaAsync.create(
            barrier_storage=accumulated,
            num_stages=self.hand_overs,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.mma_warp * config.ctas),
            cta_layout_vmnk=cluster_vmnk,
            defer_sync=True,
        )
        tmem = memory.TmemAllocator(
            address,
            barrier_for_retrieve=pipeline.NamedBarrier(ALLOCATION_BARRIER, 32 * (self.mma_warp + 1)),
            is_two_cta=config.two_cta,
            two_cta_tmem_dealloc_mbar_ptr=freed if cutlass.const_expr(config.two_cta) else None,
        )
        if cutlass.const_expr(hidden is not None):
            hidden = hidden._replace(full=open_slots(allocator, TEAM_WARPS * SLOTS, warp == self.load_warp))
        factor_buffers: Any = None
        if cutlass.const_expr(self.promotes):
            factor_buffers = promote.allocate_factors(self, allocator, self.mma_warp, warp == self.load_warp)
        pipeline.pipeline_init_arrive(cluster_vmnk, is_relaxed=True)
        rank = block % config.ctas
        first, step = block // config.ctas, blocks // config.ctas
        problem = self.policy.arrange(problem, allocator, warp, self.warps, first, step)

        a_buffers = allocator.allocate_tensor(self.a_element, a_smem.outer, ALIGNED, swizzle=a_smem.inner)
        b_buffers = allocator.allocate_tensor(self.b_element, b_smem.outer, ALIGNED, swizzle=b_smem.inner)
        out_buffers = allocator.allocate_tensor(self.out_element, out_smem.outer, ALIGNED, swizzle=out_smem.inner)
        scale_loads: Any = None
        scale_buffers: Any = None
        if cutlass.const_expr(scales is not None):
            (a_scale_map, a_scale_coords, a_layout), (b_scale_map, b_scale_coords, b_layout), single = scales
            element = getattr(cutlass, self.form.scale)
            scale_buffers = tuple(allocator.allocate_tensor(element, layout, 128) for layout in (a_layout, b_layout))
            scale_loads = (
                (a_scale_map, a_scale_coords, scale_buffers[0]),
                (b_scale_map, b_scale_coords, scale_buffers[1]),
                single.get_slice(0),
            )
        vectors = allocate_vectors(allocator, self.spec, config.cta_m, config.tile_n)
        acc_layout = self.accumulator_layout(tiled_mma)
        pipeline.pipeline_init_wait(cluster_vmnk)

        a, b = (a_map, a_coords, a_buffers), (b_map, b_coords, b_buffers)
        behind: Any = None
        if cutlass.const_expr(pair is not None):
            behind = (*pair[0], a_buffers), (*pair[1], b_buffers)
        share = Share(problem, rank, first, step)
        if warp == self.load_warp:
            load_tiles(self, tiled_mma.get_slice(rank), (a, b), behind, scale_loads, loads, share)
        if cutlass.const_expr(gathered is not None):  # noqa: SIM102 - decided while tracing
            if warp > self.load_warp:
                operand, which = a if cutlass.const_expr(self.gathered == "a") else b, warp - self.load_warp - 1
                gather_load.gather_tiles(self, gathered, operand, loads, which, share)
        if cutlass.const_expr(self.promotes):  # noqa: SIM102 - decided while tracing
            if warp == self.load_warp + 1:
                load_factors(self, factors, factor_buffers.buffers, factor_buffers.ring, share)
        if warp == self.mma_warp:
            tmem.wait_for_alloc()
            accumulators = cute.make_tensor(tmem.retrieve_ptr(Float32), acc_layout)
            if rank == 0:
                buffers = Buffers(a_buffers, b_buffers, scale_buffers)
                multiply_tiles(self, tiled_mma, buffers, accumulators, loads, results, share)
        if warp < self.mma_warp:
            tmem.allocate(TMEM_COLUMNS)
            tmem.wait_for_alloc()
            pointer = tmem.retrieve_ptr(Float32)
            accumulators = cute.make_tensor(pointer, acc_layout)
            staged = Outputs((out_map, out_coords, out_buffers), second, out_values)
            if cutlass.const_expr(hidden is not None):
                finish_tiles(self, accumulators, staged, hidden, results, share)
            else:
                made = promote.Results(accumulators, results, factor_buffers)
                store_tiles(self, made, staged, vectors, args, share)
            tmem.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=STORE_BARRIER, number_of_threads=32 * self.mma_warp)
            tmem.free(pointer)


class Sm100GemmActivationKernel(ActivationKernelCall, Sm100GemmKernel):
    """A kernel with an activation as a second output."""
