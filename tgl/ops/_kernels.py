"""The kernels of ops derived from their shape rule: the code that every call runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from .. import backends, debug
from ..meta import memory
from ..meta.specs import Unasked
from ._signature import Arguments, Names, OpSignature

Options = Callable[..., tuple[dict[str, Any], dict[str, Any]]]
"""Maps an op's keywords to those of the shape rule and those of implementations."""

Adapt = Callable[[list, dict[str, Any]], tuple[list, dict[str, Any]]]
"""Maps a call's operands and options to those that implementations get."""

Results = Callable[[Any], tuple[Tensor, ...]]
"""Makes an op's outputs from its destination, or from a dict of destinations."""

TAIL = "zero_tail"
"""The option of implementations that is False if the destination is the caller's buffer, whose tail is not written."""


class Rule(NamedTuple):
    """A shape rule, in the forms for calls without and with row indices.

    Attributes:
        complains: whether it raises for a tensor that is None.
        once: the rule for real tensors, remembered if possible: takes the op's arguments, and returns what the rule
            returns, the keywords of implementations, and where ``backends.produce`` keeps them.
        indexed: the same for calls with one of ``indices``.
        indices: names of arguments that are row indices.
    """

    complains: bool
    once: Callable[..., Any]
    indexed: Callable[..., Any]
    indices: frozenset[str] = frozenset()

    def joined(
        self, arguments: Arguments, names: Names, values: Sequence[Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the rule for a call with values after its operands, and its tables."""
        tables = arguments.of(names, values)[1]
        return self.once if self.indices.isdisjoint(tables) else self.indexed, tables


def kernel_of(
    signature: OpSignature,
    rule: Rule,
    arguments: Arguments,
    values: Callable[..., None],
    absent: Names,
    masked: bool,
    adapt: Adapt | None,
    results: Results | None,
) -> Callable[..., Any]:
    """Return the kernel of the overload that allocates its outputs.

    It is one of five functions, each without the steps that its ops do not need, because every step adds to the cost of
    an eager call.
    """
    name, names, defaults, keywords_of, outputs, _ = signature
    operands = len(names) - len(arguments.tables) - len(arguments.unseen)
    assert len(names) - operands <= 2
    dropped = [defaults[n:operands] for n in range(len(names) + 1)]
    once = rule.once
    first, second = (*outputs, "")[:2]
    nothing, ordered = dict.fromkeys(absent), results or itemgetter(*outputs)

    def plain(*args: Any) -> Any:
        n = len(args)  # the dispatcher drops trailing defaults
        spec, given, kept = once(*args)
        if debug.active:
            values(name, *args, *defaults[n:])
        return backends.produce(name, args[0].device, spec, [*args, *dropped[n]], given, kept)

    def one(*args: Any, **keywords: Any) -> Any:
        n = len(args)
        check, front, tables = once, args, None
        if n > operands:  # one or two more
            front = args[:operands]
            if args[operands] is not None or args[-1] is not None:
                check, tables = rule.joined(arguments, names[operands:], args[operands:])
        spec, given, kept = check(*args, **keywords) if keywords else check(*args)
        if tables:
            given = given | tables
        if debug.active:
            values(name, *args, *defaults[n:], **keywords)
        made = backends.produce(name, args[0].device, spec, [*front, *dropped[n]], given, kept)
        return made if results is None else results(made)

    def adapted(*args: Any, **keywords: Any) -> Any:
        spec, given, kept = once(*args, **keywords)
        operands, given = adapt([*args, *dropped[len(args)]], given)  # type: ignore[misc]
        return backends.produce(name, args[0].device, spec, operands, given, kept)

    def pair(*args: Any, **keywords: Any) -> Any:
        n = len(args)
        check, front, tables = once, args, None
        if n > operands:  # one or two more
            front = args[:operands]
            if args[operands] is not None or args[-1] is not None:
                check, tables = rule.joined(arguments, names[operands:], args[operands:])
        (one, other), given, kept = check(*args, **keywords) if keywords else check(*args)
        if tables:
            given = given | tables
        if debug.active:
            values(name, *args, *defaults[n:], **keywords)
        specs = {first: one, second: other}
        made = backends.produce(name, args[0].device, specs, [*front, *dropped[n]], given, kept)
        return made[first], made[second]

    def several(*args: Any, **keywords: Any) -> Any:
        n = len(args)
        check, front, tables = once, args, None
        if n > operands:  # one or two more
            front = args[:operands]
            if args[operands] is not None or args[-1] is not None:
                check, tables = rule.joined(arguments, names[operands:], args[operands:])
        specs, given, kept = check(*args, **keywords) if keywords else check(*args)
        if tables:
            given = given | tables
        if debug.active:
            values(name, *args, *defaults[n:], **keywords)
        wanted = dict(zip(outputs, specs))
        if nothing:
            wanted |= nothing
        if not masked:
            return ordered(backends.produce(name, args[0].device, wanted, [*front, *dropped[n]], given, kept))
        unasked = []
        for item in zip(outputs, specs):
            if type(item[1]) is Unasked:
                wanted[item[0]] = None
                unasked.append(item)
        made = backends.produce(name, args[0].device, wanted, [*front, *dropped[n]], given, kept)
        for output, spec in unasked:
            made[output] = spec.empty()
        return ordered(made)

    if adapt is not None:
        kernel: Any = adapted
    elif len(outputs) == 2 and not absent and not masked and results is None:
        kernel = pair
    elif len(outputs) > 1:
        kernel = several
    else:
        kernel = one if keywords_of or operands < len(names) else plain
    kernel.complains = rule.complains
    return kernel


def kernel_out_of(
    signature: OpSignature, rule: Rule, arguments: Arguments, values: Callable[..., None]
) -> Callable[..., None]:
    """Return the kernel of the overload that writes into the caller's buffer."""
    name, names, defaults = signature.name.partition(".")[0], signature.names, signature.defaults
    operands = len(names) - len(arguments.tables) - len(arguments.unseen)
    dropped = [defaults[n:operands] for n in range(len(names) + 1)]
    once, writable = rule.once, memory.writable

    def kernel(*args: Any, out: Tensor, **keywords: Any) -> None:
        n = len(args)
        check, front, tables = once, args, None
        if n > operands:
            front = args[:operands]
            if args[operands] is not None or args[-1] is not None:
                check, tables = rule.joined(arguments, names[operands:], args[operands:])
        _, given, _ = check(*args, **keywords, out=out)
        if tables:
            given = given | tables
        writable(name, "out", out, zip(names, args))
        if debug.active:
            values(name, *args, *defaults[n:], **keywords)
        backends.run(name, args[0].device, *front, *dropped[n], out=out, **given)

    kernel.complains = rule.complains  # type: ignore[attr-defined]
    return kernel
