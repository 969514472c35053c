"""The former place of the emulator, which is the package ``cute_emulator`` now."""

import warnings

from .emulation import emulate, sweep  # isort: skip (first, for its error where the package is missing)
from cute_emulator import (
    DeadlockError,
    Emulation,
    EmulatorError,
    LaunchRecord,
    MemoryAccessError,
    RaceError,
    SyncError,
    UnsupportedError,
    active,
)

warnings.warn(
    "tgl.testing.emulator is deprecated: take emulate and sweep from tgl.testing, all else from cute_emulator",
    DeprecationWarning,
    stacklevel=2,
)

__all__ = [
    "DeadlockError", "Emulation", "EmulatorError", "LaunchRecord", "MemoryAccessError", "RaceError", "SyncError",
    "UnsupportedError", "active", "emulate", "sweep",
]  # fmt: skip
