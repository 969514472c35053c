"""The README of a package index has no relative link."""

import re
import sys

import pytest

from tools import index_readme


def test_every_link_is_absolute(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["index_readme.py", "https://example.org/tgl/"])
    index_readme.main()
    own, made = (index_readme.ROOT / "README.md").read_text(), capsys.readouterr().out
    before, after = (re.findall(r"\]\(([^)]+)\)", text) for text in (own, made))
    assert after == [link if ":" in link or link[0] == "#" else f"https://example.org/tgl/{link}" for link in before]
    assert all((index_readme.ROOT / link.split("#")[0]).exists() for link in before if ":" not in link)
    assert "](docs/index.md)" in own


def test_an_address_is_needed(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["index_readme.py", "example.org"])
    with pytest.raises(SystemExit, match="ADDRESS"):
        index_readme.main()
