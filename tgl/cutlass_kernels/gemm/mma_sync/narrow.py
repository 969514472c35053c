"""mma.sync on elements of 8 and 4 bits, written as PTX: the compiler's own take operands of one type only.

What ``ldmatrix`` reads as 8 x 8 elements of 16 bits are 8 x 16 of 8 bits or 8 x 32 of 4, in the register layout that
these MMAs take: only the depth of a step differs from that of 16-bit MMAs. Bytes across the depth are transposed by
another form of ``ldmatrix``.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

TYPES = {cutlass.Float8E4M3FN: "e4m3", cutlass.Float8E5M2: "e5m2", cutlass.Float4E2M1FN: "e2m1"}
SUMS = 4  # registers of 16 x 8
OPERANDS = 4, 2  # words of 16 rows and of 8 columns, of a step
SCALED = {
    8: "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32",
    4: "kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64",
}
"""Block-scaled MMAs, by the bits of an element."""
SCALES = {"Float8E8M0FNU": "ue8m0", "Float8E4M3FN": "ue4m3"}
ONES = 0x7F7F7F7F  # four of ue8m0


def multiply_fp8(gemm: Any, sums: cute.Tensor, a: cute.Tensor, b: cute.Tensor, scales: None) -> None:
    """Add ``A B`` to ``sums`` for a step of the depth.

    Args:
        sums: float32 registers ``((2, 2), M, N)``.
        a, b: matrices in registers, ``((2, 2, 2), M)`` and ``((2, 2), N)`` of 16 bits.
        scales: not used, since these MMAs take none.
    """
    issue(f"mma.sync.aligned.m16n8k32.row.col.{_types(gemm)}", sums, a, b)


def multiply_by_one(gemm: Any, sums: cute.Tensor, a: cute.Tensor, b: cute.Tensor, scales: None) -> None:
    """Do as ``multiply_fp8`` by the block-scaled MMA with scales of one."""
    ones = [Int32(ONES)]
    of_blocks = ones * cute.size(sums, mode=[1]), ones * cute.size(sums, mode=[2])
    issue(f"mma.sync.aligned.{SCALED[8]}.row.col.{_types(gemm)}.ue8m0", sums, a, b, of_blocks)


def multiply_scaled(
    gemm: Any, sums: cute.Tensor, a: cute.Tensor, b: cute.Tensor, scales: tuple[cute.Tensor, cute.Tensor]
) -> None:
    """Do as ``multiply_fp8`` for operands of 8 or 4 bits, each block times its scale.

    Args:
        scales: words ``(M)`` and ``(N)``, see ``scales``.
    """
    mma = f"mma.sync.aligned.{SCALED[gemm.element.width]}.row.col.{_types(gemm)}.{SCALES[gemm.form.scale]}"
    issue(mma, sums, a, b, scales)


def _types(gemm: Any) -> str:
    return f"f32.{TYPES[gemm.element]}.{TYPES[gemm.b_element]}.f32"


def issue(mma: str, sums: cute.Tensor, a: cute.Tensor, b: cute.Tensor, scales: Any = None) -> None:
    """Issue the instruction ``mma`` for each 16 rows and 8 columns."""
    rows, columns = cute.recast_tensor(a, Int32), cute.recast_tensor(b, Int32)
    text = f"{mma} {_registers(0, 4)}, {_registers(4, 4)}, {_registers(8, 2)}, {_registers(10, 4)}"
    constraints = ["=f"] * 4 + ["r"] * 6 + [str(i) for i in range(4)]
    if scales is not None:
        text += f", {_registers(14, 1)}, {{0, 0}}, {_registers(15, 1)}, {{0, 0}}"
        constraints += ["r"] * 2
    results = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    for n in range(cute.size(sums, mode=[2])):
        for m in range(cute.size(sums, mode=[1])):
            held = [sums[(i % 2, i // 2), m, n] for i in range(SUMS)]
            words = [rows[OPERANDS[0] * m + i] for i in range(OPERANDS[0])]
            words += [columns[OPERANDS[1] * n + i] for i in range(OPERANDS[1])]
            of_blocks = [] if scales is None else [scales[0][m], scales[1][n]]
            given = [value.ir_value() for value in (*words, *held, *of_blocks)]
            found = llvm.inline_asm(results, given, f"{text};", ",".join(constraints), has_side_effects=True)
            for i in range(SUMS):
                sums[(i % 2, i // 2), m, n] = Float32(llvm.extractvalue(Float32.mlir_type, found, [i]))


def read_bytes(address: Int32, rows: bool, target: Any) -> None:
    """Load two matrices of 16 x 16 bytes, transposed, a lane's line of which is at ``address``.

    A lane gets four neighbours of the depth of 16 rows' either half, then those of the second matrix.

    Args:
        rows: whether they are of A, whose halves go before halves of the depth, or of B.
        target: pointer to 8 registers of 16 bits.
    """
    text = f"ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {_registers(0, 4)}, [$4];"
    results = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    found = llvm.inline_asm(results, [address.ir_value()], text, "=r,=r,=r,=r,r", has_side_effects=True)
    words = cute.recast_tensor(cute.make_tensor(target, cute.make_layout(8)), Int32)
    for i, word in enumerate((0, 1, 2, 3) if rows else (0, 2, 1, 3)):
        words[i] = Int32(llvm.extractvalue(Int32.mlir_type, found, [word]))


def _registers(first: int, count: int) -> str:
    """Return operands of inline assembly in braces."""
    return f"{{{', '.join(f'${first + i}' for i in range(count))}}}"
