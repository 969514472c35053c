"""Run CuTe DSL kernels for Hopper and Blackwell on a CPU, and find their bugs.

    with emulate("sm_100a", seed=0) as machine:
        f = cute.compile(kernel, ...)
        f(cpu_tensor, ...)
    print(machine.launches[-1].mma_flops)

The PTX that the DSL compiles is executed instruction by instruction. See ``emulate`` and ``sweep``, and ``Ranks`` for
kernels of several GPUs; everything a kernel does wrong is an ``EmulatorError``. Needs numpy, nvidia-cutlass-dsl and,
once, a C compiler.
"""

from .errors import DeadlockError, EmulatorError, MemoryAccessError, RaceError, SyncError, UnsupportedError
from .ranks import Ranks, Symmetric
from .runtime import Emulation, LaunchRecord, active, emulate, sweep

__all__ = [
    "DeadlockError", "Emulation", "EmulatorError", "LaunchRecord", "MemoryAccessError", "RaceError", "Ranks",
    "Symmetric", "SyncError", "UnsupportedError", "active", "emulate", "sweep",
]  # fmt: skip
