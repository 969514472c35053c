"""Links of README and docs lead to something, and every public name has its place in the API reference."""

import importlib
import inspect
import pkgutil
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted(p.relative_to(ROOT) for p in ROOT.glob("docs/**/*.md"))
PAGES = [*map(Path, ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *DOCS]
API = "\n".join(p.read_text() for p in ROOT.glob("docs/api/*.md"))
PACKAGES = ("tgl", "tgl.tensor", "tgl.recipes", "tgl.distributed", "tgl.testing", "cute_emulator")
# Modules of which a page lists members, and what only the emulator's own tests use.
ELSEWHERE = {"tgl.backends", "tgl.recipes", "cute_emulator.active"}


@lru_cache
def text_of(page: Path) -> str:
    """The page without its code."""
    return re.sub(r"^( *)(`{3,}).*?^ *\2", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as Python-Markdown and GitHub make it for a heading that occurs once."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"``.+?``|`[^`\n]+`(?!\])", "", text_of(page)))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links(page):
    for link in links(page):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} leads nowhere"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", text_of(target.relative_to(ROOT)), re.MULTILINE)
            assert fragment in map(anchor, headings), f"{link}: no such heading"


def test_links_are_found():
    assert len(links(Path("README.md"))) >= 10
    assert "training.md#transforms-of-torchfunc" in links(Path("docs/support.md"))


def test_every_page_but_the_notes_is_in_the_navigation():
    navigation = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    pages = (p.relative_to("docs") for p in PAGES if p.parts[0] == "docs")
    assert sorted(navigation) == sorted(str(p) for p in pages if p.parts[0] != "notes")


REFERENCE = re.findall(r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", API, re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package):
    pytest.importorskip("numpy")
    module = importlib.import_module(package)
    shown = [pkgutil.resolve_name(path) for path, _ in REFERENCE]
    for name in module.__all__:
        if f"{package}.{name}" not in ELSEWHERE:
            assert any(getattr(module, name) is value for value in shown), f"{package}.{name} is on no page of docs/api"


def test_the_reference_shows_what_its_headings_name():
    for path, heading in REFERENCE:
        value = pkgutil.resolve_name(path)
        if heading:
            package, name = heading.rsplit(".", 1)
            assert getattr(importlib.import_module(package), name) is value
        elif inspect.isfunction(value):
            # Where a module has the name of its function, `tgl.name` is the module to a reader of the source.
            assert value.__module__.rsplit(".", 1)[1] != value.__name__, f"{path}: give the path of the definition"
