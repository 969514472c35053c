"""How the modules of the package may import one another: without circles, and ops know nothing of what serves them."""

import pytest

from tools.import_graph import imported, module_graph, room_of

ROOMS = {"backends.portable", "backends.composite", "backends.cpu", "cutlass_kernels"}  # implementations of ops


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


def test_ops_know_nothing_of_what_serves_them(edges):
    """Nor do checks and the registry; what serves an op is registered by modules that ``tgl`` imports."""
    above = {"ops", "meta", "backends", "nn", "tensor"}
    for name, targets in edges.items():
        if room_of(name) in above:
            assert not {target for target in targets if room_of(target) in ROOMS}, name
    registers = {f"tgl.{implementations}.register" for implementations in ROOMS}
    importing = {name for name, targets in edges.items() if registers & targets}
    assert importing == {"tgl", "tgl.integrations._torch_products"}  # the latter for a name that the registry shows


def test_what_serves_ops_knows_their_checks_and_the_registry(edges):
    for name, targets in edges.items():
        if room_of(name) in ROOMS - {"cutlass_kernels"}:
            allowed = ROOMS | {"meta", "backends"}
            assert {room_of(target) for target in targets} <= allowed, name
