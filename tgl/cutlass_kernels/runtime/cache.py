"""Compiled kernels on disk, shared by processes and by runs.

A kernel is one object file named by the hash of its key and of the compiler's settings, in a directory named by the
fingerprint of everything else it depends on: the sources of kernels and of the tables they use, as this process
imported them, and the versions of Python, the DSL's packages and TVM-FFI. Its digest lies beside it. Processes that
want the same kernel at the same time wait for the one that builds it; a file that does not match its digest, or does
not load, is renamed and built again. Loaded files are executed, so directories and files are private to this user, and
a file that another user could have written is not loaded.

Any problem with the directory costs a warning and the compile time, nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...utils import source_fingerprint
from . import eviction, private_files

FUNCTION = "tgl_kernel"  # the exported name in every object file
SOURCES = (
    "cutlass_kernels",
    "meta",
)  # folders of all kernels, and of the tables that say what formats and activations are
_DSL = "nvidia-cutlass-dsl"
_PACKAGES = (
    _DSL,
    *(f"{_DSL}-libs-{part}" for part in ("base", "core", "cu12", "cu13")),
    "apache-tvm-ffi",
    "torch",
)
LOCK_NOTICE = 30.0  # seconds after which a process reports that it is waiting; a kernel takes a few to compile
LOCK_TIMEOUT = 600.0  # seconds after which it gives up, as Inductor does

_log = logging.getLogger(__name__)

_directory: Path | None = None
_loaded: list[Any] = []  # modules whose functions are in use
_marked: set[Path] = set()  # directories that this process has marked as used
_evicted: set[Path] = set()  # directories beside which this process has evicted old ones


def set_directory(path: str | os.PathLike | None) -> None:
    """Keep compiled kernels in ``path``; None means the default, ``default_directory``."""
    global _directory
    _directory = Path(path) if path is not None else None


def directory() -> Path:
    """Return the directory of this version's kernels.

    Raises:
        OSError: nowhere: there is no directory for caches, or this process runs sources that are no longer on disk.
    """
    return (_directory or default_directory()) / fingerprint()


def count() -> int:
    """Return how many kernels of this version are cached."""
    return len(list(directory().glob("*.o")))


def default_directory() -> Path:
    """Return ``tgl`` in the platform's cache directory of the user.

    Raises:
        OSError: the user has no such place.
    """
    import platformdirs  # not needed before the first kernel

    try:
        path = Path(platformdirs.user_cache_dir("tgl", appauthor=False))
    except (RuntimeError, KeyError) as error:  # neither HOME nor an entry of the user
        raise FileNotFoundError(str(error)) from error
    if not path.is_absolute():  # the answer of older versions of platformdirs in that case
        raise FileNotFoundError("there is no home directory; set HOME or XDG_CACHE_HOME")
    return path


def fingerprint() -> str:
    """Return the hash of everything besides its key and the compiler's settings that a compiled kernel depends on.

    Raises:
        OSError: the sources that this process has imported are no longer on disk.
    """
    return hashlib.sha256(f"{_installed()} {source_fingerprint.of(*SOURCES)}".encode()).hexdigest()[:24]


@functools.cache
def _installed() -> str:
    words = [f"{sys.version_info[:2]} {platform.machine()} {sys.platform}"]
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            words.append(f"{package} {importlib.metadata.version(package)}")
    return " ".join(words)


def fetch(key: object, build: Callable[[], Any]) -> Callable:
    """Return the kernel for ``key``: from disk, else from ``build`` and then kept on disk.

    Args:
        key: anything whose ``repr`` says what the kernel is made for.
        build: returns a function compiled for TVM-FFI; called at most once, and what it raises is raised.

    A directory that cannot be written to costs a warning and the compile time, nothing else.
    """
    with contextlib.ExitStack() as held:
        path = function = None
        try:
            path = _path(key)
            function = _load(path) if _intact(path) else None  # also where nothing can be written, not even a lock
            if function is None:
                held.enter_context(_locked(path))
                function = _load(path)
        except OSError as error:
            _warn_not_kept(error)
            path = None
        if function is not None:
            return function
        compiled = build()
        if path is not None:
            try:
                _store(path, compiled)
            except OSError as error:
                _warn_not_kept(error)
    return compiled


def store(key: object, build: Callable[[], Any]) -> None:
    """Compile the kernel for ``key`` with ``build`` and store it, unless it is on disk; it is not loaded.

    Raises:
        OSError: the directory cannot be written to, or another process compiles the kernel and does not end.
    """
    path = _path(key)
    with _locked(path):
        if not _intact(path):
            _store(path, build())


def _warn_not_kept(error: OSError) -> None:
    _warn(f"compiled kernels cannot be kept: {error}", stacklevel=4)


def _warn(message: str, stacklevel: int) -> None:
    """Warn, and log every occurrence, since a warning is shown once."""
    _log.info(message)
    warnings.warn(f"tgl: {message}", stacklevel=stacklevel)


def _path(key: object) -> Path:
    from .compiling import settings  # imports the compiler, as loading a kernel does

    words = f"{settings()} {key!r}"
    return directory() / (hashlib.sha256(words.encode()).hexdigest()[:32] + ".o")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock among processes that want to write the kernel.

    Raises:
        OSError: another process has been at it for ``LOCK_TIMEOUT``, or there can be no lock.
    """
    private_files.make_directory(path.parent)
    lock = FileLock(path.with_suffix(".lock"), mode=private_files.FILE)
    try:
        _acquire(lock)
    except NotImplementedError as error:  # a file system without locks
        raise OSError(f"{path.parent}: {error}") from error
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: FileLock) -> None:
    notice = min(LOCK_NOTICE, LOCK_TIMEOUT)
    try:
        lock.acquire(timeout=notice)
        return
    except Timeout:
        limit = f"{LOCK_TIMEOUT:g} s in all"
        _warn(f"waiting for the process that holds {lock.lock_file}, {limit}", stacklevel=7)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT - notice)
    except Timeout:
        raise TimeoutError(
            f"another process has held {lock.lock_file} for {LOCK_TIMEOUT:g} s; if it has stopped, end it"
        ) from None


def _intact(path: Path) -> bool:
    """Return whether the kernel exists and matches its digest."""
    digest = path.with_suffix(".sha256")
    return path.exists() and digest.exists() and digest.read_bytes() == _digest(path).encode()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _load(path: Path) -> Callable | None:
    """Return the function in ``path``; None if there is none, or the file is not intact.

    Raises:
        OSError: the file cannot be read, or somebody else could have written it.
    """
    if not path.exists():
        return None
    from cutlass.cute.runtime import load_module

    _require_private(path)
    try:
        if not _intact(path):
            raise ValueError("it does not match its digest")
        module = load_module(str(path), enable_tvm_ffi=True)
        function = module[FUNCTION]
    except OSError:
        raise
    except Exception as error:
        aside = path.with_name(f"{path.stem}.{time.time_ns()}.corrupt")
        os.replace(path, aside)
        _warn(f"set the compiled kernel {path.name} aside as {aside.name}: {error}", stacklevel=4)
        return None
    _loaded.append(module)
    if path.parent not in _marked:
        _marked.add(path.parent)
        eviction.mark_used(path.parent)
    return function


def _require_private(path: Path) -> None:
    """Check that no other user can have written the kernel: neither the file, nor its directory, nor the one above."""
    if _directory is None:
        # Earlier versions created it with the umask's permissions.
        private_files.make_private(path.parent.parent)
    for each in (path.parent.parent, path.parent, path):
        private_files.require_private(each)


def _store(path: Path, compiled: Any) -> None:
    """Write an object file and its digest, each complete or not at all.

    Raises:
        OSError: the files cannot be written, or sources have changed since the kernel was looked up.
    """
    fingerprint()  # raises if sources have changed by now, which the kernel may have been compiled from
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / "kernel.o"
        compiled.export_to_c(str(made), FUNCTION)
        note = Path(scratch) / "digest"
        note.write_text(_digest(made))
        for file in (note, made):
            file.chmod(private_files.FILE)
        os.replace(note, path.with_suffix(".sha256"))
        os.replace(made, path)
    if path.parent not in _evicted:
        _evicted.add(path.parent)
        eviction.evict(path.parent)
