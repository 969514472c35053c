"""What ``import tgl`` loads beyond torch, and what is there all the same."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("sympy", "triton", "torch._dynamo", "torch._inductor", "cutlass", "transformers", "numpy", "platformdirs")


def run(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_nothing_heavy_is_imported():
    code = """
import sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import tgl
print(time.perf_counter() - start, *sorted(set(sys.modules) - before))
"""
    seconds, *loaded = run(code).split()
    assert not set(HEAVY) & set(loaded)
    assert float(seconds) < 5, "a fraction of a second on a machine with nothing else to do"


@pytest.mark.parametrize(
    "imports",
    ["import torch, tgl; import torch.utils.flop_counter", "import torch.utils.flop_counter; import torch, tgl"],
    ids=["before", "after"],
)
def test_flop_formulas_are_there_whoever_comes_first(imports):
    code = f"""
{imports}
with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
    tgl.grouped_gemm(torch.ones(6, 4), torch.ones(2, 4, 8), torch.tensor([3, 6], dtype=torch.int32))
print(counter.get_total_flops())
"""
    assert run(code) == f"{2 * 6 * 4 * 8}\n"
