"""Files that this user alone can have written, each with a checksum, since what they hold is run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

OTHERS_WRITE = 0o022


def make_private(directory: Path) -> None:
    """Make a directory for this user alone, or require that an existing one is.

    Raises:
        OSError: it cannot be made or written to, or others can write to it.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to the user {status.st_uid}, this process to {os.geteuid()}")
    if status.st_mode & OTHERS_WRITE:
        raise PermissionError(f"others can write to {directory}: remove it, or `chmod go-w` if you trust what it holds")
    with tempfile.TemporaryFile(dir=directory):
        pass


def write(path: Path, data: bytes) -> None:
    """Write a file with its checksum, whole or not at all; a full or read-only disk only costs a later process time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace(path, _digest(data) + data)


def read(path: Path) -> bytes | None:
    """Return what ``write`` wrote, or None if there is nothing, or nothing that matches its checksum."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    data = content[_LENGTH:]
    return data if content[:_LENGTH] == _digest(data) else None


def replace(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    fd, scratch = tempfile.mkstemp(dir=path.parent)  # for this user alone
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(content)
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def checksum_of(path: Path) -> Path:
    """Return the file beside ``path`` that has its checksum, for files that others read as they are."""
    return path.with_name(path.name + ".sha256")


def seal(path: Path) -> None:
    """Write the checksum of a file beside it."""
    replace(checksum_of(path), _digest(path.read_bytes()))


def intact(path: Path) -> bool:
    """Return whether a sealed file is there and matches its checksum."""
    try:
        return checksum_of(path).read_bytes() == _digest(path.read_bytes())
    except OSError:
        return False


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_LENGTH = len(_digest(b""))
