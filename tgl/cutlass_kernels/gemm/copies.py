"""Copies of 16 bytes by lanes into shared memory that ``ldmatrix`` or an MMA reads in lines of 128 bytes, swizzled."""

from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm

PIECE = 16  # bytes
LINE = 128  # bytes
LANES_OF_LINE = LINE // PIECE


def copy_piece(source: Int64, target: Int32, count: Int32):
    """Copy ``count`` of 16 bytes to shared memory, and zeros for the others."""
    operands = [target.ir_value(), source.ir_value(), count.ir_value()]
    text = f"cp.async.cg.shared.global.L2::128B [$0], [$1], {PIECE}, $2;"
    llvm.inline_asm(None, operands, text, "r,l,r", has_side_effects=True)
