"""The MMA warp: tcgen05.mma from the pipeline's buffers into the accumulators."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute, pipeline
from cutlass.cute.nvgpu import tcgen05
from cutlass.utils import blockscaled_layout

from ...scheduler import ceil_div
from ...scheduler.problem import Share
from ..k_tail import clear_edges, is_cut

LANES = 32


class _ScaleCopy(NamedTuple):
    """Copy of one operand's scales from shared to tensor memory: its two sides, and the operand of the MMA."""

    copy: cute.TiledCopy
    source: cute.Tensor  # [..., stages]
    to: cute.Tensor
    operand: cute.Tensor  # [..., blocks]


def _scales(gemm, layout: cute.Layout, buffers: cute.Tensor, pointer: cute.Pointer) -> _ScaleCopy:
    """Return the scales in ``buffers``, once copied to tensor memory of ``layout`` at ``pointer``."""
    operand = cute.make_tensor(pointer, layout)
    source, to = cute.filter_zeros(buffers), cute.filter_zeros(operand)
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(gemm.cta_group), buffers.element_type)
    copy = tcgen05.make_s2t_copy(atom, to)
    part = copy.get_slice(0)
    source = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(source))
    return _ScaleCopy(copy, source, part.partition_D(to), operand)


def _both_scales(gemm, tiled_mma: cute.TiledMma, buffers, accumulators: cute.Tensor) -> tuple[_ScaleCopy, _ScaleCopy]:
    """Return the scales of A and of B, in tensor memory after the accumulators."""
    (a_buffers, b_buffers), vector = buffers, gemm.form.vector
    free = accumulators.iterator + tcgen05.find_tmem_tensor_col_offset(accumulators)
    pointer = cute.recast_ptr(free, dtype=a_buffers.element_type)
    layout = blockscaled_layout.make_tmem_layout_sfa(
        tiled_mma, gemm.tiler, vector, cute.slice_(a_buffers.layout, (None, None, None, 0))
    )
    a = _scales(gemm, layout, a_buffers, pointer)
    free += tcgen05.find_tmem_tensor_col_offset(a.operand)
    pointer = cute.recast_ptr(free, dtype=b_buffers.element_type)
    layout = blockscaled_layout.make_tmem_layout_sfb(
        tiled_mma, gemm.tiler, vector, cute.slice_(b_buffers.layout, (None, None, None, 0))
    )
    return a, _scales(gemm, layout, b_buffers, pointer)


@cute.jit
def clear_stage(gemm: cutlass.Constexpr, buffers: Any, stage: Int32, before: Int32, end: Int32):
    """Clear the bytes of other groups in a stage that is about to be multiplied; the MMA warp calls it."""
    if is_cut(before, end):
        for operand in cutlass.range_constexpr(2):
            operand_buffers = (buffers.a, buffers.b)[operand]
            rows, line = gemm.tiler[operand], gemm.tiler[2]
            at = operand_buffers.iterator.toint() + stage * (rows * line)
            clear_edges(at, rows, before, end, cute.arch.lane_idx(), LANES)
        cute.arch.sync_warp()


class Buffers(NamedTuple):
    """Shared memory of the operands, ``[..., stages]``; of their scales too, or None."""

    a: cute.Tensor
    b: cute.Tensor
    scales: Any


@cute.jit
def multiply_tiles(
    gemm: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    buffers: Buffers,
    accumulators: cute.Tensor,
    loads: pipeline.PipelineTmaUmma,
    results: pipeline.PipelineUmmaAsync,
    share: Share,
):
    """Multiply the share's tiles: no accumulator for depth 0, else one per tile, or one per stage with ``promote``.

    Args:
        gemm: the GEMM kernel.
        accumulators: tensor memory ``[..., ACCUMULATORS]``.
        loads: pipeline from the load warp.
        results: pipeline to the epilogue warps.
        share: the share of the CTA or of the pair.
    """
    policy = gemm.policy
    a_buffers, b_buffers, scale_buffers = buffers
    problem, _, first, step = share
    a_operand, b_operand = tiled_mma.make_fragment_A(a_buffers), tiled_mma.make_fragment_B(b_buffers)
    blocks = cute.size(a_operand, mode=[2])
    if cutlass.const_expr(scale_buffers is not None):
        a_scales, b_scales = _both_scales(gemm, tiled_mma, scale_buffers, accumulators)
    loaded = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, gemm.stages)
    made = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, gemm.hand_overs)
    search = policy.start(problem)
    search, tile = policy.find(search, first, problem)
    while tile.valid:
        if policy.is_product(tile, problem):
            if cutlass.const_expr(not gemm.promotes):
                results.producer_acquire(made)
                tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
            depth = policy.depth(tile, problem)
            for k in cutlass.range(ceil_div(depth, gemm.tiler[2]), unroll=1):
                if cutlass.const_expr(gemm.promotes):
                    results.producer_acquire(made)
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
                which = made.phase ^ 1 if cutlass.const_expr(gemm.overlap) else made.index
                accumulator = accumulators[None, None, None, which]
                loads.consumer_wait(loaded)
                if cutlass.const_expr(policy.clears):
                    before, end = policy.before(tile), cutlass.min(depth - k * gemm.tiler[2], gemm.tiler[2])
                    clear_stage(gemm, buffers, loaded.index, before if k == 0 else Int32(0), end)
                if cutlass.const_expr(scale_buffers is not None):
                    stage = (None, None, None, None, loaded.index)
                    cute.copy(a_scales.copy, a_scales.source[stage], a_scales.to)
                    cute.copy(b_scales.copy, b_scales.source[stage], b_scales.to)
                for block in cutlass.range_constexpr(blocks):
                    at = (None, None, block, loaded.index)
                    a_part, b_part = a_operand[at], b_operand[at]
                    if cutlass.const_expr(scale_buffers is not None):
                        a_part = [a_part, a_scales.operand[None, None, block]]
                        b_part = [b_part, b_scales.operand[None, None, block]]
                    # Past a group's end are zeros or, in placed operands, the next group's elements.
                    if cutlass.const_expr(block == 0 or not policy.trims):  # noqa: SIM114 (known while tracing)
                        cute.gemm(tiled_mma, accumulator, a_part, b_part, accumulator)
                    elif k * gemm.tiler[2] + block * (gemm.tiler[2] // blocks) < depth:
                        cute.gemm(tiled_mma, accumulator, a_part, b_part, accumulator)
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                loads.consumer_release(loaded)
                loaded.advance()
                if cutlass.const_expr(gemm.promotes):
                    results.producer_commit(made)
                    made.advance()
            if cutlass.const_expr(not gemm.promotes):
                results.producer_commit(made)
                made.advance()
        first += step
        search, tile = policy.find(search, first, problem)
    results.producer_tail(made)
