"""The order in which a persistent grid visits output tiles."""

from .raster import ceil_div, decode
from .search import GroupSearch, Tile, exact_tile, find_tile, start_search

__all__ = ["GroupSearch", "Tile", "ceil_div", "decode", "exact_tile", "find_tile", "start_search"]
