"""Reinterpret the bits of numbers in registers."""

from typing import Any

from cutlass import Float32, Int32, cute

INFINITY = 0x7F800000
NAN = 0x7FC00000


def reinterpret(value: Any, kind: Any) -> Any:
    """Return the number of type ``kind`` that has the bits of ``value``."""
    held = cute.make_rmem_tensor(1, type(value))
    held[0] = value
    return cute.recast_tensor(held, kind)[0]


def as_float(bits: Int32) -> Float32:
    """Return the float32 with these bits."""
    return reinterpret(bits, Float32)


def as_bits(value: Float32) -> Int32:
    """Return the bits of a float32."""
    return reinterpret(value, Int32)
