"""tgl's kernels in the emulator of the package ``cute-emulator``, on CPU tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from .. import backends

try:
    import cute_emulator
    from cute_emulator import sweep
except ModuleNotFoundError as error:
    if error.name != "cute_emulator":
        raise
    raise ImportError(
        "tgl.testing.emulate and tgl.testing.sweep need the package cute-emulator, which is not installed: "
        "`pip install ./emulator` in a checkout of tgl"
    ) from error

__all__ = ["emulate", "sweep"]


@functools.wraps(cute_emulator.emulate, assigned=())  # for the signature
@contextlib.contextmanager
def emulate(arch: str, **options: Any) -> Iterator[cute_emulator.Emulation]:
    """Run CuTe DSL kernels on CPU tensors, those of tgl's ops among them.

    Inside the block, an op on CPU tensors takes its kernel for ``arch``, where it has one, and every function compiled
    by ``cute.compile`` runs in the emulator.

    Args:
        arch: a chip such as ``"sm_90"`` or ``"sm_100"``, or a target of one, such as ``"sm_100a"``.
        options: those of ``cute_emulator.emulate``.
    Yields:
        ``cute_emulator.Emulation``, whose ``launches`` describe what ran.
    Raises:
        EmulatorError: no C compiler or no nvidia-cutlass-dsl; from calls inside: what a kernel did wrong.
        ValueError: a bad argument.
    """
    with cute_emulator.emulate(arch, **options) as machine, backends.emulated_device(machine.chip.name):
        yield machine
