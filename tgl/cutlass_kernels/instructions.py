"""Instructions that not every chip has, and their replacements; the only code that asks for the target chip."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float16, Float32, Int32, Uint8, Uint16, cute
from cutlass.base_dsl.enums import Arch
from cutlass.cutlass_dsl import CuTeDSL

from .bits import INFINITY, NAN, as_bits, as_float, reinterpret


def since(first: Arch) -> bool:
    """Return whether the kernel is being compiled for ``first`` or a later chip."""
    found: bool = CuTeDSL._get_dsl().get_arch_enum() >= first
    return found


def sharing(blocks: int) -> int:
    """Return how many blocks of a quantiser share a multiprocessor, if ``blocks`` do on sm_90 and later.

    Before sm_90 several instructions replace one, so half as many blocks have the registers for their operands.
    """
    return blocks if since(Arch.sm_90) else max(blocks // 2, 1)


# --- programmatic dependent launch ------------------------------------------------------------------------------------


def overlaps() -> bool:
    """Return whether the chip has dependent launches. Without them a launch waits for the whole launch before it."""
    return since(Arch.sm_90)


def launch_dependents() -> None:
    """Let blocks of the next launch begin wherever there is room beside the blocks of this one."""
    if overlaps():
        cute.arch.griddepcontrol_launch_dependents()


def wait() -> None:
    """Wait until the launch before this one has ended and its writes are visible."""
    if overlaps():
        cute.arch.griddepcontrol_wait()


def follow() -> None:
    """Begin a kernel that may overlap: wait, then let the next one begin; see ``overlap``."""
    wait()
    launch_dependents()


def attribute(overlap: Int32) -> Any:
    """Return ``use_pdl`` of a launch, where the host passes whether it overlaps, 1 or 0."""
    return overlap if overlaps() else False


# --- two 16-bit numbers at a time -------------------------------------------------------------------------------------


def larger_halves(a: Int32, b: Int32) -> Int32:
    """Return the maximum of the lower halves and of the upper halves, none of them negative."""
    if since(Arch.sm_90):
        return cute.arch.inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])
    # The larger word has the larger upper half.
    return (cutlass.max(a, b) & -65536) | cutlass.max(a & 65535, b & 65535)


def bfloat16_products(a: Int32, b: Int32) -> Int32:
    """Return the products of the lower and of the upper halves as bfloat16, subnormals included."""
    # fma with -0, because a plain mul needs sm_90. -0 is moved to a register: a constant cannot be an operand.
    text = (
        "{\n.reg .b32 zero, factor;\nmov.b32 zero, 0x80008000;\nmov.b32 factor, {$r1};\n"
        "fma.rn.bf16x2 {$w0}, {$r0}, factor, zero;\n}"
    )
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[a, b])


def bfloat16_products_with_half(a: Int32, b: Int32, half: int) -> Int32:
    """Return both halves of ``a`` times the lower or the upper half of ``b``, as ``bfloat16_products`` does.

    The PTX names the halves, so that the compiler selects them in the operand and adds no instruction.
    """
    text = (
        "{\n.reg .b32 zero, factor;\n.reg .b16 halves<2>;\nmov.b32 zero, 0x80008000;\n"
        "mov.b32 {halves0, halves1}, {$r1};\n"
        f"mov.b32 factor, {{halves{half}, halves{half}}};\n"
        "fma.rn.bf16x2 {$w0}, {$r0}, factor, zero;\n}"
    )
    return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[a, b])


def bfloat16_sums_of_products(a: Int32, b: Int32, c: Int32) -> Int32:
    """Return ``a * b + c`` of the lower and of the upper halves as bfloat16, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[a, b, c]
    )


# --- FP8 --------------------------------------------------------------------------------------------------------------


class Fp8(NamedTuple):
    """Mantissa bits, exponent bias, and the code of the largest number of an FP8 type."""

    mantissa: int
    bias: int
    largest: int


FP8 = {cutlass.Float8E4M3FN: Fp8(3, 7, 0x7E), cutlass.Float8E5M2: Fp8(2, 15, 0x7B)}
FP8_NAN = 0x7F


def round_to_fp8(values: Any, target: cute.Tensor) -> None:
    """Write float32 ``values`` (an expression) to FP8 registers, a multiple of four of them.

    Rounds to nearest, ties to even, and saturates.
    """
    element = target.element_type
    if since(Arch.sm_89):
        target.store(values.to(element))
        return
    wide = cute.make_rmem_tensor(cute.size(target), Float32)
    wide.store(values)
    words = cute.recast_tensor(target, Int32)
    for i in range(cute.size(words)):
        words[i] = Int32(0)
        for j in range(4):
            words[i] = words[i] | (fp8_code(wide[4 * i + j], element) << (8 * j))


def fp8_code(value: Float32, element: Any) -> Int32:
    """Return the FP8 byte of a float32 by integer arithmetic: saturating, NaN without a sign."""
    form, bits = FP8[element], as_bits(value)
    magnitude, shift = bits & 0x7FFFFFFF, 23 - form.mantissa
    rounded = magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)
    code = cutlass.min((rounded >> shift) - ((127 - form.bias) << form.mantissa), Int32(form.largest))
    # The unit of this float32 is the unit of FP8 subnormals, so the addition rounds to one.
    rounder = Float32(2.0 ** (24 - form.bias - form.mantissa))
    below = as_bits(as_float(magnitude) + rounder) - as_bits(rounder)
    code = cutlass.select_(magnitude < (128 - form.bias) << 23, below, code)
    return Int32(cutlass.select_(magnitude > INFINITY, Int32(FP8_NAN), code | ((bits >> 24) & 0x80)))


def e4m3_byte(value: Float32) -> Int32:
    """Return the E4M3 byte of a float32, by an instruction where there is one."""
    if not since(Arch.sm_89):
        return fp8_code(value, cutlass.Float8E4M3FN)
    return cute.arch.inline_ptx(
        "{\n.reg .b16 pair;\ncvt.rn.satfinite.e4m3x2.f32 pair, 0f00000000, {$r0};\ncvt.u32.u16 {$w0}, pair;\n}",
        write_only_types=[Int32],
        read_only_args=[value],
    )


def widened_fp8(held: cute.Tensor, element: Any) -> Any:
    """Return FP8 bytes in registers as float32, an expression."""
    if since(Arch.sm_89):
        return cute.recast_tensor(held, element).load().to(Float32)
    wide = cute.make_rmem_tensor(held.shape, Float32)
    for i in range(cute.size(held)):
        wide[i] = _fp8_value(Int32(held[i]), element)
    return wide.load()


def _fp8_value(byte: Int32, element: Any) -> Float32:
    """Return an FP8 byte as float32.

    E5M2 is the upper byte of a float16; E4M3 has one exponent bit less, with a bias that is 8 less.
    """
    if element is cutlass.Float8E5M2:
        return reinterpret(Uint16(byte << 8), Float16).to(Float32)
    narrow = ((byte & 0x7F) << 7) | ((byte & 0x80) << 8)
    value = reinterpret(Uint16(narrow), Float16).to(Float32) * Float32(256.0)
    return as_float(Int32(cutlass.select_((byte & 0x7F) == FP8_NAN, Int32(NAN), as_bits(value))))


def e4m3_value(byte: Uint8) -> Float32:
    """Return the number that an E4M3 byte encodes."""
    if not since(Arch.sm_89):
        return _fp8_value(Int32(byte), cutlass.Float8E4M3FN)
    held = cute.make_rmem_tensor(4, Uint8)
    held.fill(0)
    held[0] = byte
    wide = cute.make_rmem_tensor(4, Float32)
    wide.store(widened_fp8(held, cutlass.Float8E4M3FN))
    return wide[0]
