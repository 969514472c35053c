"""What scales of E4M3 make of codes of E2M1 in ``swapped``: a table in shared memory, anew for each tile.

A weight is ``q f`` rounded to float32 and then to bfloat16, where ``q`` is a code's number, and ``f`` the float32
product of a scale of 8 bits and of the group's factor. So a group has 256 values of ``f``. A table has two numbers of
bfloat16 for each, ``main`` and ``rest``, such that ``q main + q rest``, rounded once, is the weight of every code:

- ``main`` is ``f`` rounded, which gives the powers of two among the codes.
- ``rest`` takes ``1.5 main`` to where ``1.5 f`` is rounded to, and the other codes with it. It is 0 if it is there
  already, else 7/16 of the last place of ``main``, up or down: less than half of it, so that ``main`` stays, and 0.66
  times it, beside what is missed by 0.5 or 1 of these places, or by 1.5 of them where ``1.5 main`` has places of two.

That holds for every ``f`` of 24 bits, as long as nothing is below the smallest normal number; ``ordinary`` groups are
those where it is so. Numbers are stored times 2^126, as codes are spread to bfloat16 times 2^-126.

A warpgroup has its own table, since it alone waits while it is written. An entry is stored four times, and every column
of four that a half of a warp reads for has its own copy, so that no two columns' are in the same banks.
"""

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Uint8, Uint16, cute

from ...bits import INFINITY, as_bits, as_float
from ...instructions import widened_fp8
from ...runtime.elements import TYPES
from ..copies import PIECE, WORD
from .tilings import TABLE_COPIES, TABLE_ENTRIES, has_table, table_bytes

WARPGROUP = 128
BARRIER = 1  # and the next one; 0 is that of the whole CTA
ENTRY = 2 * WORD * TABLE_COPIES  # bytes
LEAST, MOST = 2.0**-100, 2.0**-7  # of a group's factor that is ordinary; MOST itself is not
SPREAD = 2.0**126
REST = 7 / 16 * 2.0**-7  # of the power of two in ``main``


class Table(NamedTuple):
    """A lane's."""

    address: Int32  # of its copy of the first entry
    ordinary: Boolean  # whether there is one for the group


def e4m3_values(held: list[Int32]) -> list[Float32]:
    """The numbers of two bytes of E4M3."""
    halves = cute.make_rmem_tensor(2, Uint16)
    halves[0], halves[1] = Uint16(held[0] + held[1] * 256), Uint16(0)
    wide = cute.make_rmem_tensor(4, Float32)
    wide.store(widened_fp8(cute.recast_tensor(halves, Uint8), TYPES["float8_e4m3fn"]))
    return [wide[0], wide[1]]


@cute.jit
def write_table(gemm: cutlass.Constexpr, tables: Int32, whole: Float32, product: Boolean) -> Table:
    """Write a warpgroup's table of a group, if it is ordinary; every lane of the warpgroup calls it.

    Args:
        gemm: the ``SwappedGroupedGemm``.
        tables: the address of those of all warpgroups.
        whole: the group's factor.
        product: whether there is a group.
    """
    ordinary = Boolean(False)
    address = Int32(0)
    if cutlass.const_expr(has_table(gemm.packed)):
        thread, _, _ = cute.arch.thread_idx()
        group, lane = cute.arch.make_warp_uniform(thread // WARPGROUP), thread % WARPGROUP
        table = tables + group * table_bytes(gemm.packed)
        address = table + lane // 4 % TABLE_COPIES * (2 * WORD)
        ordinary = product & (whole >= Float32(LEAST)) & (whole < Float32(MOST))
        if ordinary:
            cute.arch.barrier(barrier_id=BARRIER + group, number_of_threads=WARPGROUP)  # the last one has been read
            turns = TABLE_ENTRIES // WARPGROUP
            for turn, scale in enumerate(e4m3_values([lane + i * WARPGROUP for i in range(turns)])):
                write_entry(table, lane + turn * WARPGROUP, scale * whole)
            cute.arch.barrier(barrier_id=BARRIER + group, number_of_threads=WARPGROUP)
    return Table(address, ordinary)


def write_entry(table: Int32, entry: Int32, factor: Float32):
    """An entry's copies, by 16 bytes; lanes that would be in the same banks write theirs in another order."""
    words = cute.make_rmem_tensor(PIECE // WORD, Int32)
    for i, number in enumerate(split(factor)):
        twice = cute.make_rmem_tensor(2, BFloat16)
        twice[0] = twice[1] = (number * Float32(SPREAD)).to(BFloat16)
        words[i] = words[i + 2] = cute.recast_tensor(twice, Int32)[0]
    for piece in range(ENTRY // PIECE):
        at = table + entry * ENTRY + (entry // 4 + piece) % (ENTRY // PIECE) * PIECE
        place = cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=PIECE)
        cute.autovec_copy(words, cute.make_tensor(place, cute.make_layout(PIECE // WORD)))


def split(factor: Float32) -> list[Float32]:
    """``main`` and ``rest`` of a factor."""
    main, half = (value.to(BFloat16).to(Float32) for value in (factor, factor * 1.5))
    missed = half - main * 1.5  # exact
    step = as_float(as_bits(main) & INFINITY) * REST
    up = cutlass.select_(missed > 0, step, Float32(0))
    return [main, cutlass.select_(missed < 0, -step, up)]


def load_entry(table: Table, scale: Int32) -> tuple[Int32, Int32]:
    """``main`` and ``rest`` of a scale's byte, each of them twice."""
    place = cute.make_ptr(Int32, table.address + scale * ENTRY, cute.AddressSpace.smem, assumed_align=2 * WORD)
    words = cute.make_rmem_tensor(2, Int32)
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(2)), words)
    return words[0], words[1]
