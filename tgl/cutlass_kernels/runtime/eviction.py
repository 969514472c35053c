"""Removal of kernels of other versions, and of files that were set aside, from the directory of compiled kernels.

This version's kernels are never removed. Everything else is removed ``MAX_AGE`` after its last use; and beyond
``MAX_BYTES`` in total, the least recently used goes first, unless it was used within ``IN_USE``: other processes may
run another version. A directory is renamed before its files are removed, so that no process finds half of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DAY = 24 * 3600.0
MAX_AGE = 30 * DAY
MAX_BYTES = 2 * 2**30
IN_USE = DAY

_REMOVED = ".removed"
_VERSION = re.compile(rf"[0-9a-f]{{24}}(\.\d+{_REMOVED})?")
_FILE = re.compile(r"[0-9a-f]{32}\.(o|sha256|lock|\d+\.corrupt)|tmp\w*")


class _Entry(NamedTuple):
    """A file or directory that may be removed; ``used`` is the time of its last use."""

    used: float
    size: int
    path: Path


def mark_used(directory: Path) -> None:
    """Mark the kernels in ``directory`` as used; does nothing where it is not writable."""
    with contextlib.suppress(OSError):
        os.utime(directory)


def evict(directory: Path) -> None:
    """Remove old or excess versions beside ``directory``, that of this version, and files set aside in it."""
    now = time.time()
    entries = sorted(_entries(directory), reverse=True)
    total = 0
    for used, size, path in entries:  # the most recently used first
        total += size
        if now - used > MAX_AGE or (total > MAX_BYTES and now - used > IN_USE):
            total -= size
            _remove(path)


def _entries(directory: Path) -> Iterator[_Entry]:
    with contextlib.suppress(OSError):
        for path in directory.parent.iterdir():
            if path.name != directory.name and _is_version(path):
                yield from _entry(path)
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.suffix == ".corrupt" or path.is_dir():  # a directory is left by a process that was killed
                yield from _entry(path)


def _is_version(path: Path) -> bool:
    """Return whether this is a directory of kernels: a directory chosen by the user may hold others."""
    if not _VERSION.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    names = os.listdir(path)
    some = path.suffix == _REMOVED or any(name.endswith(".o") for name in names)
    return some and all(_FILE.fullmatch(name) for name in names)


def _entry(path: Path) -> Iterator[_Entry]:
    with contextlib.suppress(OSError):  # another process may remove it at the same time
        status = path.stat()
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            return
        size = sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else status.st_size
        yield _Entry(status.st_mtime, size, path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if not path.is_dir():
            path.unlink()
            return
        removed = path
        if path.suffix != _REMOVED:
            removed = path.with_name(f"{path.name}.{os.getpid()}{_REMOVED}")
            path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
