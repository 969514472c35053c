"""``benchmarks/warp_gpu.py`` on a CPU, and its ceiling on the emulator."""

import pytest
import torch

from tests.benchmarks.stand_in import ran
from tests.cutlass_kernels import sass
from tgl.cutlass_kernels.archs import ARCHS
from tgl.testing import emulate

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")


@pytest.mark.parametrize("loads", ["lanes", "tma"])
def test_arms(loads, gpu, load, monkeypatch, tmp_path, capsys):
    script, shapes = gpu("warp_gpu"), load("harness.shapes")
    monkeypatch.setitem(shapes.SHAPES, "four", shapes.Shape(4, 96, 64, 48))
    monkeypatch.setattr(script, "quack", lambda: None)
    places, groups = [], []
    monkeypatch.setattr(script, "ceiling", lambda flops, place: lambda: None)
    plain = script.OPS["fprop"].tgl

    def tgl(problem):
        places.append((ARCHS["sm_90"].folder, getattr(ARCHS["sm_90"].tilings, "tma", None)))
        groups.append((problem.shape.groups, tuple(problem.sizes)))
        return plain(problem)

    monkeypatch.setattr(script.OPS["fprop"], "tgl", tgl)
    lines, found = ran(script, tmp_path, capsys, "--shapes", "four", "--routings", "zipf", "--loads", loads)
    arms = {"tgl", "other", "ceiling", "dense", "wide"}
    assert [(r["op"], r["loads"], set(r["ms"])) for r in found] == [(op, loads, arms) for op in script.GEMMS]
    assert ["four", "fprop", "zipf", "1.000", "0", "TF/s", "1.000", "1.000", "1.000", "-", "1.000"] in lines
    assert set(places) == {("mma_sync", False), ("mma_sync", True), ("sm90", None)}
    assert places[0] == ("mma_sync", loads == "tma")
    assert {sizes for count, sizes in groups if count == 1} == {(96,)}
    assert {("mma_sync", loads == "tma")} == {p for p, (count, _) in zip(places, groups, strict=True) if count == 1}
    assert ARCHS["sm_90"].folder == "sm90"


def test_the_ceiling_multiplies_all_that_it_says(load):
    ceiling = load("harness.warp_ceiling")
    turns, blocks = 3, 2
    with emulate("sm_90", detect_races=False) as machine:
        kernel = ceiling.build("sm_90")
        out = torch.zeros(blocks * ceiling.THREADS)
        kernel(out, turns, blocks)
        assert machine.launches[-1].mma_flops == turns * blocks * ceiling.TURN
    assert torch.equal(out.unique(), torch.tensor([turns * 16.0 * 128 / 2]))  # half of A is ones
    if sass.nvdisasm() is not None:
        report = sass.inspect(kernel.artifacts.CUBIN)
        assert (report.spills, report.frame) == (0, 0)
        assert report.count("HMMA") == 32
