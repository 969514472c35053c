"""MkDocs hooks: links of the pages that the site alone can have.

A page links to a script or a result file of the repository by its relative path, which works wherever the repository is
read. The site holds nothing but ``docs/``, so every such file gets a page that shows it, and the links lead there.
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

ENTRY = re.compile(r"^::: (\S+)(?:\n    options:\n      heading: (\S+))?", re.MULTILINE)
NAME = re.compile(r"(?<!\[)`(tgl(?:\.\w+)+)(\([^`\n]*\))?`")
ENTRIES: dict[str, str] = {}  # public name to the identifier of its entry


def target(page: str, link: str) -> str | None:
    """The path in the repository, if ``link`` of ``docs/<page>`` leaves ``docs/`` for something that exists."""
    if "://" in link:
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") or not (ROOT / path).exists() else path


def page_of(path: str) -> str:
    return f"source/{path}.md"


def listing(path: str) -> str:
    """Markdown that shows a file, or links to the files of a folder."""
    if (ROOT / path).is_dir():
        names = [p.name for p in sorted((ROOT / path).iterdir()) if p.is_file()]
        return f"# `{path}`\n\n" + "\n".join(f"- [`{name}`]({Path(path).name}/{name}.md)" for name in names)
    return f"# `{path}`\n\n``````{LANGUAGES[Path(path).suffix]}\n{(ROOT / path).read_text()}\n``````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    linked: set[str] = set()
    for file in files.documentation_pages():
        if file.src_uri.startswith("api/"):
            ENTRIES.update({heading or path: path for path, heading in ENTRY.findall(file.content_string)})
        found = {target(file.src_uri, link) for _, link, _ in LINK.findall(file.content_string)}
        linked |= found - {None}  # type: ignore[arg-type]
    for folder in [path for path in linked if (ROOT / path).is_dir()]:
        linked |= {f"{folder}/{p.name}" for p in (ROOT / folder).iterdir() if p.is_file()}
    for path in sorted(linked):
        files.append(File.generated(config, page_of(path), content=listing(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri

    def to_site(found: re.Match[str]) -> str:
        path = target(here, found[2])
        if path is None or here.startswith("source/"):
            return found[0]
        return found[1] + posixpath.relpath(page_of(path), posixpath.dirname(here) or ".") + found[3]

    def to_entry(found: re.Match[str]) -> str:
        return f"[{found[0]}][{ENTRIES[found[1]]}]" if found[1] in ENTRIES else found[0]

    lines, code = [], False
    for line in LINK.sub(to_site, markdown).split("\n"):
        code ^= line.lstrip().startswith("```")
        lines.append(line if code or line.startswith(("#", ":::")) else NAME.sub(to_entry, line))
    return "\n".join(lines)
