"""Names that tests, benchmarks and examples take from the project's modules exist, where no test of theirs runs too.

Most of tests/gpu is skipped before its imports where there is no device, and a script fails when somebody starts it.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.import_graph import statements

ROOT = Path(__file__).parent.parent
FOLDERS = ("tgl", "tests", "compile_tests", "benchmarks", "examples", "emulator/tests", "emulator/cute_emulator")


def name_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name.removeprefix("emulator.") if name.startswith("emulator.cute_emulator") else name


MODULES = {name_of(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
TOPS = {name.partition(".")[0] for name in MODULES}
PACKAGES = {name.rpartition(".")[0] for name in MODULES}


@functools.cache
def names_of(module: str) -> set[str]:
    """The names that a module has once its statements ran; of another one than the project's, none."""
    if module not in MODULES:
        return set()
    body = ast.parse(MODULES[module].read_text()).body
    names = {"__doc__", "__file__", "__name__"}
    for statement in statements(body):
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
        else:
            names |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if "__getattr__" in names:  # it makes names on demand: those that it writes down
        names |= {
            n.value for s in body for n in ast.walk(s) if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }
    return names


def base_of(node: ast.ImportFrom, package: str) -> str:
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*above, *(node.module or "").split(".")]).rstrip(".")


def lacks(module: str, name: str) -> bool:
    """Return whether ``module`` is one of the project's and has neither this name nor a module of this name."""
    inner = f"{module}.{name}"
    ours = module.partition(".")[0] in TOPS
    return ours and inner not in MODULES and inner not in PACKAGES and name not in names_of(module)


def unknown(source: str, package: str) -> Iterator[str]:
    """Yield the names that a module of ``package`` takes from modules that do not have them."""
    nodes = list(ast.walk(ast.parse(source)))
    aliases = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = base_of(node, package)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if lacks(base, alias.name):
                    yield inner
                elif inner in MODULES and alias.name not in names_of(base):
                    aliases[alias.asname or alias.name] = inner
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name in MODULES:
                    aliases[alias.asname] = alias.name
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
            module = aliases.get(node.value.id)
            if module and node.value.id not in stored and lacks(module, node.attr):
                yield f"{module}.{node.attr}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from tgl.meta import formats, no_such_module", ["tgl.meta.no_such_module"]),
        ("from .meta.formats import Format, NO_SUCH", ["tgl.meta.formats.NO_SUCH"]),
        ("from .no_such_module import name", ["tgl.no_such_module.name"]),
        ("def f():\n    from tgl.meta import formats as f\n    return f.NO_SUCH", ["tgl.meta.formats.NO_SUCH"]),
        ("import tgl.meta.formats as f\nf.FORMATS\nf.NO_SUCH", ["tgl.meta.formats.NO_SUCH"]),
        ("from tgl.meta import formats\ndef f(formats): return formats.NO_SUCH", []),
        ("import torch\ntorch.no_such\nfrom torch import no_such", []),
    ],
)
def test_missing_names_are_found(source, expected):
    assert list(unknown(source, "tgl")) == expected


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_name_that_code_reads_exists(folder):
    missing = {}
    for name, path in MODULES.items():
        if path.is_relative_to(ROOT / folder):
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            if found := sorted(set(unknown(path.read_text(), package))):
                missing[name] = found
    assert missing == {}
