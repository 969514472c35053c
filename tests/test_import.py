"""Modules that ``import tgl`` loads besides torch, and names that exist all the same."""

import pytest

from tests import interpreters

HEAVY = {
    *("sympy", "triton", "torch._dynamo", "torch._inductor"),
    *("cutlass", "transformers", "numpy", "platformdirs", "hypothesis", "tgl.testing.opcheck"),
}


def run(code):
    done = interpreters.run(code)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_nothing_heavy_is_imported():
    code = """
import sys, time
import torch
before, start = set(sys.modules), time.process_time()
import tgl
print(time.process_time() - start, *sorted(set(sys.modules) - before))
"""
    seconds, *loaded = run(code).split()
    assert not HEAVY & set(loaded)
    assert float(seconds) < 5, "a fraction of a second on a machine with nothing else to do"


def test_submodules_are_imported_on_first_use():
    code = """
import sys, tgl
lazy = ("tgl.distributed", "tgl.integrations", "tgl.optim", "tgl.testing")
assert not [name for name in lazy if name in sys.modules]
assert {"moe", "MoELayer", "integrations", "optim", "__version__"} <= set(dir(tgl))
assert not [name for name in dir(tgl) if name.startswith("_") and name != "__version__"]
assert all(hasattr(tgl, name) for name in dir(tgl))
tgl.integrations.torch.enable(["cpu"])
assert dir(tgl.integrations) == ["peft", "torch", "torchtitan", "transformers", "transformers_parallel", "vllm"]
print(tgl.integrations.torch.served(), tgl.optim.Muon.__name__, tgl.distributed.ExpertParallelMLP.__name__)
for module in (tgl, tgl.integrations):
    try:
        module.nothing
    except AttributeError as error:
        print(error)
"""
    wanted = ["('cpu',) Muon ExpertParallelMLP"]
    wanted += [f"module '{name}' has no attribute 'nothing'" for name in ("tgl", "tgl.integrations")]
    assert run(code).splitlines() == wanted


def test_a_missing_package_is_named():
    code = """
import sys
sys.modules.update(torchtitan=None)
import tgl
for call in (tgl.integrations.torchtitan.converter, lambda: tgl.integrations.torchtitan.grouped_experts(None)):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    lines = run(code).splitlines()
    assert len(lines) == 2
    assert all(line.startswith("tgl.integrations.torchtitan needs torchtitan 0.3") for line in lines)


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
