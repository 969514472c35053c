"""The stand-in for the CUDA runtime library under compiled CuTe DSL host code, and what it has loaded.

The library is compiled once per machine with the system's C compiler and loaded once per process; the callbacks below
receive module loads and launches. Functions that were compiled against it stay bound to it.
"""

from __future__ import annotations

import atexit
import ctypes
import glob
import hashlib
import os
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import cache, storage
from .errors import EmulatorError

_SOURCE = Path(__file__).with_name("shim.c")
_FATBIN_MAGIC = b"\x50\xed\x55\xba"
LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure

_LoadCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_KernelCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
_LaunchCallback = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
)
_AttributeCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)


def build() -> str:
    """Return the path of the compiled stand-in library; compile it where there is none that is whole.

    Raises:
        EmulatorError: no C compiler, or it failed.
    """
    tag = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    base = cache.directory()
    if base is None:
        base = Path(tempfile.mkdtemp(prefix="cute_emulator_"))  # for this user alone
        atexit.register(shutil.rmtree, base, ignore_errors=True)
    target = base / f"libcute_emulator_{tag}.so"
    if storage.intact(target):
        return str(target)
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise EmulatorError(
            "the kernel emulator needs a C compiler, once, to build the library that stands in for the CUDA runtime; "
            "none of cc, gcc, clang is on PATH"
        )
    fd, scratch = tempfile.mkstemp(suffix=".so", dir=base)
    os.close(fd)
    done = subprocess.run(
        [compiler, "-O1", "-w", "-shared", "-fPIC", "-o", scratch, str(_SOURCE)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        os.unlink(scratch)
        raise EmulatorError(f"{compiler} could not build the emulator's runtime library:\n{done.stderr[-2000:]}")
    os.replace(scratch, target)
    storage.seal(target)
    return str(target)


def _elf_size(p: int) -> int:
    h = ctypes.string_at(p, 64)

    def u(offset: int, n: int) -> int:
        return int.from_bytes(h[offset : offset + n], "little")

    return max(u(0x28, 8) + u(0x3A, 2) * u(0x3C, 2), u(0x20, 8) + u(0x36, 2) * u(0x38, 2))


def image_bytes(p: int) -> bytes:
    """The cubin at address ``p``: a bare ELF file, or the payload of a fatbin container."""
    if ctypes.string_at(p, 4) != _FATBIN_MAGIC:
        return ctypes.string_at(p, _elf_size(p))
    header = ctypes.string_at(p, 16)
    entry = p + int.from_bytes(header[6:8], "little")
    h = ctypes.string_at(entry, 16)
    return ctypes.string_at(entry + int.from_bytes(h[4:8], "little"), int.from_bytes(h[8:16], "little"))


class HostLibrary:
    """The loaded library: cubins whose PTX is known, modules and kernels that host code has loaded.

    ``launcher(ptx text, kernel name, dims, smem, args)`` runs a launch; ``failed(exception)`` takes what it raises;
    ``attribute(number)`` answers device attribute queries.
    """

    def __init__(self) -> None:
        self.path = build()
        self.dump_dir = tempfile.mkdtemp(prefix="cute_emulator_")
        self.ptx: dict[str, str] = {}  # hash of a cubin -> PTX
        self.cubins: dict[str, bytes] = {}
        self.modules: list[str] = []
        self.kernels: list[tuple[str, str]] = []
        self.launcher: Callable[..., None] | None = None
        self.failed: Callable[[BaseException], None] = lambda e: None
        self.attribute: Callable[[int], int] = lambda a: 0
        lib = ctypes.CDLL(self.path, mode=ctypes.RTLD_GLOBAL)
        self._keep = (
            lib, _LoadCallback(self._on_load), _KernelCallback(self._on_kernel), _LaunchCallback(self._on_launch),
            _AttributeCallback(lambda a: self.attribute(a)),
        )  # fmt: skip
        lib.cute_emulator_callbacks(*self._keep[1:])

    def collect(self) -> None:
        """Take over the PTX and cubins that the compiler has dumped since the last call."""
        for f in glob.glob(os.path.join(self.dump_dir, "*.cubin")):
            source = f.removesuffix(".cubin") + ".ptx"
            try:
                cubin, text = Path(f).read_bytes(), Path(source).read_text()
            except OSError:
                continue
            key = hashlib.sha256(cubin).hexdigest()[:32]
            if key not in self.ptx:
                self.ptx[key], self.cubins[key] = text, cubin
                cache.store_ptx(key, text)
            os.unlink(f)
            os.unlink(source)

    def close(self) -> None:
        shutil.rmtree(self.dump_dir, ignore_errors=True)

    def _ptx_of(self, blob: bytes) -> str | None:
        key = hashlib.sha256(blob).hexdigest()[:32]
        if key in self.ptx:
            return key
        text = cache.load_ptx(key)
        if text is not None:
            self.ptx[key] = text
            return key
        for k, cubin in self.cubins.items():  # the loaded image may be padded
            if blob[: len(cubin)] == cubin or cubin[: len(blob)] == blob:
                return k
        return None

    def _on_load(self, image: int) -> int:
        try:
            self.collect()
            key = self._ptx_of(image_bytes(image))
            if key is None:
                raise EmulatorError(
                    "a kernel was loaded whose PTX is unknown: compile it inside `with emulate(...)` (its object file "
                    "may then be reloaded by later processes)"
                )
            self.modules.append(key)
            return len(self.modules)
        except Exception as e:  # nothing may propagate into compiled host code
            self.failed(e)
            return 0

    def _on_kernel(self, module: int, name: bytes) -> int:
        self.kernels.append((self.modules[module - 1], name.decode()))
        return len(self.kernels)

    def _on_launch(self, kernel: int, dims: Any, smem: int, stream: int, args: Any) -> int:
        try:
            if self.launcher is None:
                raise EmulatorError(
                    "a function compiled for the kernel emulator was called outside `with emulate(...)`"
                )
            key, name = self.kernels[kernel - 1]
            self.launcher(self.ptx[key], name, [dims[i] for i in range(10)], smem, args)
            return 0
        except BaseException as e:
            if not isinstance(e, EmulatorError):
                e.args = (*e.args, traceback.format_exc())
            self.failed(e)
            return LAUNCH_FAILURE
