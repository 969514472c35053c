"""Inductor's caches while tests run, as variables of the environment, which processes that tests start inherit."""

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
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # otherwise every process starts workers of its own
