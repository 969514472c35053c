"""Cost of a checkout's structure to its readers, as numbers::

    python -m tests.structure [--list] [CHECKOUT ...]

``--list`` prints the functions with many parameters instead.

A line of code is a line that holds more than blanks, comments and docstrings. What is decided by a name outside an
axis's table is counted by ``tests.one_table``.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
MANY = 8
RULES = {
    "host lines": "code lines in modules of tgl/cutlass_kernels that do not import the compiler when they are imported",
    "kernel lines": "code lines in the other modules of tgl/cutlass_kernels",
    f"functions of {MANY}": f"functions and methods of tgl with {MANY} and more parameters, `self` not counted",
    "import cycles": "sets of modules of tgl that import each other when they are imported",
    "longest file": "lines of the longest module of tgl",
}


def modules(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((root / "tgl").rglob("*.py")):
        yield path, ast.parse(path.read_text())


def code_lines(path: Path, tree: ast.Module) -> int:
    text, docstrings = path.read_text(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED and token.type != tokenize.ENDMARKER:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - docstrings)


def imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Absolute names of what the module imports when it is imported, submodules among them."""
    for node in at_import(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            up = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{name.name}" for name in node.names)


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Return the statements that run when the module is imported."""
    for child in ast.iter_child_nodes(node):
        checking = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not checking and not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield child
            yield from at_import(child)


def cycles(graph: dict[str, set[str]]) -> int:
    """Strongly connected sets of more than one module."""

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for following in graph[todo.pop()] - seen:
                seen.add(following)
                todo.append(following)
        return seen

    reach = {name: reached(name) for name in graph}
    rings = [frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]]
    return len(set(rings))


def long_lists(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, int]]:
    """Functions with many parameters, and how many."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            a = node.args
            count = len([*a.posonlyargs, *a.args, *a.kwonlyargs]) - (bool(a.args) and a.args[0].arg == "self")
            if count >= MANY:
                yield node, count


def measure(root: Path) -> dict[str, int]:
    found = dict.fromkeys(RULES, 0)
    graph: dict[str, set[str]] = {}
    for path, tree in modules(root):
        parts = path.relative_to(root).with_suffix("").parts
        package = ".".join(parts[:-1])
        name = package if parts[-1] == "__init__" else ".".join(parts)
        found[f"functions of {MANY}"] += len(list(long_lists(tree)))
        graph[name] = set(imports(tree, package))
        found["longest file"] = max(found["longest file"], len(path.read_text().splitlines()))
        if parts[:2] == ("tgl", "cutlass_kernels"):
            kernel = any(module.split(".")[0] == "cutlass" for module in graph[name])
            found["kernel lines" if kernel else "host lines"] += code_lines(path, tree)
    # A package's own file only hands names on: an import of a module through it is one of that module.
    inner = {
        name: {module for module in to if module in graph and not f"{name}.".startswith(f"{module}.")}
        for name, to in graph.items()
    }
    found["import cycles"] = cycles(inner)
    return found


def main(arguments: list[str]) -> None:
    roots = [Path(argument) for argument in arguments if argument != "--list"] or [Path(__file__).parents[1]]
    if "--list" in arguments:
        for root in roots:
            for path, tree in modules(root):
                for function, count in long_lists(tree):
                    print(f"{path.relative_to(root)}:{function.lineno} {function.name} {count}")
        return
    table = [measure(root) for root in roots]
    for what, rule in RULES.items():
        print(f"{what:16}" + "".join(f"{column[what]:8}" for column in table) + f"  {rule}")


if __name__ == "__main__":
    main(sys.argv[1:])
