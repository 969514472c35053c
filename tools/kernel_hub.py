"""Lays the package out as a kernel repository of the Hugging Face Hub::

    python -m tools.kernel_hub DIRECTORY

``DIRECTORY/build`` then holds the variants of a kernel in pure Python, ``torch-cpu`` and ``torch-cuda``: the package
itself, and a ``metadata.json`` that says what the variant needs. The library ``kernels`` loads it by
``get_local_kernel``, or by ``get_kernel`` from the Hub.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import tgl
from tgl.cutlass_kernels.archs import chips

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tgl"
MAJOR = int(tgl.__version__.split(".")[0])

# What a variant says of itself: the GPUs that it is for, and what the library is to ask for before it is loaded.
VARIANTS: dict[str, dict[str, Any]] = {
    "torch-cpu": {"python-depends": [], "backend": {"type": "cpu"}},
    "torch-cuda": {
        "python-depends": ["nvidia-cutlass-dsl", "tvm-ffi"],
        "backend": {"type": "cuda", "archs": [f"{chip[3:-1]}.{chip[-1]}" for chip in chips()]},
    },
}


def lay_out(destination: Path) -> None:
    """Write every variant below ``destination / "build"``, which must not exist."""
    for name, particulars in VARIANTS.items():
        variant = destination / "build" / name
        shutil.copytree(PACKAGE, variant, ignore=shutil.ignore_patterns("__pycache__"))
        metadata = {
            "name": "tgl",
            "id": "tgl",  # the name of the module, and of the namespace of its ops
            "version": MAJOR,
            "license": "Apache-2.0",
            **particulars,
            "digest": {"algorithm": "sha256", "files": digests(variant)},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    for name in ("LICENSE", "README.md"):
        shutil.copy(ROOT / name, destination / name)


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file, in base64, by its path below ``folder``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in files
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="where to write it; its `build` must not exist")
    lay_out(parser.parse_args().directory)
