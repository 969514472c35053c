"""Time what a newcomer does, from an empty folder to experts on two ranks.

    python tools/newcomers_path.py [--folder DIR]

Programs are those of docs/getting_started.md and of the gallery, run in a new environment without the checkout in
sight. A step that fails ends the run with its output.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOOP = "for step in range(41):\n"


def programs() -> list[str]:
    """Return the programs of the page for newcomers."""
    page = (ROOT / "docs" / "getting_started.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def compiled(program: str) -> str:
    """Return the first program as the page says to compile it, with one step."""
    before, loop, after = program.partition(LOOP)
    assert loop
    return f"{before}layer = torch.compile(layer, fullgraph=True)\nfor step in range(1):\n{after}"


def prepare(folder: Path) -> dict[str, list[str]]:
    """Write the programs into ``folder``, and return each step's command."""
    own, transformers, *_ = programs()
    (folder / "first.py").write_text(own)
    (folder / "compiled.py").write_text(compiled(own))
    (folder / "transformers_model.py").write_text(transformers)
    for name in ("lora_gpt_oss.py", "expert_parallel.py"):
        shutil.copy(ROOT / "examples" / name, folder)
    bin = folder / "env" / "bin"
    python, constraints = str(bin / "python"), "checkout/constraints.txt"
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    return {
        "clone": ["git", "clone", "--quiet", str(ROOT), "checkout"],
        "install": [*install, "./checkout"],
        "ready?": [python, "-m", "tgl.doctor"],
        "first program": [python, "first.py"],
        "first compiled step": [python, "compiled.py"],
        "install transformers and peft": [*install, "transformers", "peft"],
        "transformers": [python, "transformers_model.py"],
        "LoRA": [python, "lora_gpt_oss.py"],
        "expert parallel, 2 ranks": [str(bin / "torchrun"), "--nproc-per-node", "2", "expert_parallel.py"],
    }


def follow(folder: Path) -> None:
    """Run every step in ``folder``, and print its seconds."""
    venv.create(folder / "env", with_pip=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    began = time.monotonic()
    steps = prepare(folder)
    for name, command in steps.items():
        start = time.monotonic()
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"{name}: {' '.join(command)}\n{run.stdout[-2000:]}{run.stderr[-4000:]}")
        print(f"{name:32}{time.monotonic() - start:7.1f} s", flush=True)
    print(f"{f'{len(steps)} commands':32}{time.monotonic() - began:7.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="empty, and kept; otherwise a temporary one")
    folder = parser.parse_args().folder
    if folder:
        folder.mkdir(parents=True)
        return follow(folder.resolve())
    with tempfile.TemporaryDirectory() as temporary:
        follow(Path(temporary))


if __name__ == "__main__":
    main()
