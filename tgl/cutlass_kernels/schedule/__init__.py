"""The order in which a persistent grid visits output tiles."""

from .order import BYTES as ORDER_BYTES
from .order import allocate_order, sort_groups, visited, way_back
from .raster import ceil_div, decode
from .search import GroupSearch, Tile, exact_tile, find_tile, start_search

__all__ = [
    "ORDER_BYTES",
    "GroupSearch",
    "Tile",
    "allocate_order",
    "ceil_div",
    "decode",
    "exact_tile",
    "find_tile",
    "sort_groups",
    "start_search",
    "visited",
    "way_back",
]
