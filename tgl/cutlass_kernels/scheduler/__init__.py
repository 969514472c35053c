"""Tile schedulers: the order in which a persistent grid visits the tiles of ragged groups, and where their rows are.

Kernels of every family import from here, mostly the names in ``__all__``. The modules import the kernel compiler, so
launchers do not import them.
"""

from .group_sort import BYTES as ORDER_BYTES
from .group_sort import allocate_order, sort_groups, visited
from .lpt import BYTES as DEAL_BYTES
from .lpt import allocate_deal, deal_tiles, dealt
from .swizzle import ceil_div, decode, quotient
from .tile_lookup import GroupSearch, Tile, TileGrid, exact_tile, find_tile, start_search

__all__ = [
    "DEAL_BYTES",
    "ORDER_BYTES",
    "GroupSearch",
    "Tile",
    "TileGrid",
    "allocate_deal",
    "allocate_order",
    "ceil_div",
    "deal_tiles",
    "dealt",
    "decode",
    "exact_tile",
    "find_tile",
    "quotient",
    "sort_groups",
    "start_search",
    "visited",
]
