"""Processes that are forked from one that has imported torch and tgl, and scripts that run in such a process.

The imports take an interpreter longer than most scripts run. Everything here is forked from the same process, as
there can be only one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])


def run_script(script: Path, environment: Mapping[str, str], timeout: float) -> tuple[int | None, str]:
    """Run a Python file as ``__main__``; return its exit status, None after ``timeout`` seconds, and what it printed.

    Args:
        script: the file; what it prints is stored beside it.
        environment: variables beyond those of the first process that called this.
        timeout: seconds after which the process is ended.
    """
    log = script.with_suffix(".log")
    process = FORKS.Process(target=_main, args=(script, dict(environment), log))
    process.start()
    process.join(timeout)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    return status, log.read_text()


def _main(script: Path, environment: dict[str, str], log: Path) -> None:
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv[:] = [str(script)]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
