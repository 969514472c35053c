"""What a schema says about the arguments of an op, and which of them implementations get."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Names = tuple[str, ...]


class Signature(NamedTuple):
    """What a schema says.

    Attributes:
        name: of the op.
        names: of positional arguments.
        defaults: theirs; None of one that has none.
        keywords: the others, and their defaults; ``inspect.Parameter.empty`` of one that is required.
        outputs: their names, ``out`` of one that has none.
        parameters: of a Python function with this schema.
    """

    name: str
    names: Names
    defaults: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: Names
    parameters: tuple[inspect.Parameter, ...]

    @staticmethod
    def of(schema: str) -> Signature:
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
        return Signature(
            parsed.name.removeprefix("tgl::"),
            tuple(a.name for a in positional),
            tuple(a.default_value for a in positional),
            {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY},
            tuple(r.name or "out" for r in parsed.returns),
            parameters,
        )

    def matches(self, rule: Callable[..., Any]) -> None:
        """``rule`` can be called with as few positional arguments as the op, since the dispatcher drops defaults."""
        taken = inspect.signature(rule).parameters
        for parameter in self.parameters:
            if parameter.name in self.names and parameter.default is not inspect.Parameter.empty:
                default = taken[parameter.name].default
                if default is inspect.Parameter.empty or default != parameter.default:
                    message = f"`{parameter.name}` of the shape rule must have the default {parameter.default}"
                    raise ValueError(f"tgl::{self.name}: {message}")


class Arguments(NamedTuple):
    """Which positional arguments are operands of implementations, and which are none.

    Attributes:
        tables: what implementations get by keyword, and only where a call has it: slots, indices of rows, numbers.
        unseen: what the shape rule alone reads.
    """

    tables: Names
    unseen: Names

    def of(self, names: Names, values: Sequence[Any]) -> tuple[list, dict[str, Any]]:
        """Operands, and tables by name, of a call."""
        operands, tables = [], {}
        for name, value in zip(names, values):
            if name in self.tables:
                if value is not None:
                    tables[name] = value
            elif name not in self.unseen:
                operands.append(value)
        return operands, tables


def out_schema(schema: str, rule: Callable[..., None]) -> str:
    """The schema of the ``.out`` overload of an op, which has the keywords that ``rule``, its check, takes."""
    head, _, rest = schema.partition("(")
    arguments = rest.rpartition(") -> ")[0]
    positional, _, keywords = arguments.partition(", *, ")
    taken = inspect.signature(rule).parameters
    kept = [text for text in keywords.split(", ") if text.split("=")[0].split(" ")[-1] in taken]
    return f"{head}.out({', '.join([positional, '*', *kept, 'Tensor(a!) out'])}) -> ()"
