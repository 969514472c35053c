"""Report the code that decides by a name of an axis (format, activation, architecture) outside the axis's own table.

    python -m tests.one_table [--list] [root]

prints the count of each axis and its rule; ``--list`` prints every place. ``root`` may be another checkout.

Rule: a string literal that is a name of the axis counts where it is

* an operand of a comparison (``==``, ``!=``, ``in``, ``not in``), alone or as a member of a tuple, list, set or dict;
* in ``tgl``, a key of a dict, alone or as a member of a tuple (benchmarks and examples label their cases by any name);
* a subscript, or the first argument of a method ``get``, ``pop``, ``startswith`` or ``endswith``;
* a pattern of ``match``;
* the right side of ``NAME = "literal"`` in a module, for every use of ``NAME`` in one of the ways above.

Every literal counts once for each such use. Not counted are the file that holds the table of the axis, and the keys of
a dict that ``OnePerName(...)`` gets: that one is held against the table when it is made.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tgl.meta.activations import TABLE
from tgl.meta.formats import FORMATS

ROOT = Path(__file__).parents[1]
SOURCES = ("tgl", "benchmarks", "examples")
CHECKED = "OnePerName"
METHODS = ("get", "pop", "startswith", "endswith")


@dataclass(frozen=True)
class Axis:
    """An axis: its names, and the files that hold its table."""

    names: re.Pattern[str]
    tables: tuple[str, ...]


def _one_of(names: object) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, names)))  # type: ignore[call-overload]


AXES = {
    "format": Axis(_one_of(FORMATS), ("tgl/meta/formats.py",)),
    "activation": Axis(_one_of(TABLE), ("tgl/meta/activations.py",)),
    "architecture": Axis(re.compile(r"sm_\d+[af]?"), ("tgl/cutlass_kernels/archs.py",)),
}


@dataclass(frozen=True)
class Place:
    """A literal that decides something."""

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name!r}"


def _members(node: ast.expr | None) -> Iterator[ast.expr]:
    """``node``, or what a display of several holds."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        for item in node.elts:
            yield from _members(item)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            yield from _members(key)
    elif isinstance(node, ast.Starred):
        yield from _members(node.value)
    elif node is not None:
        yield node


def _deciding(node: ast.AST, keys: bool) -> Iterator[ast.expr]:
    """The expressions under ``node`` itself that something is decided by; the keys of a dict if ``keys``."""
    if isinstance(node, ast.Compare):
        for operand in (node.left, *node.comparators):
            yield from _members(operand)
    elif isinstance(node, ast.Dict):
        yield from _members(node) if keys else ()
    elif isinstance(node, ast.Subscript):
        yield from _members(node.slice)
    elif isinstance(node, ast.MatchValue):
        yield node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        yield from _members(node.args[0] if node.args else None)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and all below; of a dict that is checked against the table, its values alone."""
    yield node
    checked = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == CHECKED
    for child in ast.iter_child_nodes(node):
        if checked and isinstance(child, ast.Dict):
            for value in child.values:
                yield from _walk(value)
        else:
            yield from _walk(child)


def places(tree: ast.Module, path: str, names: re.Pattern[str]) -> Iterator[Place]:
    """Return the places where a module decides by a name."""
    constants = {
        target.id: statement.value.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    counted = set()
    for node in _walk(tree):
        for expression in _deciding(node, keys=path.startswith("tgl/")):
            value = expression.value if isinstance(expression, ast.Constant) else None
            if isinstance(expression, ast.Name):
                value = constants.get(expression.id)
            at = (expression.lineno, expression.col_offset)
            if isinstance(value, str) and names.fullmatch(value) and at not in counted:
                counted.add(at)  # a dict in a comparison is seen twice
                yield Place(path, expression.lineno, value)


def copies(tree: ast.Module, path: str, names: set[str]) -> Iterator[Place]:
    """Tuples, lists, sets and keys of dicts that are all names and nothing else: a new name does not reach them."""
    for node in _walk(tree):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            values = [m.value if isinstance(m, ast.Constant) else None for m in _members(node)]
            if set(values) == names:
                yield Place(path, node.lineno, ", ".join(map(str, values)))


@functools.cache
def modules(root: Path, folders: tuple[str, ...]) -> list[tuple[str, ast.Module]]:
    """Every Python file by its path from ``root``, parsed."""
    files = [file for folder in folders for file in sorted((root / folder).rglob("*.py"))]
    return [(file.relative_to(root).as_posix(), ast.parse(file.read_text())) for file in files]


def decided_by_name(axis: str, root: Path = ROOT) -> list[Place]:
    """All places of an axis outside its table."""
    known = AXES[axis]
    trees = ((path, tree) for path, tree in modules(root, SOURCES) if path not in known.tables)
    return [place for path, tree in trees for place in places(tree, path, known.names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    print((__doc__ or "").split("Rule: ")[1])
    for axis in AXES:
        found = decided_by_name(axis, arguments.root)
        print(f"{axis}: {len(found)} places in {len({place.path for place in found})} files")
        for place in found if arguments.list else ():
            print(f"    {place}")


if __name__ == "__main__":
    main()
