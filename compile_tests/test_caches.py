"""Compiled graphs on disk: a second process takes what the first one compiled, by PyTorch's own counters."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiler_settings import GRAPHS

OF_OPS = """
offs = torch.tensor([3, 8], dtype=torch.int32)

@torch.compile(fullgraph=True, dynamic=True)
def loss(x, w1, w2):
    return tgl.grouped_mlp(x, w1, w2, offs)[0].square().mean()

step = lambda: loss(*(torch.randn(*size, requires_grad=True) for size in ((10, 16), (2, 16, 64), (2, 32, 16))))
"""
OF_A_LAYER = """
import torch._functorch.config
torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
layer = tgl.MoE(3, 32, 64, recipe=tgl.recipes.Float8CurrentScaling())

@torch.compile(fullgraph=True)
def loss(x, chosen, weights):
    return layer(x, chosen, weights).square().mean()

step = lambda: loss(torch.randn(20, 32), torch.randint(3, (20, 2)), torch.rand(20, 2))
"""
RUN = """
import torch, tgl
from torch._dynamo.utils import counters
torch.set_num_threads(1)
{}
step().backward()
print(dict(counters["aot_autograd"] | counters["inductor"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("graph", [OF_OPS, OF_A_LAYER], ids=["ops", "layer"])
def test_a_second_process_compiles_nothing(graph, tmp_path):
    caches = {**GRAPHS, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment = {**os.environ, **caches}

    def run():
        command = [sys.executable, "-c", RUN.format(graph)]
        root = Path(__file__).parents[1]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        counted = ast.literal_eval(done.stdout)
        names = ("autograd_cache_miss", "autograd_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_hit")
        return [counted.get(name, 0) for name in names]

    assert run() == [1, 0, 2, 0]
    assert run() == [0, 1, 0, 2]
