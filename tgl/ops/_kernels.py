"""The kernels of ops derived from their shape rule: the code that every call runs."""

from __future__ import annotations

import functools
import inspect
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
        once: the rule for real tensors, remembered if possible.
        indexed: the same for calls with one of ``indices``.
        indices: names of arguments that are row indices.
    """

    once: Callable[..., Any]
    indexed: Callable[..., Any]
    indices: frozenset[str] = frozenset()

    def joined(
        self, arguments: Arguments, names: Names, values: Sequence[Any], options: dict[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the rule for a call with values after its operands, and the options including its tables."""
        tables = arguments.of(names, values)[1]
        return self.once if self.indices.isdisjoint(tables) else self.indexed, options | tables


def kernel_of(
    signature: OpSignature,
    rule: Rule,
    split: Options,
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
    known, floats, unsaid = _known(split), _floats(signature, split), _unsaid(signature, split)
    once = rule.once
    first, second = (*outputs, "")[:2]
    nothing, ordered = dict.fromkeys(absent), results or itemgetter(*outputs)

    def plain(*args: Any) -> Any:
        n = len(args)  # the dispatcher drops trailing defaults
        spec = once(*args)
        if debug.active:
            values(name, *args, *defaults[n:])
        return backends.produce(name, args[0].device, spec, [*args, *dropped[n]])

    def one(*args: Any, **keywords: Any) -> Any:
        n = len(args)
        for_rule, given = unsaid
        if keywords:
            for_rule, given = known(**keywords) if not floats or floats.isdisjoint(keywords) else split(**keywords)
        check, front = once, args
        if n > operands:  # one or two more
            front = args[:operands]
            if args[operands] is not None or args[-1] is not None:
                check, given = rule.joined(arguments, names[operands:], args[operands:], given)
        spec = check(*args, **for_rule) if for_rule else check(*args)
        if debug.active:
            values(name, *args, *defaults[n:], **keywords)
        made = backends.produce(name, args[0].device, spec, [*front, *dropped[n]], given)
        return made if results is None else results(made)

    def adapted(*args: Any, **keywords: Any) -> Any:
        for_rule, given = unsaid
        if keywords:
            for_rule, given = split(**keywords)
        spec = once(*args, **for_rule) if for_rule else once(*args)
        operands, given = adapt([*args, *dropped[len(args)]], given)  # type: ignore[misc]
        return backends.produce(name, args[0].device, spec, operands, given)

    def pair(*args: Any, **keywords: Any) -> Any:
        n = len(args)
        for_rule, given = unsaid
        if keywords:
            for_rule, given = known(**keywords) if not floats or floats.isdisjoint(keywords) else split(**keywords)
        check, front = once, args
        if n > operands:  # one or two more
            front = args[:operands]
            if args[operands] is not None or args[-1] is not None:
                check, given = rule.joined(arguments, names[operands:], args[operands:], given)
        one, other = check(*args, **for_rule) if for_rule else check(*args)
        if debug.active:
            values(name, *args, *defaults[n:], **keywords)
        specs = {first: one, second: other}
        made = backends.produce(name, args[0].device, specs, [*front, *dropped[n]], given)
        return made[first], made[second]

    def several(*args: Any, **keywords: Any) -> Any:
        n = len(args)
        for_rule, given = unsaid
        if keywords:
            for_rule, given = known(**keywords) if not floats or floats.isdisjoint(keywords) else split(**keywords)
        check, front = once, args
        if n > operands:  # one or two more
            front = args[:operands]
            if args[operands] is not None or args[-1] is not None:
                check, given = rule.joined(arguments, names[operands:], args[operands:], given)
        specs = check(*args, **for_rule) if for_rule else check(*args)
        if debug.active:
            values(name, *args, *defaults[n:], **keywords)
        wanted = dict(zip(outputs, specs))
        if nothing:
            wanted |= nothing
        if not masked:
            return ordered(backends.produce(name, args[0].device, wanted, [*front, *dropped[n]], given))
        unasked = []
        for item in zip(outputs, specs):
            if type(item[1]) is Unasked:
                wanted[item[0]] = None
                unasked.append(item)
        made = backends.produce(name, args[0].device, wanted, [*front, *dropped[n]], given)
        for output, spec in unasked:
            made[output] = spec.empty()
        return ordered(made)

    if adapt is not None:
        return adapted
    if len(outputs) == 2 and not absent and not masked and results is None:
        return pair
    if len(outputs) > 1:
        return several
    return one if keywords_of or operands < len(names) else plain


def kernel_out_of(
    signature: OpSignature, rule: Rule, split: Options, arguments: Arguments, values: Callable[..., None]
) -> Callable[..., None]:
    """Return the kernel of the overload that writes into the caller's buffer."""

    def kept(**keywords: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        for_rule, given = split(**keywords)
        return for_rule, given | {TAIL: False} if TAIL in given else given

    name, names, defaults = signature.name.partition(".")[0], signature.names, signature.defaults
    operands = len(names) - len(arguments.tables) - len(arguments.unseen)
    dropped = [defaults[n:operands] for n in range(len(names) + 1)]
    known, floats, unsaid = _known(kept), _floats(signature, kept), _unsaid(signature, kept)
    once, writable = rule.once, memory.writable

    def kernel(*args: Any, out: Tensor, **keywords: Any) -> None:
        n = len(args)
        for_rule, given = unsaid
        if keywords:
            for_rule, given = known(**keywords) if not floats or floats.isdisjoint(keywords) else kept(**keywords)
        check, front = once, args
        if n > operands:
            front = args[:operands]
            if args[operands] is not None or args[-1] is not None:
                check, given = rule.joined(arguments, names[operands:], args[operands:], given)
        check(*args, **for_rule, out=out) if for_rule else check(*args, out=out)
        writable(name, "out", out, zip(names, args))
        if debug.active:
            values(name, *args, *defaults[n:], **keywords)
        backends.run(name, args[0].device, *front, *dropped[n], out=out, **given)

    return kernel


def _known(split: Options) -> Options:
    """Return ``split`` with a cache of its results."""
    return split if hasattr(split, "cache_info") else functools.lru_cache(maxsize=256)(split)


def _floats(signature: OpSignature, split: Options) -> frozenset[str]:
    """Return the float keywords, for which the cache cannot be used because 0.0 and -0.0 are equal keys."""
    kept = hasattr(split, "cache_info")
    return frozenset(n for n, default in signature.keywords.items() if isinstance(default, float) and not kept)


def _unsaid(signature: OpSignature, split: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return ``split`` of a call without keywords; empty dicts if the op requires keywords."""
    required = {name for name, default in signature.keywords.items() if default is inspect.Parameter.empty}
    return ({}, {}) if required - {"out"} else split()
