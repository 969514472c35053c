"""Kernels stored by ``python -m tgl.warmup``: a job's first step on a device takes them from disk and compiles none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.device import DEVICE
from tgl import backends

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
BLOCK = "experts=4,hidden=64,ffn=128,tokens=50,top_k=2"
PRODUCTS = "tests.cutlass_kernels.test_stored_kernels:drop_in_step"

JOB = """
import sys
import torch, tgl
from tests.cutlass_kernels import test_stored_kernels as steps
from tgl.cutlass_kernels.register import LAUNCHERS
from tgl.cutlass_kernels.runtime import cache, launcher
from tgl.integrations import torch as drop_in

cache.set_directory(sys.argv[1])
for each in LAUNCHERS:
    each.build = None  # a kernel that is not on disk would need it
with torch.device("cuda"):
    steps.real_step(steps.BlockStep(**steps.SIZES))
drop_in.enable()
steps.product_step("cuda")
torch.cuda.synchronize()
print(len(launcher.compiled_kernels))
"""


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_a_first_step_compiles_nothing(tmp_path):
    run("-m", "tgl.warmup", "--chip", backends.device_arch(DEVICE), "--directory", tmp_path, BLOCK, PRODUCTS)
    stored = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")}
    assert stored
    assert int(run("-c", JOB, tmp_path)) > 0
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")} == stored
