"""Imports of the process that others are forked from: an interpreter takes seconds for them.

All of it stays out of garbage collections, which find nothing there, and out of the emulator's search for the tensors
of a launch, which goes over every object that collections see.
"""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress

from tests import compiler_settings

compiler_settings.leave_guards_untimed()
for module in (
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "cutlass.cute",
    "cute_emulator",
    "tgl.distributed",
):
    with suppress(ImportError):  # not on every platform
        importlib.import_module(module)

gc.set_threshold(50_000, 20, 10)
gc.collect()
gc.freeze()
