"""Tensor maps that end where a group ends, without a descriptor per group.

A tensor map has fixed bounds, but a coordinate may be chosen so that a group's end falls on one. The ragged mode of
stride ``s`` gets the size ``2^30``, and two modes are added that only shift the address:

=========  ============  =============  ======================
mode       size          stride         coordinate
=========  ============  =============  ======================
ragged     ``2^30``      ``s``          ``2^30 - length + i``
shift      ``2^31 - 1``  ``2^34 - s``   ``2^30``
start      ``2^31 - 1``  ``s``          ``start + length``
=========  ============  =============  ======================

(strides in bytes). The address is ``base + 2^64 + (start + i) s``, which wraps to row ``i`` of the group, and
``i >= length`` is out of bounds: it loads as zero and is not stored. ``s`` must be a multiple of 16 bytes, so the
ragged mode cannot be the contiguous one.
"""

from cutlass import Int32, Int64, cute

RAGGED_SIZE = 1 << 30
ANY_SIZE = (1 << 31) - 1
WRAP_BYTES = 1 << 34


def ragged_tensor(tensor: cute.Tensor, mode: int) -> cute.Tensor:
    """Return ``tensor [X, Y, ...]`` with mode ``mode`` ragged, as ``[X, Y, ..., shift, start]``."""
    step = Int64(tensor.stride[mode])
    wrap = Int64(WRAP_BYTES * 8 // tensor.element_type.width) - step
    shape, stride = list(tensor.shape), list(tensor.stride)
    shape[mode] = Int32(RAGGED_SIZE)
    stride[mode] = step
    layout = cute.make_layout((*shape, Int32(ANY_SIZE), Int32(ANY_SIZE)), stride=(*stride, wrap, step))
    return cute.make_tensor(tensor.iterator, layout)


def ragged_coord(mode: int, start: Int32, length: Int32, first: Int32, modes: int = 2) -> tuple:
    """Return the coordinate of row ``first`` of the group of ``length`` rows from ``start`` in a ``ragged_tensor``."""
    inner: list = [0] * modes
    inner[mode] = Int32(RAGGED_SIZE) - length + first
    return (*inner, Int32(RAGGED_SIZE), start + length)
