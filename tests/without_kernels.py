"""A CPU without a kernel of any quantised format."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tgl import backends
from tgl.backends.composite import emulation


@contextmanager
def emulated_formats() -> Iterator[None]:
    """Make emulations of a format rank before the CPU implementations, with warnings not yet given."""
    emulation._say.cache_clear()
    added = [backends.add(replace(made, priority=20)) for made in emulation.implementations("cpu")]
    try:
        yield
    finally:
        for implementation in added:
            backends.remove(implementation)
