"""Identifies the sources of this package that a process runs, for caches on disk that outlive them.

What a process runs is what lay on disk when ``tgl`` was imported. So the size and time of every source are noted then,
as Python itself does to know its bytecode by, and contents, which take longer to read, are hashed when a key is first
needed. A source that has changed in between is not the one that was imported, and what was has no name.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # of the package

_Status = tuple[int, int]  # size and time of last change


class SourcesChangedError(OSError):
    """Files of this package are no longer those that were imported."""


def of(*folders: str) -> str:
    """Hash of the sources as they were imported, 24 hexadecimal digits; the same for equal files wherever they lie.

    Args:
        folders: those right below the package that count; default: every source.

    Raises:
        SourcesChangedError: a source has changed since it was imported, or sources are no files.
    """
    names = _names(folders)
    if not names:
        raise SourcesChangedError(f"no sources of tgl lie in {ROOT}")
    digest = _hash(names)
    _require_unchanged(names)  # after the files were read, and again in every call: more of them are imported by then
    return digest


@functools.cache
def _names(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in sorted(_imported) if not folders or name.partition(os.sep)[0] in folders)


@functools.cache
def _hash(names: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in names:
        try:
            with open(os.path.join(ROOT, name), "rb") as file:
                content = hashlib.sha256(file.read()).hexdigest()
        except FileNotFoundError:
            raise SourcesChangedError(f"tgl/{name} was removed after it was imported") from None
        digest.update(f"{name.replace(os.sep, '/')} {content}\n".encode())
    return digest.hexdigest()[:24]


def _require_unchanged(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            status = os.stat(os.path.join(ROOT, name))
        except FileNotFoundError:
            raise SourcesChangedError(f"tgl/{name} was removed after it was imported") from None
        if (status.st_size, status.st_mtime_ns) != _imported[name]:
            raise SourcesChangedError(f"tgl/{name} has changed since it was imported")


def _sources(folder: str, below: str = "") -> Iterator[tuple[str, _Status]]:
    """``(path below the package, status)`` of every module."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".pyc")) and not entry.name.startswith("."):
                status = entry.stat()
                yield below + entry.name, (status.st_size, status.st_mtime_ns)
            elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                yield from _sources(entry.path, below + entry.name + os.sep)


_imported: dict[str, _Status] = dict(_sources(ROOT)) if os.path.isdir(ROOT) else {}
