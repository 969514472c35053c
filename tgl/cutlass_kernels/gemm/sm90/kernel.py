"""Grouped GEMM for Hopper, both kinds, persistent and warp-specialised.

====================  ======================  =========================================================================
kind                  MMA operands            groups
====================  ======================  =========================================================================
``varlen_m``          A = a ``[T, K]``        differ in rows: A is read from the group's first row on, the output is
                      B = b[g] ``[N, K]``     stored through a ragged tensor map that ends where the group ends
``varlen_k``          A = a^T ``[M, T]``      differ in depth: both operands are read through ragged tensor maps, whose
                      B = b^T ``[N, T]``      zeros make up the last k tile
====================  ======================  =========================================================================

====================  ==================================================================================
warps                 role
====================  ==================================================================================
0 .. 4 W - 1          W consumer warpgroups share a tile: each multiplies ``tile_m / W`` rows of it, then
                      adds bias or old output, rounds, stages and stores them
4 W                   producer: TMA loads of A and B
4 W + 1 .. 4 W + 3    none; they complete the warpgroup whose registers the consumers take
====================  ==================================================================================

Every role finds its tiles itself, so the only synchronisation between them is the ring of stages.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator
from cutlass.pipeline import NamedBarrier
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from ...config import SMEM_BYTES, VARLEN_K, VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.vectors import EpilogueArgs, TileVectors, add_bias, allocate_vectors, load_vectors, vector_bytes
from ...schedule import GroupSearch, Tile, ceil_div, exact_tile, find_tile, start_search
from ...varlen import RAGGED_MODES, ragged_coord, ragged_tensor
from . import load, mma, store

WARPGROUP = 128
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
BARRIER_BYTES = 1024  # mbarriers, and what alignment to 1024 loses


class Problem(NamedTuple):
    """What every role knows of the problem; ``k`` counts for varlen_m only, ``tiles_m`` for varlen_k only."""

    offs: cute.Tensor
    rows: Int32
    k: Int32
    tiles_m: Int32
    tiles_n: Int32


def k_major(tensor: cute.Tensor) -> bool:
    """Whether mode 1 of ``[rows, K, ...]`` is the contiguous one, as its static stride of 1 says."""
    return isinstance(tensor.stride[1], int) and tensor.stride[1] == 1


class GroupedGemm:
    """A kernel of one kind, tiling, epilogue and operand dtype; both majors of the operands are taken.

    Args:
        kind: ``varlen_m`` or ``varlen_k``.
        config: tiling; ``tile_m`` is 64 rows per consumer warpgroup, or a multiple.
        spec: epilogue.
        element: dtype of ``a`` and ``b``, 16 bits.
    """

    def __init__(self, kind: str, config: GemmConfig, spec: EpilogueSpec, element: type[cutlass.Numeric]):
        self.kind, self.config, self.spec, self.element = kind, config, spec, element
        self.warpgroups = min(config.tile_m // store.CHUNK_ROWS, 2)
        self.consumers = self.warpgroups * WARPGROUP
        self.threads = self.consumers + WARPGROUP
        self.out_element = getattr(
            cutlass, {"bfloat16": "BFloat16", "float16": "Float16", "float32": "Float32"}[spec.out]
        )
        self.stage_bytes = (config.tile_m + config.tile_n) * config.tile_k * element.width // 8
        spare = SMEM_BYTES["sm_90"] - BARRIER_BYTES - store.staging_bytes(self.warpgroups)
        self.stages = (spare - vector_bytes(spec, config.tile_m, config.tile_n)) // self.stage_bytes
        self.tail = spec.tail and kind == VARLEN_M
        self.ragged_out = RAGGED_MODES if kind == VARLEN_M else 1

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offs: cute.Tensor,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        clusters: Int32,
        stream,
    ):
        """Launch.

        Args:
            a: ``[T, K]`` (varlen_m) or ``[T, M]`` (varlen_k), 16 bits per element.
            b: ``[G, K, N]`` or ``[T, N]``, same dtype.
            offs: int32 ``[G]``, group ends.
            out: ``[T, N]`` or ``[G, M, N]``, row-major.
            bias: ``[G, N]`` or None.
            bias_scale: ``[T]`` or None.
            clusters: CTAs that may run at once; bounds the grid.
            stream: CUDA stream.
        """
        tile_m, tile_n = self.config.tile_m, self.config.tile_n
        rows = cute.size(a, mode=[0])
        groups = cute.size(offs)
        if cutlass.const_expr(self.kind == VARLEN_M):
            source_a = a
            source_b = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[2, 1, 0]))
            target = ragged_tensor(out, 0)
            tiles_m = (rows + (groups + (1 if self.tail else 0)) * (tile_m - 1)) // tile_m
            a_k_major, b_k_major = k_major(source_a), k_major(source_b)
        else:
            flat_a = cute.make_tensor(a.iterator, cute.select(a.layout, mode=[1, 0]))
            flat_b = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 0]))
            a_k_major, b_k_major = k_major(flat_a), k_major(flat_b)
            source_a, source_b = ragged_tensor(flat_a, 1), ragged_tensor(flat_b, 1)
            target = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[1, 2, 0]))
            tiles_m = ceil_div(cute.size(out, mode=[1]), tile_m) * groups
        tiles_n = ceil_div(cute.size(target, mode=[1]), tile_n)

        a_layout = hopper_helpers.make_smem_layout_a(self.layout_enum(a_k_major), self.mnk, self.element, self.stages)
        b_layout = hopper_helpers.make_smem_layout_b(self.layout_enum(b_k_major), self.mnk, self.element, self.stages)
        chunk = store.chunk_layout(self.out_element, 1)
        tiled_mma = hopper_helpers.make_trivial_tiled_mma(
            self.element,
            self.element,
            OperandMajorMode.K if a_k_major else OperandMajorMode.MN,
            OperandMajorMode.K if b_k_major else OperandMajorMode.MN,
            Float32,
            (self.warpgroups, 1, 1),
            (store.CHUNK_ROWS, tile_n),
        )
        load_op = cpasync.CopyBulkTensorTileG2SOp()
        store_op = cpasync.CopyBulkTensorTileS2GOp()
        if cutlass.const_expr(self.spec.reduces):
            store_op = cpasync.CopyReduceBulkTensorTileS2GOp()
        tile_k = self.config.tile_k
        a_atom, a_map = cpasync.make_tiled_tma_atom(load_op, source_a, a_layout[None, None, 0], (tile_m, tile_k))
        b_atom, b_map = cpasync.make_tiled_tma_atom(load_op, source_b, b_layout[None, None, 0], (tile_n, tile_k))
        box = (store.CHUNK_ROWS, store.chunk_columns(self.out_element))
        out_atom, out_map = cpasync.make_tiled_tma_atom(store_op, target, chunk[None, None, 0], box)

        self.kernel(
            tiled_mma,
            a_atom,
            a_map,
            b_atom,
            b_map,
            out_atom,
            out_map,
            a_layout,
            b_layout,
            offs,
            out,
            bias,
            bias_scale,
            rows,
            cute.size(a, mode=[1]),
        ).launch(
            grid=(cutlass.max(cutlass.min(clusters, tiles_m * tiles_n), Int32(1)), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @property
    def mnk(self) -> tuple[int, int, int]:
        """The tile."""
        return self.config.tile_m, self.config.tile_n, self.config.tile_k

    @staticmethod
    def layout_enum(is_k_major: bool) -> LayoutEnum:
        """The library's word for a major of ``[rows, K]``."""
        return LayoutEnum.ROW_MAJOR if is_k_major else LayoutEnum.COL_MAJOR

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        a_atom: cute.CopyAtom,
        a_map: cute.Tensor,
        b_atom: cute.CopyAtom,
        b_map: cute.Tensor,
        out_atom: cute.CopyAtom,
        out_map: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        offs: cute.Tensor,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        bias_scale: cute.Tensor | None,
        rows: Int32,
        k: Int32,
    ):
        """Device code: set up shared memory, then split into roles."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        ring = load.allocate_ring(smem, self.stages)
        vectors = allocate_vectors(smem, self.spec, self.config.tile_m, self.config.tile_n)
        a_ring = smem.allocate_tensor(self.element, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        b_ring = smem.allocate_tensor(self.element, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        chunk = store.chunk_layout(self.out_element, self.warpgroups * store.BUFFERS)
        staging = smem.allocate_tensor(self.out_element, chunk.outer, byte_alignment=1024, swizzle=chunk.inner)
        if thread == 0:
            load.open_ring(ring, self.stages, self.consumers // 32)
        cute.arch.sync_threads()

        if cutlass.const_expr(self.kind == VARLEN_M):
            height, width = Int32(0), cute.size(out, mode=[1])
        else:
            height, width = cute.size(out, mode=[1]), cute.size(out, mode=[2])
        tiles_m, tiles_n = ceil_div(height, self.config.tile_m), ceil_div(width, self.config.tile_n)
        problem = Problem(offs, rows, k, tiles_m, tiles_n)

        if warp >= self.consumers // 32:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == self.consumers // 32:
                operand_a, operand_b = load.Operand(a_atom, a_map, a_ring), load.Operand(b_atom, b_map, b_ring)
                self.produce(operand_a, operand_b, ring, problem)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            output = store.Output(out_atom, out_map, staging, out)
            self.consume(tiled_mma, a_ring, b_ring, ring, output, vectors, EpilogueArgs(bias, bias_scale), problem)

    @cute.jit
    def first_tile(self, problem: Problem, index: Int32, tail: cutlass.Constexpr) -> tuple[GroupSearch, Tile]:
        """The tile this CTA starts with, and the search that found it."""
        if cutlass.const_expr(self.kind == VARLEN_M):
            search = start_search(problem.offs, problem.rows, problem.tiles_n, self.config.tile_m, tail)
        else:
            search = GroupSearch(Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))
        return self.next_tile(search, problem, index, tail)

    @cute.jit
    def next_tile(
        self, search: GroupSearch, problem: Problem, index: Int32, tail: cutlass.Constexpr
    ) -> tuple[GroupSearch, Tile]:
        """The ``index``-th tile."""
        offs, rows, _, tiles_m, tiles_n = problem
        band = self.config.band
        if cutlass.const_expr(self.kind == VARLEN_M):
            return find_tile(search, index, offs, rows, tiles_n, self.config.tile_m, band, tail)
        return search, exact_tile(index, offs, rows, tiles_m, tiles_n, band)

    @cute.jit
    def depth(self, problem: Problem, tile: Tile) -> Int32:
        """The k tiles of an output tile."""
        length = problem.k if cutlass.const_expr(self.kind == VARLEN_M) else tile.length
        return ceil_div(length, self.config.tile_k)

    @cute.jit
    def produce(self, a: load.Operand, b: load.Operand, ring: load.Ring, problem: Problem):
        """The producer warp: fill the ring with the k tiles of every tile of this CTA."""
        tile_m, tile_n, tile_k = self.mnk
        index, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        stage, phase = Int32(0), Int32(0)
        search, tile = self.first_tile(problem, index, False)
        while tile.valid:
            if cutlass.const_expr(self.kind == VARLEN_M):
                rows_a, block_a = load.rows_from(a.source, tile.start + tile.m * tile_m), Int32(0)
                rows_b = b.source[None, None, tile.group]
            else:
                rows_a, block_a = load.depth_of(a.source, tile.start, tile.length), tile.m
                rows_b = load.depth_of(b.source, tile.start, tile.length)
            stage, phase = load.load_tile(
                a,
                b,
                load.boxes(a, rows_a, block_a, (tile_m, tile_k)),
                load.boxes(b, rows_b, tile.n, (tile_n, tile_k)),
                ring,
                stage,
                phase,
                self.depth(problem, tile),
                self.stages,
                self.stage_bytes,
            )
            index += step
            search, tile = self.next_tile(search, problem, index, False)

    @cute.jit
    def consume(
        self,
        tiled_mma: cute.TiledMma,
        a_ring: cute.Tensor,
        b_ring: cute.Tensor,
        ring: load.Ring,
        output: store.Output,
        vectors: TileVectors,
        args: EpilogueArgs,
        problem: Problem,
    ):
        """The consumer warpgroups: multiply, finish and store every tile of this CTA."""
        tile_m, tile_n, _ = self.mnk
        thread, _, _ = cute.arch.thread_idx()
        which = cute.arch.make_warp_uniform(thread // WARPGROUP)
        index, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        stage, phase = Int32(0), Int32(0)
        slice_mma = tiled_mma.get_slice(cute.make_layout(self.warpgroups, stride=WARPGROUP)(which))
        a = tiled_mma.make_fragment_A(slice_mma.partition_A(a_ring))
        b = tiled_mma.make_fragment_B(slice_mma.partition_B(b_ring))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((tile_m, tile_n)), Float32)
        together = NamedBarrier(1, self.consumers)
        search, tile = self.first_tile(problem, index, self.tail)
        while tile.valid:
            depth = self.depth(problem, tile)
            if cutlass.const_expr(self.tail):
                depth = Int32(0) if tile.group == cute.size(problem.offs) else depth
            if cutlass.const_expr(self.spec.bias is not None):
                together.arrive_and_wait()  # the tile before no longer reads its vectors
                row = tile.start + tile.m * tile_m
                if tile.group < cute.size(problem.offs):
                    load_vectors(
                        vectors,
                        args,
                        tile.group,
                        row,
                        tile.start + tile.length,
                        tile.n * tile_n,
                        thread,
                        self.consumers,
                    )
                together.arrive_and_wait()
            stage, phase = mma.multiply(tiled_mma, acc, a, b, ring, stage, phase, depth, self.stages)
            if cutlass.const_expr(not self.spec.accumulate):
                self.finish(acc, output, vectors, problem, tile, which)
            elif depth > 0:
                self.finish(acc, output, vectors, problem, tile, which)
            index += step
            search, tile = self.next_tile(search, problem, index, self.tail)
        if thread % WARPGROUP < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,
        output: store.Output,
        vectors: TileVectors,
        problem: Problem,
        tile: Tile,
        which: Int32,
    ):
        """Epilogue of one warpgroup's rows of a tile, chunk by chunk."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        columns = store.chunk_columns(self.out_element)
        alone = NamedBarrier(2 + which, WARPGROUP)
        if cutlass.const_expr(self.kind == VARLEN_M):
            target = cute.domain_offset(ragged_coord(0, tile.start, tile.length, Int32(0)), output.target)
            height, width = tile.length, cute.size(output.out, mode=[1])
        else:
            target = cute.domain_offset((0, 0, tile.group), output.target)
            height, width = cute.size(output.out, mode=[1]), cute.size(output.out, mode=[2])
        pieces = columns // 8
        for block in cutlass.range_constexpr(cute.size(acc, mode=[1])):
            block_row = (block * self.warpgroups + which) * store.CHUNK_ROWS
            for chunk in cutlass.range_constexpr(self.config.tile_n // columns):
                row = tile.m * self.config.tile_m + block_row
                column = tile.n * self.config.tile_n + chunk * columns
                values = cute.make_rmem_tensor((2, 2, pieces), Float32)
                for i in cutlass.range_constexpr(4 * pieces):
                    values[i] = acc[(i % 2, i // 2 % 2, chunk * pieces + i // 4), block, 0]
                thread_row = thread // 32 * 16 + thread % 32 // 4
                thread_column = thread % 4 * 2
                if cutlass.const_expr(self.spec.bias is not None):
                    if tile.group < cute.size(problem.offs):
                        self.add_vectors(values, vectors, block_row + thread_row, chunk * columns + thread_column)
                if cutlass.const_expr(self.spec.reads_output):
                    store.add_old(
                        values,
                        output.out[tile.group, None, None],
                        row + thread_row,
                        column + thread_column,
                        height,
                        width,
                    )
                buffer = output.staging[None, None, which * store.BUFFERS + (block + chunk) % store.BUFFERS]
                # The buffer is free once all stores but the latest have been read from.
                if thread < 32:
                    cute.arch.cp_async_bulk_wait_group(store.BUFFERS - 1, read=True)
                alone.arrive_and_wait()
                store.stage_chunk(values, buffer, self.out_element, thread)
                cute.arch.fence_proxy("async.shared", space="cta")
                alone.arrive_and_wait()
                if thread < 32:
                    if row < height and column < width:
                        store.store_chunk(output.atom, buffer, target, row, column, self.ragged_out)
                    cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def add_vectors(self, values: cute.Tensor, vectors: TileVectors, row: Int32, column: Int32):
        """``values += bias * scale`` for the registers of a chunk whose first element is ``(row, column)`` of the tile."""
        shape = values.shape
        bias = cute.make_tensor(vectors.bias.iterator + column, cute.make_layout(shape, stride=(1, 0, 8)))
        scale = None
        if cutlass.const_expr(self.spec.bias_scale is not None):
            scale = cute.make_tensor(vectors.bias_scale.iterator + row, cute.make_layout(shape, stride=(0, 8, 0)))
        add_bias(values, bias, scale)
