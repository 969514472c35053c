"""A user's program with an installed ``tgl`` and without the kernels' compiler; runs in that environment's Python.

    PYTHON tests/packaging/user.py [BACKEND]

Every module is imported, without the parts of Python that Windows or macOS lack; a layer is trained, eagerly
and compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator

import filelock  # noqa: F401 (asks for `fcntl` by the name of the system, as torch does)
import torch

import tgl
import tgl.testing

# What Python lacks on Windows, and of it on macOS: the last.
MODULES = ("curses", "fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
NAMES = ("fork", "geteuid", "getloadavg", "getuid", "sysconf", "uname", "sched_getaffinity")

# The modules, or packages of them, that need another package to be imported.
NEEDS = {
    "tgl.cutlass_kernels": "cutlass",
    "tgl.integrations._torchtitan_experts": "torchtitan",
    "tgl.integrations._transformers_mxfp4": "transformers",
    "tgl.integrations._vllm_experts": "vllm",
    "tgl.integrations.peft": "peft",
    "tgl.testing.emulation": "cute_emulator",
    "tgl.testing.emulator": "cute_emulator",
}


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Python as it is on Windows and macOS, for code that is imported; torch and what it loads are there before."""
    loaded = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.modules.update(dict.fromkeys(MODULES))  # type: ignore[arg-type]
    functions = {name: vars(os).pop(name) for name in NAMES}
    try:
        yield
    finally:
        vars(os).update(functions)
        for name in MODULES:
            del sys.modules[name]
        sys.modules.update(loaded)


def import_everything() -> dict[str, str]:
    """Imports all modules of ``tgl``; the first package that is missing, by the module that imports it."""
    missing = {}
    for found in pkgutil.walk_packages(tgl.__path__, "tgl."):
        try:
            importlib.import_module(found.name)
        except ImportError as error:
            missing[found.name] = error.name or getattr(error.__cause__, "name", None) or str(error)
    return missing


def explained(missing: dict[str, str]) -> bool:
    """Return whether ``NEEDS`` lists every package that is missing, and no other."""
    told = {room: {name for name in missing if name == room or name.startswith(f"{room}.")} for room in NEEDS}
    alike = all({missing[name] for name in names} == {NEEDS[room]} for room, names in told.items())
    return alike and set().union(*told.values()) == set(missing)


def ask_for_the_emulator() -> str:
    """Return what is said where the emulator is not installed."""
    try:
        return str(tgl.testing.emulate)
    except ImportError as error:
        return str(error)


def train(backend: str) -> None:
    """A forward and a backward of a layer, eagerly and compiled, which agree."""
    layer = tgl.GroupedLinear(3, 32, 64)
    x, splits = torch.randn(20, 32), torch.tensor([7, 0, 13])

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layer(x, m_splits=splits).square().mean()

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        layer.zero_grad()
        value = run(x)
        value.backward()
        results.append([value.detach(), *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*results)
    assert all(result.abs().sum() > 0 for result in results[0])


def main() -> None:
    for name in ("cutlass", "tvm_ffi"):
        assert importlib.util.find_spec(name) is None, f"{name} should be absent here"
    with elsewhere():
        missing = import_everything()
    assert explained(missing), missing
    assert "`pip install ./emulator`" in ask_for_the_emulator()
    train(*sys.argv[1:] or ["inductor"])
    print(f"tgl {tgl.__version__} is imported from {tgl.__path__[0]}, and trains")


if __name__ == "__main__":
    main()
