"""The least version that the metadata lets in is the oldest one that is tested."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_of_transformers():
    """``make test-slice`` alternates between the releases, and the oldest of them is the lower bound of the package."""
    makefile = (ROOT / "Makefile").read_text()
    tested = re.search(r"^RELEASES \?= (\d+\.\d+)\.\d+ ", makefile, re.M)
    assert (
        "$(MAKE) test-transformers-$(RELEASE_OF_SLICE)" in makefile.partition("\ntest-slice: ")[2].partition("\n\n")[0]
    )
    bounds = re.findall(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert tested
    assert len(bounds) >= 3  # for transformers' models, for adapters, for the tests
    assert set(bounds) == {tested[1]}
