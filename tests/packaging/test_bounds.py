"""The least version that the metadata lets in is the oldest one that is tested."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_of_transformers():
    """``make test-transformers`` takes the oldest release by default."""
    tested = re.search(r"^RELEASE \?= (\d+\.\d+)\.\d+$", (ROOT / "Makefile").read_text(), re.M)
    bounds = re.findall(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert tested
    assert len(bounds) >= 3  # for transformers' models, for adapters, for the tests
    assert set(bounds) == {tested[1]}
