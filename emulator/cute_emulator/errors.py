"""Exceptions of the kernel emulator. Every report is one of these; anything else is a defect of the emulator."""


class EmulatorError(RuntimeError):
    """A kernel did something the hardware forbids, or the emulator cannot run it. Base class of all reports."""


class UnsupportedError(EmulatorError):
    """An instruction, a modifier or a descriptor field that the emulator does not model. Never guessed at."""


class MemoryAccessError(EmulatorError):
    """An access out of bounds, misaligned, of memory never written, or without the proxy fence it needs."""


class RaceError(EmulatorError):
    """Two accesses, one of them a write, with no synchronisation that orders them; in this run or in any other."""


class SyncError(EmulatorError):
    """Misuse of a barrier, an mbarrier or a collective: too many arrivals, wrong transaction bytes, a CTA that left."""


class DeadlockError(EmulatorError):
    """No warp can make progress; the message lists who waits on what."""
