"""Grouped GEMM with a dactivation epilogue.

A warp loads the pre-activation of 16 rows and 32 columns of the product while it works on those before. Four lanes that
share a row read 16 bytes side by side, and exchange them as they do the results; see ``store``. Interleaved halves come
in the order of the product, four neighbours for two of its columns.

The partial sum of a row, for the gradient of its probability, covers a warp's columns: the caller adds these up, in
order of the columns.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...activation.activation_spec import ActivationSpec
from ...config import VARLEN_M, GemmConfig
from ...epilogue import EpilogueSpec
from ...epilogue.dactivation import differentiate, rounded
from ...epilogue.fragments import by_row, row_probs, write_sums
from ...epilogue.vectors import EpilogueArgs
from ...pointers import aligned
from ...scheduler import Tile
from ...scheduler.problem import Problem
from ..activation_call import DactivationKernelCall
from .activation_epilogue import half_of
from .kernel import MmaSyncGemmKernel
from .store import CHUNK, PIECES, GlobalOutput, chunk_of, corner, store_chunk, store_columns, target, transpose
from .tilings import gradient_reason

SHAPE = 2, 2, PIECES  # a thread's registers of a chunk


class GlobalPreactivation(NamedTuple):
    """The pre-activation, and the other operands of the activation backward, in global memory."""

    values: cute.Tensor  # [T, 2 I] or [T, I]
    probs: Any  # [T] or None
    sums: Any  # float32 [pieces across, T], or None without probs


@cute.jit
def load_hidden(
    gemm: cutlass.Constexpr,
    values: cute.Tensor,
    top: Int32,
    height: Int32,
    column: Int32,
    width: Int32,
    product: cutlass.Boolean,
) -> cute.Tensor:
    """Load a lane's part of the pre-activation of a chunk, ``(8, 2, parts)``: 16 bytes of each row and part.

    A part is one of the halves side by side or, where they are interleaved, half of the chunk's columns.

    Args:
        values: the pre-activation of the group.
        top: a thread's first row; rows from ``height`` on are not loaded.
        column, width: first column of the chunk, and the number of columns of the product.
    """
    held = cute.make_rmem_tensor((8, 2, gemm.parts), values.element_type)
    held.fill(0.0)
    quarter = cute.arch.lane_idx() % 4
    for half in cutlass.range_constexpr(2):
        row = top + 8 * half
        base = values.iterator + Int64(row) * values.stride[0]
        for part in cutlass.range_constexpr(gemm.parts):
            if cutlass.const_expr(gemm.gradient.interleaved):
                for i in cutlass.range_constexpr(2):
                    at = column + 8 * (2 * part + i) + 2 * quarter
                    if product and row < height and at < width:
                        source = cute.make_tensor(aligned(base + 2 * at, 8), cute.make_layout(4))
                        place = cute.make_tensor(held.iterator + 4 * (i + 2 * half + 4 * part), cute.make_layout(4))
                        cute.autovec_copy(source, place)
            else:
                at = column + 8 * quarter
                if product and row < height and at < width:
                    source = cute.make_tensor(aligned(base + (part * width + at), 16), cute.make_layout(8))
                    cute.autovec_copy(source, cute.make_tensor(held[None, half, part].iterator, cute.make_layout(8)))
    return held


@cute.jit
def inputs_of(gemm: cutlass.Constexpr, held: cute.Tensor) -> tuple:
    """Return the pre-activation of a thread's columns, float32 ``(2, 2, PIECES)``, per half; all lanes take part.

    Args:
        held: result of ``load_hidden``.
    """
    wide = tuple(cute.make_rmem_tensor(SHAPE, Float32) for _ in range(gemm.parts))
    if cutlass.const_expr(gemm.gradient.interleaved):
        for i in cutlass.range_constexpr(4 * PIECES):
            e, half, piece = i % 2, i // 2 % 2, i // 4
            for which in cutlass.range_constexpr(2):
                wide[which][i] = held[piece % 2 * 4 + 2 * e + which, half, piece // 2].to(Float32)
    else:
        for part in cutlass.range_constexpr(gemm.parts):
            for half in cutlass.range_constexpr(2):
                row = cute.make_tensor(held[None, half, part].iterator, cute.make_layout(8))
                transpose(cute.recast_tensor(row, Int32), cute.arch.lane_idx() % 4)
                for i in cutlass.range_constexpr(8):
                    wide[part][i % 2, half, i // 2] = row[i].to(Float32)
    return wide


@cute.jit
def store_pairs(
    gate: cute.Tensor, linear: cute.Tensor, out: cute.Tensor, top: Int32, height: Int32, column: Int32, quarter: Int32
):
    """Store a chunk of 16 rows with gate and linear half interleaved; arguments as for ``store.store_chunk``, twice."""
    for half in cutlass.range_constexpr(2):
        row = top + 8 * half
        base = out.iterator + Int64(row) * out.stride[0]
        for piece in cutlass.range_constexpr(PIECES):
            four = cute.make_rmem_tensor(4, gate.element_type)
            for i in cutlass.range_constexpr(4):
                four[i] = (gate, linear)[i % 2][i // 2, half, piece]
            if row < height:
                store_columns(four, base, 2 * (column + 8 * piece + 2 * quarter), out.shape[1])


@cute.jit
def change_chunk(
    gemm: cutlass.Constexpr,
    values: cute.Tensor,
    held: cute.Tensor,
    probs: Any,
    sums: cute.Tensor,
    product: cutlass.Boolean,
) -> tuple:
    """Return the gradients of a chunk's halves and, on request, the activation, ``(2, 2, PIECES)`` of the output's
    dtype.

    They are zero in the tail.

    Args:
        values: registers of the accumulator.
        held: result of ``load_hidden``.
        probs, sums: the values of the thread's two rows.
    """
    element, spec = gemm.out_element, gemm.gradient
    made = tuple(cute.make_rmem_tensor(SHAPE, element) for _ in range(gemm.parts + (1 if gemm.result else 0)))
    for t in made:
        t.fill(0.0)
    if product:
        wide = inputs_of(gemm, held)
        linear = wide[1] if cutlass.const_expr(spec.gated) else None
        result = made[gemm.parts] if cutlass.const_expr(gemm.result) else None
        factors, totals = by_row(probs, SHAPE), by_row(sums, SHAPE)
        differentiate(spec, wide[0], linear, rounded(values, element), factors, totals, result)
        for part in cutlass.range_constexpr(gemm.parts):
            made[part].store(wide[part].load().to(element))
    return made


@cute.jit
def store_gradient(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    output: GlobalOutput,
    args: EpilogueArgs,
    tile: Tile,
    problem: Problem,
    product: cutlass.Boolean,
):
    """Apply the activation backward and store a tile; arguments as for ``store.store_tile``."""
    hidden, width, quarter = output.hidden, problem.columns, cute.arch.lane_idx() % 4
    dh, height = target(gemm, output.values, tile, problem)
    h, _ = target(gemm, hidden.values, tile, problem)
    row, column = corner(gemm, tile)
    across = gemm.warp_tile[1] // CHUNK
    count = gemm.warp_tile[0] // 16 * across
    following = load_hidden(gemm, h, row, height, column, width, product)
    for block in cutlass.range_constexpr(gemm.warp_tile[0] // 16):
        top = row + block * 16
        probs = row_probs(hidden.probs, tile, top, product)
        sums = cute.make_rmem_tensor(2, Float32)
        sums.fill(0.0)
        for chunk in cutlass.range_constexpr(across):
            held, left = following, column + chunk * CHUNK
            after = block * across + chunk + 1
            if cutlass.const_expr(after < count):
                at = row + after // across * 16, column + after % across * CHUNK
                following = load_hidden(gemm, h, at[0], height, at[1], width, product)
            made = change_chunk(gemm, chunk_of(acc, block, chunk), held, probs, sums, product)
            if cutlass.const_expr(gemm.gradient.interleaved):
                store_pairs(made[0], made[1], dh, top, height, left, quarter)
            else:
                for part in cutlass.range_constexpr(gemm.parts):
                    store_chunk(made[part], half_of(dh, gemm.parts, part), top, height, left, quarter)
            if cutlass.const_expr(gemm.result):
                act, _ = target(gemm, output.second, tile, problem)
                store_chunk(made[gemm.parts], act, top, height, left, quarter)
        if cutlass.const_expr(hidden.sums is not None):
            pitch = gemm.warp_tile[1]
            write_sums(hidden.sums, sums, column, width, pitch, tile, top, cute.arch.lane_idx())


class MmaSyncGemmDactivationKernel(DactivationKernelCall, MmaSyncGemmKernel):
    """``dh = dA(h) (a b)``; with ``probs`` also the sums of rows of ``(a b) A(h)`` per warp.

    ``result``: the activation ``probs A(h)`` is an output, too.
    """

    store = staticmethod(store_gradient)

    def __init__(
        self,
        config: GemmConfig,
        element: type[cutlass.Numeric],
        out: str,
        activation: ActivationSpec,
        result: bool = False,
        gathered: str | None = None,
        tail: bool = True,
    ):
        reason = gradient_reason(config)
        if reason is not None:
            raise ValueError(reason)
        super().__init__(VARLEN_M, config, EpilogueSpec(out, tail=tail), element, gathered)
        self.gradient, self.result = activation, result
        self.parts = 2 if activation.gated else 1

    def hidden(self, h: cute.Tensor, probs: Any, sums: Any) -> GlobalPreactivation:
        """Return the operands of the epilogue."""
        return GlobalPreactivation(h, probs, sums)
