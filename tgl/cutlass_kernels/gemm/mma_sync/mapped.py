"""TMA loads of operands that are not gathered, into the same stages of the same ring.

A box has the lines of a block (see ``load``): the 128-byte swizzle puts them where cp.async copies would. Elements
outside an operand are zeros, and so are those past the end of a group, where ragged maps end (see
``scheduler.ragged``).

One lane issues the loads of a k tile between the instructions of its warp; there is no producer warp, because its
threads would leave consumers fewer registers than sums of 64 x 64 need. Each stage has a barrier that counts the bytes;
a stage is loaded after the CTA's barrier at which all warps have read it, as with cp.async.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from ...config import VARLEN_K
from ...scheduler import Tile
from ...scheduler.problem import Problem
from ...scheduler.ragged import ragged_coord, ragged_tensor
from ..copies import LINE

BARRIER = 8  # bytes
SWIZZLE = 3, 4, 3  # of lines of 128 bytes


class StageAddress(NamedTuple):
    """A stage of the ring: its address in shared memory and, where operands are mapped, that of its barrier."""

    address: Int32
    full: Any = None


class MapCoordinates(NamedTuple):
    """Coordinates, in a tensor map, of an operand's next k tile: row, depth, and those of the further modes."""

    row: Int32
    depth: Int32
    rest: tuple


def barrier(address: Int32) -> cute.Pointer:
    """Return the barrier at an address."""
    return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=BARRIER)


def box_rows(part: Any) -> int:
    """Return the rows of a block of lines."""
    return part.extent if part.along else part.elements


def box_layout(part: Any, tile_k: int) -> Any:
    """Return a block of lines in shared memory, ``[rows, tile_k]``."""
    stride = (part.elements, 1) if part.along else (1, part.elements)
    return cute.make_layout((box_rows(part), tile_k), stride=stride)


def mapped_bytes(gemm: Any, parts: tuple) -> int:
    """Return the bytes of a k tile of all mapped operands."""
    return sum(p.extent * p.halves * LINE for name, p in zip("ab", parts) if name in gemm.mapped)


def ragged_mode(gemm: Any, which: int) -> int | None:
    """Return which mode of A (0) or B (1) a group is a part of; None if each has a matrix of its own."""
    return 1 if gemm.kind == VARLEN_K else (0, None)[which]


def make_map(gemm: Any, which: int, values: cute.Tensor, part: Any) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Return map and coordinate tensor of A (0) or B (1), ``[rows, depth]`` or ``[rows, depth, matrices]``."""
    ragged = ragged_mode(gemm, which)
    if ragged is not None:
        values = ragged_tensor(values, ragged)
    elif part.halves > 1:
        (columns, *modes), (step, *pitches) = values.shape, values.stride
        half = columns // part.halves
        shape = half, modes[0], part.halves, *modes[1:]
        layout = cute.make_layout(shape, stride=(step, pitches[0], half * step, *pitches[1:]))
        values = cute.make_tensor(values.iterator, layout)
    tile_k = gemm.config.tile_k
    box = cute.make_composed_layout(cute.make_swizzle(*SWIZZLE), 0, box_layout(part, tile_k))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), values, box, (box_rows(part), tile_k))


@cute.jit
def open_stages(gemm: cutlass.Constexpr, full: Int32, warp: Int32, maps: tuple):
    """Initialise the barriers from the address ``full`` on; all threads call it and synchronise."""
    if warp == 0:
        for pair in maps:
            if cutlass.const_expr(pair is not None):
                cpasync.prefetch_descriptor(pair[0])
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(gemm.config.stages):
                cute.arch.mbarrier_init(barrier(full) + stage, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def begin_spot(gemm: Any, which: int, part: Any, tile: Tile, problem: Problem) -> MapCoordinates:
    """Return the coordinates of a tile's first k tile, of A (0) or B (1)."""
    row, ragged = (tile.m, tile.n)[which] * part.extent, ragged_mode(gemm, which)
    if ragged is None:
        return MapCoordinates(row, Int32(0), (tile.group if tile.slot is None else tile.slot,))
    down, depth, *rest = ragged_coord(ragged, tile.start, tile.length, 0)
    return MapCoordinates(row + down, Int32(depth), tuple(rest))


def next_spot(spot: MapCoordinates, tile_k: int) -> MapCoordinates:
    """Return the coordinates of the next k tile."""
    return spot._replace(depth=spot.depth + tile_k)


def load_boxes(gemm: Any, pair: tuple, part: Any, spot: MapCoordinates, stage: StageAddress):
    """Issue the TMA loads of an operand's k tile, which count on the barrier of the stage; one warp calls it."""
    tile_k, element = gemm.config.tile_k, gemm.element
    load, coords = pair
    layout, rows = box_layout(part, tile_k), box_rows(part)
    blocks = part.extent // rows
    for number in range(part.halves * blocks):
        half, block = number // blocks, number % blocks
        halves = (half,) if part.halves > 1 else ()
        place = (spot.row + block * rows, spot.depth, *halves, *spot.rest)
        matrix = None, None, *[0] * (len(place) - 2)
        box = cute.local_tile(cute.domain_offset(place, coords)[matrix], (rows, tile_k), (0, 0))
        address = stage.address + part.offset + number * (rows * tile_k * element.width // 8)
        plain = cute.make_ptr(element, address, cute.AddressSpace.smem, assumed_align=1024)
        target = cute.make_tensor(cute.recast_ptr(plain, cute.make_swizzle(*SWIZZLE), element), layout)
        whole = cute.make_layout(1)
        to, source = cpasync.tma_partition(load, 0, whole, cute.group_modes(target, 0, 2), cute.group_modes(box, 0, 2))
        cute.copy(load, source, to, tma_bar_ptr=barrier(stage.full))
