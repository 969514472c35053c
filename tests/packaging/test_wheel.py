"""A wheel of the checkout, in an environment that has what pip installs on macOS or Windows, and nothing else."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tgl

ROOT = Path(__file__).parents[2]
PARTS = ("tgl", "pyproject.toml", "README.md", "LICENSE")  # what a wheel is made from
PLATFORMS = {
    "macOS": {"sys_platform": "darwin", "platform_system": "Darwin"},
    "Windows": {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt"},
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Made of a copy: building in the checkout leaves files that the next wheel would hold."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        whole = ROOT / part
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(whole, source / part, ignore=ignored) if whole.is_dir() else shutil.copy(whole, source / part)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", made, source)
    (path,) = made.iterdir()
    return path


def pip(*arguments):
    run = subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


def requirements(lines, environment):
    """The names among the lines of a metadata file that an environment without extras requires."""
    asked = (Requirement(line) for line in lines)
    return {r.name for r in asked if r.marker is None or r.marker.evaluate({"extra": "", **environment})}


def closure(names, environment):
    """Return the distributions ``names`` of this environment, and all that they require."""
    found = {}
    while names:
        name = names.pop()
        found[name] = importlib.metadata.distribution(name)
        names |= requirements(found[name].requires or (), environment) - set(found)
    return found


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        return importlib.metadata.PathDistribution(zipfile.Path(archive, name).parent).metadata


def environment_without(wheel, platform, where):
    """The Python of a new environment with the wheel and what it requires on a platform, which is linked."""
    venv.create(where, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(where)}))
    for distribution in closure(requirements(metadata(wheel).get_all("Requires-Dist"), platform), platform).values():
        for top in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(distribution.locate_file(top)).resolve())
    pip("install", "--no-deps", "--target", site, wheel)
    return where / "bin" / "python"


def test_a_wheel_has_what_pip_and_an_index_ask_for(wheel):
    found = metadata(wheel)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert found["Version"] == tgl.__version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.10"
    assert {"Typing :: Typed", "Operating System :: OS Independent"} <= set(found.get_all("Classifier"))
    with zipfile.ZipFile(wheel) as archive:
        assert "tgl/py.typed" in archive.namelist()


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=PLATFORMS)
def test_what_is_required_beyond_linux(wheel, platform):
    asked = metadata(wheel).get_all("Requires-Dist")
    assert requirements(asked, platform) == {"torch", "filelock", "platformdirs"}
    linux = {"sys_platform": "linux", "platform_system": "Linux"}
    assert requirements(asked, linux) - requirements(asked, platform) == {"nvidia-cutlass-dsl", "apache-tvm-ffi"}


def test_a_wheel_without_the_kernels_compiler(wheel, tmp_path):
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = environment_without(wheel, PLATFORMS["macOS"], tmp_path / "environment")

    def run(*arguments):
        done = subprocess.run([python, *arguments], cwd=tmp_path, env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    # ``make wheel`` compiles by Inductor, whose headers alone take seconds in a new environment.
    assert str(tmp_path / "environment") in run(Path(__file__).with_name("user.py"), "aot_eager")
    report = run("-m", "tgl.doctor", "--ops")
    assert "kernels cannot be compiled: this needs the package nvidia-cutlass-dsl" in report
    assert "grouped_gemm " in report
