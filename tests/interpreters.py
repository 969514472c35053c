"""Interpreters that have imported torch and nothing else, for code that imports tgl as a user does.

They are forks of one, as importing torch takes longer than what most of them run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

SERVER = """
import json, os, sys, traceback
import torch

def run(code, folder, arguments):
    os.chdir(folder)
    sys.argv[:] = ["-c", *arguments]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        return stop.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    *request, files = json.loads(line)
    child = os.fork()
    if not child:
        for stream, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
        status = run(*request)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Done(NamedTuple):
    """The exit status of a run, negative for a signal, and its output."""

    returncode: int
    stdout: str
    stderr: str


_servers: list[subprocess.Popen[str]] = []


def run(code: str, *, folder: Path | None = None, arguments: Sequence[Any] = ()) -> Done:
    """Run code in an interpreter where torch is imported already.

    Args:
        code: what ``python -c`` would get.
        folder: to run it in; by default the current one.
        arguments: of the command line.
    """
    if not _servers:
        _servers.append(
            subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    (server,) = _servers
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as kept:
        files = [os.path.join(kept, name) for name in ("stdout", "stderr")]
        request = [code, str(folder or os.getcwd()), [str(a) for a in arguments], files]
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return Done(int(server.stdout.readline()), *(Path(file).read_text() for file in files))
