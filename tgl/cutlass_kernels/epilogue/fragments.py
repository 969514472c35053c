"""Activations on a thread's accumulator registers of 16 rows, as mma.sync and warpgroup MMAs leave them.

They are ``(2, 2, n)``: the column of a pair, the row or the one 8 below it, every 8th column. Four lanes share a row.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ..activation.functions import activate, widened
from ..scheduler import Tile


@cute.jit
def activated(spec: cutlass.Constexpr, rounded: Any, factors: Any, product: cutlass.Boolean) -> cute.Tensor:
    """Return the activation of a thread's registers in float32; zero in the tail.

    Args:
        spec: of the activation.
        rounded: gate and linear half, or the gate alone. If a gated activation has a single tensor, its pairs
            are gate and linear half, and each pair gives one column.
        factors: the probabilities of the thread's two rows, or None.
        product: whether the rows belong to a group.
    """
    alternate = spec.gated and len(rounded) == 1
    shape = rounded[0].shape
    values = cute.make_rmem_tensor((1, *shape[1:]) if alternate else shape, Float32)
    fast = rounded[0].element_type.width == 16
    if product:
        wide = tuple(widened(half) for half in rounded)
        for i in cutlass.range_constexpr(cute.size(values)):
            if cutlass.const_expr(alternate):
                gate, linear = wide[0][2 * i], wide[0][2 * i + 1]
            else:
                gate, linear = wide[0][i], wide[1][i] if cutlass.const_expr(spec.gated) else None
            value = activate(spec, gate, linear, fast)
            row = i // values.shape[0] % 2
            values[i] = value if cutlass.const_expr(factors is None) else value * factors[row]
    else:
        values.fill(0.0)
    return values


@cute.jit
def row_probs(probs: Any, tile: Tile, row: Int32, product: cutlass.Boolean) -> Any:
    """Return the probabilities of a thread's two rows, or None.

    Args:
        probs: ``[T]`` or None.
        row: the first of them in the tile's group.
    """
    held: Any = None
    if cutlass.const_expr(probs is not None):
        held = cute.make_rmem_tensor(2, Float32)
        held.fill(0.0)
        for half in cutlass.range_constexpr(2):
            if product and row + 8 * half < tile.length:
                held[half] = probs[tile.start + row + 8 * half].to(Float32)
    return held


@cute.jit
def write_sums(
    sums: cute.Tensor,
    own: cute.Tensor,
    first_column: Int32,
    columns: Int32,
    width: cutlass.Constexpr,
    tile: Tile,
    row: Int32,
    lane: Int32,
):
    """Write the sums of a thread's two rows, each shared by four lanes.

    Args:
        sums: ``[pieces across, T]``.
        own: the thread's own sums.
        first_column, columns: where the piece begins, and how many columns there are.
        width: columns of a piece.
        row: the first of the two in the tile's group.
    """
    for half in cutlass.range_constexpr(2):
        total = own[half]
        for step in cutlass.range_constexpr(2):
            total += cute.arch.shuffle_sync_bfly(total, 1 << step)
        at = row + 8 * half
        if lane % 4 == 0 and at < tile.length and first_column < columns:
            sums[first_column // width, tile.start + at] = total


def by_row(vector: Any, shape: tuple) -> Any:
    """Broadcast one value per row of a thread to every ``(e, row, ...)``."""
    if vector is None:
        return None
    return cute.make_tensor(vector.iterator, cute.make_layout(shape, stride=(0, 1, *(0 for _ in shape[2:]))))
