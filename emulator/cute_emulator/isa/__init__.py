"""Instructions the emulator knows; importing this package fills ``table.TABLE``."""

from . import arithmetic, asynchronous, memory, multicast, sync
from .arithmetic import WIDTH
from .table import TABLE, Entry, destinations, lookup

__all__ = [
    "TABLE", "WIDTH", "Entry", "arithmetic", "asynchronous", "destinations", "lookup", "memory", "multicast", "sync",
]  # fmt: skip
