"""Faults that ``tests.planted_faults`` can plant: small changes of the expressions in a function's body."""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
# Error messages, whose wording is free, annotations and imports.
LEFT_OUT = (ast.Raise, ast.JoinedStr, ast.arguments, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Fault(NamedTuple):
    """A change of one expression; ``function`` is the path and the qualified name."""

    path: str
    function: str
    line: int
    kind: str
    diff: str
    number: int


class Site(NamedTuple):
    """A place in a tree: ``parent.field``, or an element of it, may be replaced by ``node``."""

    parent: ast.AST
    field: str
    index: int | None
    kind: str
    node: ast.AST

    def replace(self, node: ast.AST) -> ast.AST:
        """Put a node there, and return the one that was."""
        values = getattr(self.parent, self.field)
        if self.index is None:
            setattr(self.parent, self.field, node)
            return values
        before, values[self.index] = values[self.index], node
        return before


def changes(node: ast.AST, names: list[str]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the kinds of fault of a node, each with what replaces the node; ``names`` are the function's variables."""

    def changed(**fields: object) -> ast.AST:
        other = copy.copy(node)
        for field, value in fields.items():
            setattr(other, field, value)
        return other

    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison", changed(ops=[COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield "operator", changed(op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield "and/or", changed(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "sign or not removed", copy.copy(node.operand)
    elif isinstance(node, ast.If | ast.IfExp):
        yield "condition negated", changed(test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", changed(value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", changed(value=node.value + 1)
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield "min/max", changed(id=NAMES[node.id])
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and len(names) > 1:
        following = names[(names.index(node.value.id) + 1) % len(names)] if node.value.id in names else names[0]
        yield "other variable returned", changed(value=ast.Name(following, ast.Load()))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call left out", ast.Pass()
    elif isinstance(node, ast.Call):
        args = node.args
        symmetric = isinstance(node.func, ast.Attribute) and node.func.attr == "transpose"
        if len(args) > 1 and not symmetric and ast.dump(args[0]) != ast.dump(args[1]):
            yield "arguments swapped", changed(args=[args[1], args[0], *args[2:]])
        for i in range(len(node.keywords)):
            yield "argument dropped", changed(keywords=node.keywords[:i] + node.keywords[i + 1 :])
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load) and len(node.elts) > 1:
        yield "elements swapped", changed(elts=[node.elts[1], node.elts[0], *node.elts[2:]])


class Source:
    """The text of a module, and the faults in its functions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        self.tree = ast.parse(path.read_text())
        self.names: dict[int, str] = {}
        self.sites: list[tuple[Site, ast.stmt, str]] = []
        self._functions(self.tree, "")

    def name(self, line: int) -> str | None:
        """Return the path and name of the function that begins at a line."""
        return self.names.get(line)

    def code(self, fault: Fault | None = None) -> types.CodeType:
        """Compile the module, with a fault if one is given."""
        if fault is None:
            return compile(self.tree, self.path.absolute(), "exec", dont_inherit=True)
        site, _, _ = self.sites[fault.number]
        before = site.replace(site.node)
        try:
            return compile(self.tree, self.path.absolute(), "exec", dont_inherit=True)
        finally:
            site.replace(before)

    def faults(self) -> Iterator[Fault]:
        for number, (site, statement, function) in enumerate(self.sites):
            before = self._shown(statement)
            original = site.replace(site.node)
            after = self._shown(site.node if original is statement else statement)
            site.replace(original)
            yield Fault(str(self.path), function, statement.lineno, site.kind, f"- {before}\n+ {after}", number)

    def _shown(self, statement: ast.AST) -> str:
        text = ast.unparse(statement)
        return text.splitlines()[0] if hasattr(statement, "body") else text

    def _functions(self, node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FUNCTIONS):
                line = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                self.names[line] = f"{self.path}:{prefix}{child.name}"
                docstring = ast.get_docstring(child) is not None
                for i, statement in enumerate(child.body):
                    if i >= docstring:
                        self._sites(child, "body", i, statement, statement, self.names[line], self._variables(child))
                self._functions(child, f"{prefix}{child.name}.")
            else:
                self._functions(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    def _variables(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        stored = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        return list(dict.fromkeys([*(a.arg for a in function.args.args), *stored]))

    def _sites(self, parent, field, index, node, statement, function, names) -> None:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, *LEFT_OUT)):
            return
        for kind, changed in changes(node, names):
            ast.copy_location(changed, node)
            self.sites.append(
                (Site(parent, field, index, kind, ast.fix_missing_locations(changed)), statement, function)
            )
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "msg"):
                continue
            for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST):
                    inner = child if isinstance(child, ast.stmt) else statement
                    self._sites(node, name, i, child, inner, function, names)
