"""Parsed schemas of ops, and the split of their arguments into operands and tables of implementations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Names = tuple[str, ...]


class OpSignature(NamedTuple):
    """A parsed schema.

    Attributes:
        name: name of the op.
        names: names of positional arguments.
        defaults: their defaults; None for an argument without one.
        keywords: defaults of keyword arguments; ``inspect.Parameter.empty`` for a required one.
        outputs: names of the outputs, ``out`` for an unnamed one.
        parameters: parameters of a Python function with this schema.
    """

    name: str
    names: Names
    defaults: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: Names
    parameters: tuple[inspect.Parameter, ...]

    @staticmethod
    def of(schema: str) -> OpSignature:
        """Parse ``schema``, which is a schema without its library."""
        parsed = torch._C.parse_schema(f"tgl::{schema}")
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        parameters = tuple(
            inspect.Parameter(
                a.name,
                kinds[a.kwarg_only],
                default=a.default_value if a.has_default_value() else inspect.Parameter.empty,
            )
            for a in parsed.arguments
        )
        positional = [a for a in parsed.arguments if not a.kwarg_only]
        return OpSignature(
            parsed.name.removeprefix("tgl::"),
            tuple(a.name for a in positional),
            tuple(a.default_value for a in positional),
            {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY},
            tuple(r.name or "out" for r in parsed.returns),
            parameters,
        )

    def matches(self, rule: Callable[..., Any]) -> None:
        """Check that ``rule`` has the op's defaults, because the dispatcher drops arguments that equal theirs."""
        taken = inspect.signature(rule).parameters
        for parameter in self.parameters:
            if parameter.name in self.names and parameter.default is not inspect.Parameter.empty:
                default = taken[parameter.name].default
                if default is inspect.Parameter.empty or default != parameter.default:
                    message = f"`{parameter.name}` of the shape rule must have the default {parameter.default}"
                    raise ValueError(f"tgl::{self.name}: {message}")


class Arguments(NamedTuple):
    """The positional arguments that are not operands of implementations.

    Attributes:
        tables: arguments that implementations get by keyword if they are not None: slots, row indices, numbers.
        unseen: arguments that only the shape rule reads.
    """

    tables: Names
    unseen: Names

    def of(self, names: Names, values: Sequence[Any]) -> tuple[list, dict[str, Any]]:
        """Return the operands of a call, and its tables by name."""
        operands, tables = [], {}
        for name, value in zip(names, values):
            if name in self.tables:
                if value is not None:
                    tables[name] = value
            elif name not in self.unseen:
                operands.append(value)
        return operands, tables


NO_TABLES = Arguments((), ())


def out_schema(schema: str, rule: Callable[..., None]) -> str:
    """Return the schema of an op's ``.out`` overload, with those keywords that its check ``rule`` takes."""
    head, _, rest = schema.partition("(")
    arguments = rest.rpartition(") -> ")[0]
    positional, _, keywords = arguments.partition(", *, ")
    taken = inspect.signature(rule).parameters
    kept = [text for text in keywords.split(", ") if text.split("=")[0].split(" ")[-1] in taken]
    return f"{head}.out({', '.join([positional, '*', *kept, 'Tensor(a!) out'])}) -> ()"
