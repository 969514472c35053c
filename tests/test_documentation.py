"""Every Python example of README and docs runs as printed, most in a process of their own."""

import re
import socket
import textwrap
from pathlib import Path

import pytest

from tests.processes import run_script

ROOT = Path(__file__).parents[1]
# Pages whose examples are run, and their results looked at, by a test of their own.
ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "docs/grouped_tensor.md": "tests/tensor/test_documentation.py",
    "docs/moe_layer.md": "tests/integrations/test_layer_state_dicts.py",
    "docs/torchtitan.md": "tests/integrations/test_torchtitan.py",
    "docs/training.md": "tests/test_training_page.py",
    "docs/vllm.md": "tests/integrations/test_vllm.py",
}


def examples(page):
    found = re.findall(r"^( *)```python\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]
EXAMPLES = [(page, i) for page in PAGES if page not in ELSEWHERE for i in range(len(examples(page)))]


def test_no_page_is_left_out():
    for page, test in ELSEWHERE.items():
        assert examples(page)
        assert f'"{Path(page).name}"' in (ROOT / test).read_text() or page in (ROOT / test).read_text()
    assert {page for page, _ in EXAMPLES} | set(ELSEWHERE) == {page for page in PAGES if examples(page)}


def test_code_fits_its_column():
    """In a window of 1440 pixels, with the font size of docs/site.css."""
    for page in PAGES:
        if not page.startswith("docs/notes/"):
            assert not [line for code in examples(page) for line in code.splitlines() if len(line) > 115], page


@pytest.mark.parametrize("page, number", EXAMPLES, ids=lambda v: str(v))
def test_example(page, number, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(examples(page)[number])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    status, printed = run_script(script, one_rank, timeout=500)
    assert status == 0, printed[-3000:]
