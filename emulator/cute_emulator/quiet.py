"""Process settings that make many small numpy operations fast."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def single_threaded_blas() -> Iterator[None]:
    """numpy's BLAS with one thread: many small products, and often a busy machine, where its threads only spin."""
    functions = _blas_functions()
    before = [get() for get, _ in functions]
    for _, put in functions:
        put(1)
    try:
        yield
    finally:
        for (_, put), n in zip(functions, before, strict=True):
            put(n)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A launch makes millions of short-lived objects, none in cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _blas_functions() -> list[tuple[Any, Any]]:
    if _blas_cache:
        return _blas_cache[0]
    out = []
    try:
        with open("/proc/self/maps") as f:
            paths = {line.split()[-1] for line in f if "openblas" in line}
    except OSError:
        paths = set()
    for path in sorted(paths):
        lib = ctypes.CDLL(path)
        for prefix, suffix in (
            ("scipy_openblas", "64_"),
            ("scipy_openblas", ""),
            ("openblas", "64_"),
            ("openblas", ""),
        ):
            get = getattr(lib, f"{prefix}_get_num_threads{suffix}", None)
            put = getattr(lib, f"{prefix}_set_num_threads{suffix}", None)
            if get is not None and put is not None:
                out.append((get, put))
                break
    _blas_cache.append(out)
    return out


_blas_cache: list[list[tuple[Any, Any]]] = []
