"""Settings of torch.compile while tests run: its caches, and nothing that is for profilers and logs.

All but one are variables of the environment, which processes that tests start inherit.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

# Keys of cached graphs ignore a custom op's schema, tags and fake: after a change, stale code would run.
NO_GRAPHS = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
GRAPHS = dict.fromkeys(NO_GRAPHS, "1")


def set_up() -> None:
    """Keep C++ kernels, whose keys are their source and flags: compiling them takes most of a compiled test's time.

    With ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`` these are compiled every time, too.
    """
    folder = Path(tempfile.gettempdir()) / f"tgl_tests_{getpass.getuser()}" / f"torch_{version('torch')}"
    os.environ.update(NO_GRAPHS)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # believe the CPU's flags; trying them out costs a compilation
    os.environ["AOT_INDUCTOR_ENABLE_LINE_TABLES"] = "0"  # for profilers; a seventh of the time of a C++ kernel
    os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"  # Python collects often enough by itself
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # otherwise every process starts workers of its own


def leave_guards_untimed() -> None:
    """Keep Dynamo, before it is imported, from timing every graph's guards for its log.

    It writes over the processor's caches beforehand, which takes longer than to trace a small function.
    """
    import torch

    torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0
