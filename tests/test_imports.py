"""How the modules of the package may import one another: without circles, and ops know nothing of what serves them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tgl

ROOT = Path(tgl.__file__).parent
ROOMS = {"tgl.aten", "tgl.composed", "tgl.cpu", "tgl.cutlass_kernels"}  # implementations of ops


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that run when the module is imported, type checkers' apart."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            typing = isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
            yield from statements(statement.orelse if typing else statement.body + statement.orelse)
        elif isinstance(statement, (ast.Try, ast.With, ast.For)):
            yield from statements(statement.body)


def imported(source: str, package: str, modules: set[str]) -> set[str]:
    """The modules among ``modules`` that a module of ``package`` imports when it is imported itself."""
    found = set()
    for statement in statements(ast.parse(source).body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
            base = ".".join([*above, *(statement.module or "").split(".")]).rstrip(".")
            for alias in statement.names:
                inner = f"{base}.{alias.name}"
                found.add(inner if inner in modules else base)
    return found & modules


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The sets of nodes that reach one another, two and more to a set, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            together = [stack.pop()]
            while together[-1] != node:
                together.append(stack.pop())
            if len(together) > 1 or node in edges[node]:
                found.append(sorted(together))

    for node in edges:
        if node not in index:
            visit(node)
    return found


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    return {
        name: imported(path.read_text(), name if path.name == "__init__.py" else name.rpartition(".")[0], set(MODULES))
        for name, path in MODULES.items()
    }


def test_imports_are_read_as_they_are_meant():
    source = """
import os, p.a
from . import b, attribute
from .c import name
from .. import q
from ..q import r
if TYPE_CHECKING:
    from . import typed
else:
    from . import d
def later():
    from . import e
"""
    modules = {"p", "p.a", "p.s", "p.s.b", "p.s.c", "p.q", "p.q.r", "p.s.typed", "p.s.d", "p.s.e"}
    assert imported(source, "p.s", modules) == {"p.a", "p.s.b", "p.s", "p.s.c", "p.q", "p.q.r", "p.s.d"}


def test_circles_are_found():
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"d"}, "e": {"a"}}
    assert sorted(circles(edges)) == [["a", "b", "c"], ["d"]]


def test_no_circles(edges):
    assert circles(edges) == []


def room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def test_ops_know_nothing_of_what_serves_them(edges):
    """Nor do checks and the registry; what serves an op is registered by one module that ``tgl`` alone imports."""
    above = {"tgl.ops", "tgl.meta", "tgl.backends", "tgl.nn", "tgl.tensor"}
    for name, targets in edges.items():
        if room(name) in above:
            assert not {target for target in targets if room(target) in ROOMS}, name
    assert [name for name, targets in edges.items() if "tgl._implementations" in targets] == ["tgl"]


def test_what_serves_ops_knows_their_checks_and_the_registry(edges):
    for name, targets in edges.items():
        if room(name) in ROOMS - {"tgl.cutlass_kernels"}:
            allowed = ROOMS | {"tgl.meta", "tgl.backends"}
            assert {room(target) for target in targets} <= allowed, name
