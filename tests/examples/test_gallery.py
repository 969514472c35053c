"""The short examples of docs/examples.md run, and train."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/examples.md").read_text()
SHORT = [
    "language_model",
    "lora_gpt_oss",
    "expert_parallel",
    "export_and_package",
    "custom_kernel",
    "custom_activation",
]


def test_the_page_lists_every_example_and_the_short_ones_are_short():
    files = {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"}
    assert set(re.findall(r"\.\./examples/(\w+)\.py", PAGE)) == files
    for name in SHORT:
        assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) <= 80, name


def test_a_language_model_learns():
    from examples import language_model

    first, *_, last = language_model.main(steps=8)
    assert last < first - 1.5


def test_adapters_learn():
    pytest.importorskip("peft")
    from examples import lora_gpt_oss

    losses = lora_gpt_oss.main(steps=4)
    assert losses[-1] < losses[0] - 0.3


def test_a_custom_kernel_serves(capsys):
    from examples import custom_kernel

    custom_kernel.main()
    assert "grouped_dbias" in capsys.readouterr().out


def test_a_layer_is_exported():
    from examples import export_and_package

    export_and_package.main(package=False)


@pytest.mark.slow
def test_a_layer_is_packaged():
    from examples import export_and_package

    export_and_package.main()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_custom_activation(backend):
    from examples import custom_activation

    custom_activation.main(backend)


def test_experts_on_one_rank(tmp_path):
    script = tmp_path / "example.py"
    script.write_text("from examples.expert_parallel import main\nlosses = main()\nassert losses[-1] < losses[0] / 2\n")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    status, printed = run_script(script, rank, timeout=300)
    assert status == 0, printed[-3000:]


@pytest.mark.slow
def test_experts_on_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "examples.expert_parallel"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=True)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run.stdout)]
    assert losses[-1] < losses[0] / 2
