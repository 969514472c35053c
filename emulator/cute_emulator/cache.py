"""Translated kernels, in memory and on disk.

A kernel is translated once per PTX text and version of the emulator; the result (compiled Python code and launch facts)
is kept in ``directory()``. The PTX of a cubin is kept beside it, so that a function compiled by an earlier process and
reloaded from an object file still finds its source. A damaged entry counts as absent.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import os
import pickle
import sys
import warnings
import zlib
from pathlib import Path
from types import FunctionType
from typing import Any

from . import storage
from .codegen import Generator
from .errors import EmulatorError
from .parser import parse_module
from .support import NAMESPACE

_FACTS = (
    "params",
    "param_size",
    "dynamic_shared",
    "local_size",
    "reqntid",
    "histogram",
    "unsupported",
    "target",
    "locations",
    "maps_in_memory",
)


@functools.cache
def fingerprint() -> str:
    """Return the hash of the emulator's sources and of the Python that compiled them."""
    h = hashlib.sha256(sys.version.encode())
    for f in sorted(Path(__file__).parent.rglob("*.py")):
        h.update(f.name.encode() + b"\0" + f.read_bytes())
    return h.hexdigest()[:16]


@functools.cache
def directory() -> Path | None:
    """Return the directory of translations, or None, with a warning, if this user has none that is its alone.

    It is ``$CUTE_EMULATOR_CACHE``, or ``cute_emulator`` among the user's caches.
    """
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        d = Path(os.environ.get("CUTE_EMULATOR_CACHE") or Path(caches, "cute_emulator"))
        storage.make_private(d)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        warnings.warn(f"cute_emulator: nothing is kept for later processes: {error}", stacklevel=2)
        return None
    return d


def store_ptx(cubin_hash: str, text: str) -> None:
    d = directory()
    if d is not None and load_ptx(cubin_hash) is None:
        storage.write(d / "ptx" / cubin_hash, zlib.compress(text.encode(), 3))


def load_ptx(cubin_hash: str) -> str | None:
    d = directory()
    data = None if d is None else storage.read(d / "ptx" / cubin_hash)
    return None if data is None else zlib.decompress(data).decode()


class Program:
    """A translated kernel.

    ``function(warp, mask, counts, fragments)`` is the generator that runs a warp; ``unsupported`` maps what was refused
    at translation to its first PTX line; ``locations`` maps PTX lines to ``file:line`` of the kernel's source;
    ``maps_in_memory`` tells whether copies may use tensor maps that are not parameters.
    """

    params: list[tuple[int, int]]
    param_size: int
    dynamic_shared: int
    local_size: int
    reqntid: tuple[int, int, int] | None
    histogram: list[dict[str, int]]
    unsupported: dict[str, int]
    target: str
    locations: dict[int, str]
    maps_in_memory: bool

    def __init__(self, name: str, facts: dict[str, Any], code: Any):
        self.name = name
        for key in _FACTS:
            setattr(self, key, facts[key])
        namespace = dict(NAMESPACE)
        exec(code, namespace)
        self.function: FunctionType = namespace["warp"]

    def location(self, line: int) -> str:
        """Return ``PTX line 12 (kernel.py:34)``."""
        source = self.locations.get(line)
        return f"PTX line {line}" + (f" ({source})" if source else "")


def _translate(text: str, name: str, clocked: bool) -> tuple[dict[str, Any], Any]:
    module = parse_module(text)
    if name not in module.kernels:
        raise EmulatorError(f"the PTX has no kernel {name!r}; it has {sorted(module.kernels)}")
    k = module.kernels[name]
    g = Generator(k, clocked)
    source = g.source()
    locations = {}
    for b in g.blocks:
        for ins in b.insns:
            if ins.loc is not None and ins.loc[1]:
                locations[ins.line] = f"{module.files.get(ins.loc[0], '?')}:{ins.loc[1]}"
    facts = {
        "params": k.params, "param_size": k.param_size, "dynamic_shared": g.dynamic_shared, "local_size": k.local_size,
        "reqntid": k.reqntid, "histogram": g.histogram(), "unsupported": g.unsupported, "target": module.target,
        "locations": locations, "maps_in_memory": g.maps_in_memory(),
    }  # fmt: skip
    return facts, compile(source, f"<emulated {name[:60]}>", "exec")


_programs: dict[tuple[str, str, bool], Program] = {}


def get_program(text: str, name: str, clocked: bool = False) -> Program:
    """Return the translation of kernel ``name`` of a PTX module; ``clocked`` if its warps have clocks."""
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    p = _programs.get((key, name, clocked))
    if p is not None:
        return p
    d = directory()
    entry = hashlib.sha256(f"{key}\0{name}\0{clocked}".encode()).hexdigest()[:32]
    path = d / f"code-{fingerprint()}" / entry if d is not None else None
    data = None if path is None else storage.read(path)
    if data is not None:
        facts, code = pickle.loads(data)
        p = Program(name, facts, marshal.loads(code))
    else:
        facts, code = _translate(text, name, clocked)
        p = Program(name, facts, code)
        if path is not None:
            storage.write(path, pickle.dumps((facts, marshal.dumps(code))))
    _programs[key, name, clocked] = p
    return p
