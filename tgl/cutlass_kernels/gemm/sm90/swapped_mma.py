"""The consumers of ``swapped``: lanes decode B to the registers that MMAs read, then the epilogue.

Lane ``l`` of a warp has columns ``l / 4`` and 8 more of every 64-column block's 16, and of each step of 16 along the
contraction the elements ``2 (l % 4)``, the one after it, and those 8 behind: one byte of codes each time.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import warpgroup

from ...config import LINE
from ...epilogue.vectors import EpilogueArgs
from ...instructions import bfloat16_products
from ...tiles import Tile, ceil_div
from ...tiles.policy import Share
from ..copies import WORD
from ..ring import Ring, advance, release
from ..warp.packed_load import Matrices, scale_address
from .tilings import BLOCK, MMA_ROWS, SWAPPED_DEPTH

BLOCKS = SWAPPED_DEPTH // BLOCK  # with scales of their own in a stage
CODES = SWAPPED_DEPTH // 2  # bytes of a column in a stage
STEP = 16  # of the contraction, an MMA's depth
CHUNK = 16  # bytes of codes of a block
NO_SCALES = 0x3F003F00  # twice bfloat16's 2^-1, what the scale 2^-127 becomes as a factor
ABOVE = -0x7F7F7F80  # the upper bit of every byte


class Stages(NamedTuple):
    """The ring."""

    rows: cute.Tensor  # shared memory [tile_m, 64, parts of stages], then descriptors [MMA, 1, 4, parts of stages]
    codes: Int32  # address of [tile_n, 64 bytes] of every stage, in the swizzle of 64 bytes
    words: Int32  # address of [tile_n, 2] of every stage
    barriers: Ring


class Own(NamedTuple):
    """A lane's part of a stage."""

    column: Int32  # its first one
    spots: tuple[Int32, ...]  # of its first byte in each block of the first column
    chosen: cute.Tensor  # of every column: the bytes of two words that are its scales


class Output(NamedTuple):
    """Where results go, and the epilogue's operands, in global memory."""

    values: cute.Tensor  # [T, N]
    args: EpilogueArgs


@cute.jit
def consume_tiles(
    gemm: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    stages: Stages,
    matrices: Matrices,
    output: Output,
    share: Share,
):
    """Multiply, finish and store every tile of a share, the tail's included; the consumer warps call it.

    Args:
        gemm: the ``SwappedGroupedGemm``.
        tiled_mma: the MMA of a warpgroup.
        stages: the ring.
        matrices: B in global memory, for where rows of scales begin.
        output: where results go.
        share: what the CTA works on.
    """
    policy, config = gemm.policy, gemm.config
    problem, _, first, step = share
    column, spots = place(gemm)
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
        own = Own(column, spots, choices(gemm, matrices, tile.group, left))
        state = multiply(gemm, tiled_mma, acc, stages, own, state, depth)
        store_tile(gemm, acc, output, tile, left, problem.columns, product)
        first += step
        search, tile = policy.find(search, first, problem, True)


def place(gemm: Any) -> tuple[Int32, tuple[Int32, ...]]:
    """A lane's first column in a tile, and where in its codes of a stage the lane's first bytes of blocks are."""
    thread, _, _ = cute.arch.thread_idx()
    group, warp, lane = thread // 128, thread % 128 // 32, thread % 32
    column = group * (gemm.blocks * MMA_ROWS) + warp * 16 + lane // 4
    turned = lane // 8  # what the swizzle flips in the number of a chunk
    return column, tuple(column * CODES + (turned ^ block) * CHUNK + lane % 4 for block in range(BLOCKS))


def choices(gemm: Any, matrices: Matrices, group: Int32, left: Int32) -> cute.Tensor:
    """Of each of a lane's columns from ``left`` on: which bytes of two words are the scales of a stage."""
    chosen = cute.make_rmem_tensor((2, gemm.blocks), Int32)
    for i in range(cute.size(chosen)):
        address = scale_address(gemm.packed, matrices.scale, group, left + behind(i), Int32(0))
        chosen[i] = 0x3210 + (Int32(address) & WORD - 1) * 0x1111
    return chosen


def behind(number: int) -> int:
    """How far a lane's column of this number is from its first one."""
    return number % 2 * 8 + number // 2 * MMA_ROWS


@cute.jit
def multiply(
    gemm: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    acc: cute.Tensor,
    stages: Stages,
    own: Own,
    state: tuple[Int32, Int32],
    depth: Int32,
) -> tuple[Int32, Int32]:
    """``acc = B A^T`` over ``depth`` elements, zero if there is none; returns where the ring stands behind them.

    The MMAs of a block are in flight while the next one is decoded, to other registers.

    Args:
        acc: float32 registers ``((2, 2, tile_m / 8), blocks, 1)``.
        state: stage and phase, where the ring stands.
        depth: a multiple of a block.
    """
    acc.fill(Float32(0))
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    shape = tiled_mma.partition_shape_A((gemm.blocks * MMA_ROWS, BLOCK))
    held = [cute.make_rmem_tensor(shape, gemm.element) for _ in range(2)]
    scales, above = (cute.make_rmem_tensor((2, gemm.blocks), Int32) for _ in range(2))
    ring, steps, previous = stages.barriers, LINE // STEP, Int32(0)
    stage, phase = state
    for k in cutlass.range(ceil_div(depth, SWAPPED_DEPTH), unroll=1):
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        extreme = read_scales(gemm, stages, own, stage, depth - k * SWAPPED_DEPTH, scales, above)
        codes = stages.codes + stage * (gemm.config.tile_n * CODES)
        for block in cutlass.range_constexpr(BLOCKS):
            into = held[block % 2]
            warpgroup.wait_group(1)  # nothing reads ``into`` any more
            if cutlass.const_expr(block == 1):  # noqa: SIM102 - decided while tracing
                if k > 0:
                    release(ring, previous, 1)
            decode(gemm, codes + own.spots[block], block, scales, into)
            if extreme:
                raise_further(gemm, block, above, into)
            warpgroup.fence()
            for i in cutlass.range_constexpr(BLOCK // STEP):
                number = block * (BLOCK // STEP) + i
                part = (SWAPPED_DEPTH // LINE) * stage + number // steps
                cute.gemm(tiled_mma, acc, into[None, None, i], stages.rows[None, None, number % steps, part], acc)
            warpgroup.commit_group()
        previous = stage
        stage, phase = advance(stage, phase, gemm.stages)
    warpgroup.wait_group(0)
    if depth > 0:
        release(ring, previous, 1)
    return stage, phase


@cute.jit
def read_scales(
    gemm: cutlass.Constexpr,
    stages: Stages,
    own: Own,
    stage: Int32,
    left: Int32,
    scales: cute.Tensor,
    above: cute.Tensor,
) -> Boolean:
    """A lane's bytes of a stage, a word for each of its columns; whether any of the warp's is above 2^1.

    Args:
        left: of the contraction from this stage on; what blocks behind its end have is not used.
        scales, above: are set, the latter if it is so: to exponents up to 128, and what each is short of the byte.
    """
    inside, seen = Int32(-1), Int32(0)
    if left < SWAPPED_DEPTH:
        inside = (Int32(1) << (left // BLOCK * 8)) - 1
    for i in cutlass.range_constexpr(cute.size(scales)):
        at = stage * gemm.config.tile_n + own.column + behind(i)
        place = cute.make_ptr(Int32, stages.words + at * (2 * WORD), cute.AddressSpace.smem, assumed_align=2 * WORD)
        words = cute.make_rmem_tensor(2, Int32)
        cute.autovec_copy(cute.make_tensor(place, cute.make_layout(2)), words)
        scales[i] = Int32(cute.arch.prmt(words[0], words[1], own.chosen[i])) & inside
        above[i] = Int32(0)
        seen = seen | scales[i]
    extreme = cute.arch.vote_any_sync((seen & ABOVE) != 0)
    if extreme:
        for i in cutlass.range_constexpr(cute.size(scales)):
            low, high = Int32(0), Int32(0)
            for block in cutlass.range_constexpr(BLOCKS):
                byte = (scales[i] >> (8 * block)) & 0xFF
                most = cutlass.min(byte, Int32(128))
                low, high = low | (most << (8 * block)), high | ((byte - most) << (8 * block))
            scales[i], above[i] = low, high
    return extreme


def twice(word: Int32, block: int) -> Int32:
    """A block's byte in either half."""
    return Int32(cute.arch.prmt(word, Int32(0), (4 << 12) + (block << 8) + (4 << 4) + block))


def load_byte(source: Int32) -> Int32:
    """A byte from shared memory."""
    place = cute.make_ptr(Uint8, source, cute.AddressSpace.smem)
    return Int32(Uint8(cute.make_tensor(place, cute.make_layout(1))[0]))


def pair_at(gemm: Any, column: int, number: int) -> int:
    """Where in registers ``((2, 2, 2), blocks, 2)``, in words, the pair of a lane's column and of 8 elements is."""
    return number // 2 * (4 * gemm.blocks) + column // 2 * 4 + number % 2 * 2 + column % 2


@cute.jit
def decode(gemm: cutlass.Constexpr, codes: Int32, block: cutlass.Constexpr, scales: cute.Tensor, held: cute.Tensor):
    """A lane's elements of a block, times its scales up to 2: registers ``((2, 2, 2), blocks, 2)``.

    A byte holds two codes. Their signs go to bit 15 of either half, and their other bits to bits 8 to 6, the lower two
    of the exponent and the upper one of the mantissa: that is the number times 2^-126.
    """
    pairs = cute.recast_tensor(held, Int32)
    for i in cutlass.range_constexpr(cute.size(scales)):
        factor = twice(scales[i], block) * 128 + NO_SCALES
        for number in cutlass.range_constexpr(4):
            byte = load_byte(codes + behind(i) * CODES + number * WORD)
            magnitudes, signs = byte * ((1 << 6) + (1 << 18)), byte * ((1 << 12) + (1 << 24))
            pair = (magnitudes & 0x01C001C0) | (signs & -0x7FFF8000)
            pairs[pair_at(gemm, i, number)] = bfloat16_products(pair, factor)


@cute.jit
def raise_further(gemm: cutlass.Constexpr, block: cutlass.Constexpr, above: cute.Tensor, held: cute.Tensor):
    """What ``decode`` gives, times those powers of two that ``above`` holds; NaN for the scale 255."""
    pairs = cute.recast_tensor(held, Int32)
    for i in cutlass.range_constexpr(cute.size(above)):
        exponents = twice(above[i], block)
        factor = exponents * 128 + 0x3F803F80
        if exponents == 0x007F007F:
            factor = Int32(0x7FC07FC0)
        for number in cutlass.range_constexpr(4):
            at = pair_at(gemm, i, number)
            pairs[at] = bfloat16_products(pairs[at], factor)


@cute.jit
def store_tile(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    output: Output,
    tile: Tile,
    left: Int32,
    columns: Int32,
    product: Boolean,
):
    """Finish and store a lane's results: register ``(e, h, j)`` of a block is row ``8 j + 2 (l % 4) + e`` of a tile.

    Args:
        left: the lane's first column of the product.
        columns: of the product.
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
    """A lane's results of its row of a number, one of each of its columns, in the dtype of the output."""
    found = cute.make_rmem_tensor(biases.shape, gemm.out_element)
    for i in range(cute.size(found)):
        value = acc[i // 2 * (gemm.config.tile_m // 2) + number // 2 * 4 + i % 2 * 2 + number % 2]
        found[i] = (value + biases[i] * scale if gemm.spec.bias else value).to(gemm.out_element)
    return found


@cute.jit
def store_row(out: cute.Tensor, values: cute.Tensor, row: Int32, left: Int32, columns: Int32):
    """Store a lane's results of a row, of which the first is at column ``left``; none from ``columns`` on."""
    line = out.iterator + (Int64(row) * out.stride[0] + left)
    for i in cutlass.range_constexpr(cute.size(values)):
        if left + behind(i) < columns:
            cute.make_tensor(line + behind(i), cute.make_layout(1))[0] = values[i]
