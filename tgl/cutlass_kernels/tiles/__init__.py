"""Tiles of groups of rows of any length: in which order a persistent grid visits them, and where their rows are."""

from .deal import BYTES as DEAL_BYTES
from .deal import allocate_deal, deal_tiles, dealt
from .order import BYTES as ORDER_BYTES
from .order import allocate_order, sort_groups, visited
from .raster import ceil_div, decode, quotient
from .search import Grid, GroupSearch, Tile, exact_tile, find_tile, start_search

__all__ = [
    "DEAL_BYTES",
    "ORDER_BYTES",
    "Grid",
    "GroupSearch",
    "Tile",
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
