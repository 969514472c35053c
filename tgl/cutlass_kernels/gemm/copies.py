"""cp.async copies into shared memory that ``ldmatrix`` or an MMA reads in swizzled lines of 128 bytes."""

from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm

PIECE = 16  # bytes
LINE = 128  # bytes
WORD = 4  # bytes
LANES_OF_LINE = LINE // PIECE
STEPS = LINE // (
    2 * PIECE
)  # of a stage of lines: an MMA of a warp takes 32 bytes of the depth, whatever their elements


def copy_piece(source: Int64, target: Int32, count: Int32):
    """Copy the first ``count`` of 16 bytes to shared memory, and zeros for the rest."""
    operands = [target.ir_value(), source.ir_value(), count.ir_value()]
    text = f"cp.async.cg.shared.global.L2::128B [$0], [$1], {PIECE}, $2;"
    llvm.inline_asm(None, operands, text, "r,l,r", has_side_effects=True)


def copy_word(source: Int64, target: Int32, count: Int32):
    """Copy the first ``count`` of 4 bytes to shared memory, and zeros for the rest."""
    operands = [target.ir_value(), source.ir_value(), count.ir_value()]
    text = f"cp.async.ca.shared.global [$0], [$1], {WORD}, $2;"
    llvm.inline_asm(None, operands, text, "r,l,r", has_side_effects=True)
