"""The layout of a kernel repository, loaded by path as the library ``kernels`` does (``make hub`` loads it by that)."""

import json

import pytest

from tests import interpreters
from tools import kernel_hub

LOAD = """
import importlib.util, json, pathlib, sys
import torch
variant = pathlib.Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
import tgl.doctor
ends = torch.tensor([3, 6], dtype=torch.int32)
assert torch.ops.tgl.grouped_gemm(torch.ones(6, 4), torch.ones(2, 4, 8), ends).sum() == 6 * 8 * 4
print(tgl.doctor.__file__)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    made = tmp_path_factory.mktemp("repository")
    kernel_hub.lay_out(made)
    return made


def test_a_variant_is_loaded_by_path(repository, tmp_path):
    variant = repository / "build" / "torch-cpu"
    done = interpreters.run(LOAD, folder=tmp_path, arguments=[variant])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == f"{variant / 'doctor.py'}\n"


def test_a_variant_says_what_it_is(repository):
    found = {path.name: json.loads((path / "metadata.json").read_text()) for path in (repository / "build").iterdir()}
    assert set(found) == {"torch-cpu", "torch-cuda"}
    assert found["torch-cuda"]["backend"]["archs"][:4] == ["8.0", "8.6", "8.9", "9.0"]
    for name, metadata in found.items():
        present = {p.relative_to(repository / "build" / name) for p in (repository / "build" / name).rglob("*.*")}
        assert {str(p) for p in present} == {*metadata["digest"]["files"], "metadata.json"}
    assert (repository / "LICENSE").exists()
