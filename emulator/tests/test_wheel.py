"""A wheel of the package holds the C source that is compiled on first use, and asks for nothing of the repository's."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("cute_emulator", "pyproject.toml", "README.md", "LICENSE")


def test_a_wheel(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for part in PARTS:  # a copy, since a build leaves files behind
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, source / part)
    command = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    done = subprocess.run([*command, tmp_path, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {"cute_emulator/py.typed", "cute_emulator/shim.c"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "tgl" not in "".join(line for line in metadata.splitlines() if line.startswith("Requires-Dist"))
