"""Files that only their owner can write, since code that is loaded from them runs in this process."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

DIRECTORY, FILE = 0o700, 0o600  # modes of new directories and files
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_directory(path: Path) -> None:
    """Make ``path`` and missing parents, private to this user."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(DIRECTORY)


def require_private(path: Path) -> None:
    """Check that only this user and root can write ``path``, or in a directory replace their files.

    Raises:
        PermissionError: somebody can.
    """
    if not hasattr(os, "getuid"):
        return  # a system without POSIX users
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise PermissionError(f"{path} belongs to user {status.st_uid}, neither to user {os.getuid()} nor to root")
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS_WRITE and not sticky:
        raise PermissionError(f"users other than its owner can write {path}; `chmod go-w` it")


def make_private(path: Path) -> None:
    """Remove others' write permission from ``path``, if it is this user's."""
    if hasattr(os, "getuid") and path.is_dir():
        status = path.stat()
        if status.st_uid == os.getuid() and status.st_mode & _OTHERS_WRITE:
            path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
