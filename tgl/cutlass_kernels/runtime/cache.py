"""Compiled kernels on disk, shared by processes and by runs.

A kernel is one object file named by the hash of what it is made for, in a directory named by the fingerprint of what
it is made by: the sources of kernels and of the tables they are made from, and the versions of Python, the DSL and
TVM-FFI. Beside it lies its digest.
Processes that want the same kernel at the same time wait for the one that builds it; a file that does not match its
digest, or does not load, is set aside under another name and built again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

FUNCTION = "tgl_kernel"  # the exported name in every object file
PACKAGE = Path(__file__).parents[2]
SOURCES = (
    "cutlass_kernels",
    "meta",
)  # folders of all kernels, and of the tables that say what formats and activations are
_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch")

_directory: Path | None = None
_loaded: list[Any] = []  # modules whose functions are in use


def set_directory(path: str | os.PathLike | None) -> None:
    """Keep compiled kernels in ``path``; None means the default, ``default_directory``."""
    global _directory
    _directory = Path(path) if path is not None else None


def directory() -> Path:
    """Where kernels of this version are kept."""
    return (_directory or default_directory()) / fingerprint()


def count() -> int:
    """How many kernels of this version are kept."""
    return len(list(directory().glob("*.o")))


def default_directory() -> Path:
    """``tgl`` in the place that the platform has for caches of the user."""
    import platformdirs  # not needed before the first kernel

    return Path(platformdirs.user_cache_dir("tgl", appauthor=False))


@functools.cache
def fingerprint() -> str:
    """Identifies everything besides its key that a compiled kernel depends on."""
    digest = hashlib.sha256()
    digest.update(f"{sys.version_info[:2]} {platform.machine()} {sys.platform}".encode())
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    for folder in SOURCES:
        for source in sorted((PACKAGE / folder).rglob("*.py")):
            digest.update(str(source.relative_to(PACKAGE)).encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def fetch(key: object, build: Callable[[], Any]) -> Callable:
    """The kernel for ``key``: from disk, else from ``build`` and then kept on disk.

    Args:
        key: anything whose ``repr`` says what the kernel is made for.
        build: returns a function compiled for TVM-FFI; called at most once.

    A directory that cannot be written to costs a warning and the compile time, nothing else.
    """
    built: list[Any] = []

    def once() -> Any:
        if not built:
            built.append(build())
        return built[0]

    path = _path(key)
    try:
        function = _load(path) if _intact(path) else None  # also where nothing can be written, not even a lock
        if function is None:
            with _locked(path):
                function = _load(path)
                if function is None:
                    _store(path, once())
                    function = built[0]
        return function
    except OSError as error:
        warnings.warn(f"tgl: compiled kernels cannot be kept in {path.parent} ({error})", stacklevel=2)
        return once()


def store(key: object, build: Callable[[], Any]) -> None:
    """Have the kernel for ``key`` on disk, compiled by ``build`` unless it is there; it is not loaded.

    Raises:
        OSError: the directory cannot be written to.
    """
    path = _path(key)
    with _locked(path):
        if not _intact(path):
            _store(path, build())


def _path(key: object) -> Path:
    return directory() / (hashlib.sha256(repr(key).encode()).hexdigest()[:32] + ".o")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among the processes that want to write the kernel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        yield


def _intact(path: Path) -> bool:
    """Whether the kernel is there, and matches its digest."""
    digest = path.with_suffix(".sha256")
    return path.exists() and digest.exists() and digest.read_text() == _digest(path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _load(path: Path) -> Callable | None:
    """The function in ``path``; None if there is none, or none that can be trusted."""
    if not path.exists():
        return None
    try:
        if not _intact(path):
            raise ValueError("it does not match its digest")
        from cutlass.cute.runtime import load_module

        module = load_module(str(path), enable_tvm_ffi=True)
        function = module[FUNCTION]
    except Exception as error:
        aside = path.with_name(f"{path.stem}.{time.time_ns()}.corrupt")
        os.replace(path, aside)
        warnings.warn(f"tgl: set the compiled kernel {path.name} aside as {aside.name}: {error}", stacklevel=3)
        return None
    _loaded.append(module)
    return function


def _store(path: Path, compiled: Any) -> None:
    """Write an object file and its digest, each complete or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / "kernel.o"
        compiled.export_to_c(str(made), FUNCTION)
        note = Path(scratch) / "digest"
        note.write_text(_digest(made))
        os.replace(note, path.with_suffix(".sha256"))
        os.replace(made, path)
