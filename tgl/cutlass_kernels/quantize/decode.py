"""Exact conversion of quantised bytes to float32, and the scales of whole groups."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ..bits import NAN, as_float
from ..instructions import e4m3_value
from ..pointers import aligned
from ..scheduler import ceil_div

FP4 = "float4_e2m1"
ATOM, ATOM_COLUMNS = 512, 4  # bytes of an atom of blocked scales, 128 rows of so many columns
LARGEST = 3.4028234663852886e38
RANGE = 2688.0  # the largest E4M3 times the largest E2M1
MAGNITUDES = (0x3E3C3800, 0x46444240)  # the upper bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6 in float16
SMALLEST_POWER = 0x400000  # 2^-127


def element_pointer(tensor: Any, row: Any, column: Any) -> Any:
    """Return a pointer to an element of a matrix; the offset is 64 bits wide."""
    return tensor.iterator + (Int64(row) * tensor.stride[0] + column)


def atom_row(y: Any) -> Any:
    """Return the offset of row ``y`` of 128 in an atom of blocked scales; it has four columns."""
    return ((y & 31) << 4) + ((y >> 5) << 2)


@cute.jit
def scale_of_row(
    spec: cutlass.Constexpr, scale: cute.Tensor, whole: Float32, spot: Any, row: Any, column: Any, columns: Any
) -> Float32:
    """Return the factor of the elements of a tile's row around a column, for a ``DequantizeSpec``.

    Args:
        spec: the ``DequantizeSpec``.
        scale: compact ``[rows, blocks]``, blocked bytes, or per group (then not read).
        whole: the factor of the group.
        spot: the tile, a ``Spot``.
        row: within the tile.
        column: any column of the block.
        columns: number of columns.
    """
    decoding, first = spec.decoding, spot.tile.first
    if cutlass.const_expr(not decoding.block):
        return whole
    if cutlass.const_expr(decoding.scale == "float32"):
        return scale[spot.unit, spot.k] if cutlass.const_expr(spec.square) else scale[first + row, spot.k]
    block = column >> decoding.block.bit_length() - 1
    if cutlass.const_expr(spec.blocked):
        atoms = ceil_div(ceil_div(Int32(columns), decoding.block), ATOM_COLUMNS)
        atom = Int64(spot.unit) * atoms + (block >> 2)
        byte = scale[atom * ATOM + (atom_row(row) + (block & (ATOM_COLUMNS - 1)))]
    else:
        byte = scale[first + row, block]
    if cutlass.const_expr(decoding.scale == "float8_e4m3fn"):
        return e4m3_value(byte) * whole
    return e8m0_value(Int32(byte))


def load_bytes(pointer: Any, held: Any, width: int) -> None:
    """Load ``width`` bytes into registers."""
    memory = cute.make_tensor(aligned(pointer, width), cute.make_layout(width))
    cute.autovec_copy(memory, held)


@cute.jit
def fp4_values(held: cute.Tensor):
    """Return packed E2M1 bytes in registers (whole words) as float32 in registers; the lower nibble of a byte first.

    Four codes of a word at a time select the upper bytes of four float16 numbers, whose lower bytes are zero: their
    lower three bits select the magnitude, the fourth the sign.
    """
    words = cute.recast_tensor(held, Int32)
    many = 2 * cute.size(words)
    pairs = cute.make_rmem_tensor((2, many), Int32)
    for i in cutlass.range_constexpr(many):
        codes = words[i // 2] >> (16 * (i % 2))
        magnitudes = cute.arch.prmt(Int32(MAGNITUDES[0]), Int32(MAGNITUDES[1]), codes & 0x7777)
        signs = cute.arch.prmt(Int32(0x8000), Int32(0), (codes >> 3) & 0x1111)
        four = Int32(magnitudes) | Int32(signs)
        for j in cutlass.range_constexpr(2):
            pairs[j, i] = Int32(cute.arch.prmt(four, Int32(0), (0x1404, 0x3424)[j]))
    wide = cute.recast_tensor(pairs, cutlass.Float16)
    values = cute.make_rmem_tensor(cute.size(wide), Float32)
    values.store(wide.load().to(Float32).reshape(cute.size(wide)))
    return values


def product(a: Float32, b: Float32) -> Float32:
    """Return ``a * b``, rounded even if a sum follows: without an explicit rounding the assembler may fuse them."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


@cute.jit
def e8m0_value(byte: Int32) -> Float32:
    """Return ``2^(byte - 127)``, NaN for 255."""
    bits = cutlass.max(byte << 23, Int32(SMALLEST_POWER))
    if byte == 255:
        bits = Int32(NAN)
    return as_float(bits)


@cute.jit
def decoding_scale(amax: Float32) -> Float32:
    """Return the factor of the block scales of an NVFP4 group with the largest magnitude ``amax``."""
    encode = Float32(RANGE) / amax
    if encode > Float32(LARGEST):
        encode = Float32(LARGEST)
    if amax == Float32(0.0):
        encode = Float32(1.0)
    return Float32(1.0) / encode
