"""A package of AOTInductor: it runs a model in any process that has imported ``tgl``, which registers the ops."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tgl

RUN = """
import sys, torch
if sys.argv[2] == "with":
    import tgl
x, expected = torch.load(sys.argv[1] + "/values.pt")
model = torch._inductor.aoti_load_package(sys.argv[1] + "/model.pt2")
for tokens, y in zip(x, expected):
    torch.testing.assert_close(model(tokens), y)
"""


class Model(torch.nn.Module):
    """A router and its experts."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = torch.nn.Linear(16, 3), tgl.MoE(3, 16, 32)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return self.experts(x, chosen, weights)


@pytest.mark.slow
@torch.no_grad()
def test_a_package_runs_where_the_ops_are_registered(tmp_path):
    model, inputs = Model().eval(), [torch.randn(tokens, 16) for tokens in (20, 55)]
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    exported = torch.export.export(model, (inputs[0],), dynamic_shapes=({0: tokens},))
    torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    torch.save((inputs, [model(x) for x in inputs]), tmp_path / "values.pt")

    def run(tgl_is):
        command = [sys.executable, "-c", RUN, tmp_path, tgl_is]
        return subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)

    done = run("with")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Could not find schema for tgl::route" in run("without").stderr
