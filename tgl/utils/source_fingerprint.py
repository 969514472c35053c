"""Identifies the sources of this package that a process runs, for caches on disk that outlive them.

A process runs the sources that were on disk when ``tgl`` was imported. Their sizes and modification times are recorded
at import, as Python does to validate bytecode; contents take longer to read and are hashed when a key is first needed.
If a source has changed in between, the imported one can no longer be identified.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # of the package

_Status = tuple[int, int]  # size and time of last change


class SourcesChangedError(OSError):
    """Source files of this package have changed since they were imported."""


def of(*folders: str) -> str:
    """Return the hash of the sources as imported, 24 hexadecimal digits, independent of where they are installed.

    Args:
        folders: subfolders of the package to include; default: every source.

    Raises:
        SourcesChangedError: a source has changed since it was imported, or sources are no files.
    """
    names = _names(folders)
    if not names:
        raise SourcesChangedError(f"no sources of tgl lie in {ROOT}")
    digest = _hash(names)
    _require_unchanged(names)  # after reading, and again in every call, because more of them are imported by then
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
    """Yield ``(path below the package, status)`` of every module."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".pyc")) and not entry.name.startswith("."):
                status = entry.stat()
                yield below + entry.name, (status.st_size, status.st_mtime_ns)
            elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                yield from _sources(entry.path, below + entry.name + os.sep)


_imported: dict[str, _Status] = dict(_sources(ROOT)) if os.path.isdir(ROOT) else {}
