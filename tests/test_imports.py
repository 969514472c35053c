"""How the modules of the package may import one another: without circles, and ops know nothing of what serves them."""

import pytest

from tools.import_graph import imported, module_graph

ROOMS = {"tgl.aten", "tgl.composed", "tgl.cpu", "tgl.cutlass_kernels"}  # implementations of ops


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
    return module_graph()


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
    assert imported(source, "p.s", modules, anywhere=True) == modules - {"p"}


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
