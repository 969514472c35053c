"""Consumers of ``swap_ab_kernel``: lanes decode B into the registers that MMAs read, then comes the epilogue.

Lane ``l`` of a warp has, of the warp's 16 columns in every 64-column block, columns ``l / 4`` and 8 more; and of each
step of 16 along the contraction elements ``2 (l % 4)``, the next one, and the two that are 8 further; see
``swap_ab_dequantize``.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from ...config import LINE
from ...epilogue.vectors import EpilogueArgs
from ...scheduler import Tile, ceil_div
from ...scheduler.problem import Share
from ..copies import WORD
from ..mma_sync.packed_load import Matrices
from ..ring import RingBarriers, advance, release
from .swap_ab_dequantize import (
    STEP,
    LanePart,
    beginnings,
    behind,
    clear_behind,
    decode_any,
    decode_powers,
    find_scales,
    has_bytes,
    has_powers,
    place,
    raise_further,
    read_powers,
    scale_registers,
    whole_scale,
)
from .swap_ab_split import decode_split, read_bytes, split
from .tilings import MMA_ROWS


class Stages(NamedTuple):
    """The ring of stages."""

    rows: cute.Tensor  # shared memory [tile_m, 64, parts of stages], then descriptors [MMA, 1, 4, parts of stages]
    codes: Int32  # address of [tile_n, width] bytes of every stage, in the swizzle of ``width`` bytes
    words: Int32  # address of [tile_n, pitch] words of scales of every stage
    barriers: RingBarriers


class SwapAbOutput(NamedTuple):
    """Destination of results, and the epilogue's operands, in global memory."""

    values: cute.Tensor  # [T, N]
    args: EpilogueArgs


@cute.jit
def consume_tiles(
    gemm: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    stages: Stages,
    matrices: Matrices,
    output: SwapAbOutput,
    share: Share,
):
    """Multiply, finish and store every tile of a share, the tail's included; the consumer warps call it.

    Args:
        gemm: the ``SwappedGroupedGemm``.
        tiled_mma: the MMA of a warpgroup.
        stages: the ring.
        matrices: B in global memory, for the start of rows of scales and for factors of whole groups.
        output: destination of results.
        share: the CTA's share of the problem.
    """
    policy, config = gemm.policy, gemm.config
    problem, _, first, step = share
    column, spot = place(gemm)
    rows = tiled_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(stages.rows))
    stages, state = stages._replace(rows=rows), (Int32(0), Int32(0))
    search = policy.start(problem, True)
    search, tile = policy.find(search, first, problem, True)
    while tile.valid:
        product = policy.is_product(tile, problem)
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((gemm.blocks * MMA_ROWS, config.tile_m)), Float32)
        depth = Int32(0)
        if product:
            depth = problem.depth
        left = tile.n * config.tile_n + column
        scales = beginnings(gemm, matrices, tile.group, left, column)
        own = LanePart(column, spot, scales, whole_scale(gemm, matrices, tile.group, product))
        state = multiply(gemm, tiled_mma, acc, stages, own, state, depth)
        store_tile(gemm, acc, output, tile, left, problem.columns, product)
        first += step
        search, tile = policy.find(search, first, problem, True)


@cute.jit
def multiply(
    gemm: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    stages: Stages,
    own: LanePart,
    state: tuple[Int32, Int32],
    depth: Int32,
) -> tuple[Int32, Int32]:
    """Compute ``acc = B A^T`` over ``depth`` elements, zero if there is none; return the next stage and phase of the
    ring.

    The MMAs of a part are in flight while the next one is decoded into other registers.

    Args:
        acc: float32 registers ``((2, 2, tile_m / 8), blocks, 1)``.
        state: stage and phase of the ring.
        depth: a multiple of a step.
    """
    acc.fill(Float32(0))
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    shape = tiled_mma.partition_shape_A((gemm.blocks * MMA_ROWS, gemm.part))
    held = [cute.make_rmem_tensor(shape, gemm.element) for _ in range(2)]
    scales = cute.make_rmem_tensor((scale_registers(gemm), 2 * gemm.blocks), Int32)
    if cutlass.const_expr(has_bytes(gemm.packed)):
        exact, whole = split(own.whole)
    ring, steps, previous = stages.barriers, LINE // STEP, Int32(0)
    columns, stage_depth = gemm.config.tile_n, gemm.config.tile_k
    stage, phase = state
    unbounded = Boolean(False)  # whether a number of the tile may be infinite or NaN
    for k in cutlass.range(ceil_div(depth, stage_depth), unroll=1):
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        left, words = depth - k * stage_depth, stages.words + stage * (columns * gemm.pitch * WORD)
        codes = stages.codes + stage * (columns * gemm.width)
        if cutlass.const_expr(has_powers(gemm.packed)):
            extreme = read_powers(gemm, words, own, left, scales)
            unbounded = unbounded or extreme
        elif cutlass.const_expr(has_bytes(gemm.packed)):
            usual = read_bytes(gemm, words, own, exact, left, scales)
        else:
            find_scales(gemm, words, own, k, scales)
        for part in cutlass.range_constexpr(stage_depth // gemm.part):
            into = held[part % 2]
            warpgroup.wait_group(1)  # nothing reads ``into`` any more
            if cutlass.const_expr(part == 1):  # noqa: SIM102 - decided while tracing
                if k > 0:
                    release(ring, previous, 1)
            if cutlass.const_expr(has_powers(gemm.packed)):
                # Past the end of the contraction A is zero, and the registers may hold finite numbers of an earlier
                # part. The MMAs are issued all the same: with a branch around them the assembler waits for each.
                reached = Boolean(True)
                if cutlass.const_expr(part > 0):
                    reached = left > part * gemm.part or k == 0 or unbounded
                if reached:
                    decode_powers(gemm, codes, own, part, scales, into)
                    if extreme:
                        raise_further(gemm, words, own, left, part, into)
            elif cutlass.const_expr(has_bytes(gemm.packed)):
                decode_split(gemm, codes, own, part, scales, whole, into)
                if not usual:
                    again = cute.arch.make_warp_uniform(codes)  # reread, not kept in registers
                    decode_any(gemm, again, own, part, scales, into)
            else:
                decode_any(gemm, codes, own, part, scales, into)
                clear_behind(gemm, left - part * gemm.part, into)
            warpgroup.fence()
            for i in cutlass.range_constexpr(gemm.part // STEP):
                number = part * (gemm.part // STEP) + i
                line = (stage_depth // LINE) * stage + number // steps
                cute.gemm(tiled_mma, acc, into[None, None, i], stages.rows[None, None, number % steps, line], acc)
            warpgroup.commit_group()
        previous = stage
        stage, phase = advance(stage, phase, gemm.stages)
    warpgroup.wait_group(0)
    if depth > 0:
        release(ring, previous, 1)
    return stage, phase


@cute.jit
def store_tile(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    output: SwapAbOutput,
    tile: Tile,
    left: Int32,
    columns: Int32,
    product: Boolean,
):
    """Apply the epilogue and store: register ``(e, h, j)`` of a block is row ``8 j + 2 (l % 4) + e`` of a tile.

    Args:
        left: the lane's first column of the product.
        columns: number of columns of the product.
        product: whether the tile belongs to a group; the tail has no bias.
    """
    biases = cute.make_rmem_tensor((2, gemm.blocks), Float32)
    for i in cutlass.range_constexpr(cute.size(biases)):
        biases[i] = Float32(0)
        if cutlass.const_expr(gemm.spec.bias):  # noqa: SIM102 - the first is decided while tracing
            if product and left + behind(i) < columns:
                biases[i] = output.args.bias[tile.group, left + behind(i)].to(Float32)
    for number in cutlass.range_constexpr(gemm.config.tile_m // 4):
        row = tile.m * gemm.config.tile_m + number // 2 * 8 + cute.arch.lane_idx() % 4 * 2 + number % 2
        if row < tile.length:
            scale = Float32(1)
            if cutlass.const_expr(gemm.spec.bias_scale):  # noqa: SIM102 - the first is decided while tracing
                if product:
                    scale = output.args.bias_scale[tile.start + row].to(Float32)
            store_row(output.values, finished(gemm, acc, number, biases, scale), tile.start + row, left, columns)


def finished(gemm: Any, acc: cute.Tensor, number: int, biases: cute.Tensor, scale: Float32) -> cute.Tensor:
    """Return a lane's results in row ``number``, one for each of its columns, in the dtype of the output."""
    found = cute.make_rmem_tensor(biases.shape, gemm.out_element)
    for i in range(cute.size(found)):
        value = acc[i // 2 * (gemm.config.tile_m // 2) + number // 2 * 4 + i % 2 * 2 + number % 2]
        found[i] = (value + biases[i] * scale if gemm.spec.bias else value).to(gemm.out_element)
    return found


@cute.jit
def store_row(out: cute.Tensor, values: cute.Tensor, row: Int32, left: Int32, columns: Int32):
    """Store a lane's results of a row, the first at column ``left``; none from ``columns`` on."""
    line = out.iterator + (Int64(row) * out.stride[0] + left)
    for i in cutlass.range_constexpr(cute.size(values)):
        if left + behind(i) < columns:
            cute.make_tensor(line + behind(i), cute.make_layout(1))[0] = values[i]
