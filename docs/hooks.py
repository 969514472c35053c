"""MkDocs hooks: links of the pages that the site alone can have.

A page links to a script, a result file or a page elsewhere in the repository by its relative path, which works wherever
the repository is read. The site holds nothing but ``docs/``, so every such file gets a page that shows it, and the
links lead there, those of such pages too.
A public name in code, such as ``tgl.explain(op)``, becomes a link to its entry in the API reference.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
LANGUAGES = {
    ".py": "python",
    ".json": "json",
    ".sh": "bash",
    ".toml": "toml",
    ".yml": "yaml",
    ".txt": "text",
    "": "text",
}
ROOT = Path(__file__).resolve().parents[1]
NEWCOMERS = {"getting_started.md", "support.md", "benchmarks/index.md"}  # how to begin, which GPU, how fast

ENTRY = re.compile(r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", re.MULTILINE)
NAME = re.compile(r"(?<!\[)`((?:tgl|cute_emulator)(?:\.\w+)+)(\([^`\n]*\))?`")
ENTRIES: dict[str, str] = {}  # public name to the identifier of its entry


def target(page: str, link: str) -> str | None:
    """Return the path in the repository that ``link`` of a page leads to, or None if MkDocs follows it by itself.

    Args:
        page: its path in the repository, as of the result.
    """
    if "://" in link:
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    within = is_page(page) and is_page(path)
    return None if within or not (ROOT / path).exists() else path


def is_page(path: str) -> bool:
    """Return whether MkDocs has a page of ``path`` by itself: dated notes are left out of navigation and search."""
    return path.startswith("docs/") and not (path + "/").startswith("docs/notes/")


def page_of(path: str) -> str:
    """Return the site's page of a path in the repository."""
    if is_page(path):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def links_of(page: str, text: str) -> set[str]:
    found = {target(page, link) for _, link, _ in LINK.findall(text)}
    return {path for path in found if path is not None and not is_page(path)}


def listing(path: str) -> str:
    """Return Markdown that shows a file, or links to the files of a folder."""
    if path.endswith(".md"):
        return (ROOT / path).read_text()
    if (ROOT / path).is_dir():
        names = [p.name for p in sorted((ROOT / path).iterdir()) if p.is_file()]
        return f"# `{path}`\n\n" + "\n".join(f"- [`{name}`]({Path(path).name}/{name}.md)" for name in names)
    return f"# `{path}`\n\n``````{LANGUAGES[Path(path).suffix]}\n{(ROOT / path).read_text()}\n``````\n"


def found_by_search(page: str) -> dict[str, bool | int]:
    """Return what the search plugin does with a page: a newcomer's pages and guides first, sources never."""
    if page.startswith("source/"):
        return {"exclude": True}
    if page in NEWCOMERS:
        return {"boost": 5}
    return {"boost": 1 if page.startswith(("api/", "benchmarks/")) else 3}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    linked: set[str] = set()
    for file in files.documentation_pages():
        if file.src_uri.startswith("api/"):
            ENTRIES.update({heading or path: path for path, heading in ENTRY.findall(file.content_string)})
        linked |= links_of(f"docs/{file.src_uri}", file.content_string)
    pages = [path for path in linked if path.endswith(".md")]
    while pages:
        page = pages.pop()
        fresh = links_of(page, listing(page)) - linked
        linked |= fresh
        pages += [path for path in fresh if path.endswith(".md")]
    for folder in [path for path in linked if (ROOT / path).is_dir()]:
        linked |= {f"{folder}/{p.name}" for p in (ROOT / folder).iterdir() if p.is_file()}
    for path in sorted(linked):
        files.append(File.generated(config, page_of(path), content=listing(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    page.meta["search"] = found_by_search(here)
    shown = here.removeprefix("source/")  # the path in the repository of a page from elsewhere
    listed = shown != here and not (ROOT / shown).exists()

    def to_site(found: re.Match[str]) -> str:
        path = None if listed else target(shown if shown != here else f"docs/{here}", found[2])
        if path is None:
            return found[0]
        return found[1] + posixpath.relpath(page_of(path), posixpath.dirname(here) or ".") + found[3]

    def to_entry(found: re.Match[str]) -> str:
        return f"[{found[0]}][{ENTRIES[found[1]]}]" if found[1] in ENTRIES else found[0]

    lines, code = [], False
    for line in LINK.sub(to_site, markdown).split("\n"):
        code ^= line.lstrip().startswith("```")
        lines.append(line if code or line.startswith(("#", ":::")) else NAME.sub(to_entry, line))
    return "\n".join(lines)
