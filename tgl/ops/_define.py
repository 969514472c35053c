"""Ops derived from their shape rule: ``define`` makes kernel, fake, ``.out`` overload and the call for ``explain``.

An op with implementations does five things in a fixed order: its shape rule checks the arguments and returns the specs
of the outputs, values are checked inside ``debug_checks()``, the outputs are allocated, and the registry finds an
implementation, which gets operands, options and destinations. The fake is the rule and an allocation, ``explain`` the
rule and destinations without memory. All of them follow from the schema, the rule and the arguments of ``define``.
Nothing about an op is decided during its calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, debug
from ..meta.remembered import remembered
from ..meta.specs import Unasked
from ._kernels import TAIL, Adapt, Options, Results, Rule, kernel_of, kernel_out_of
from ._library import Formula, autocast_factor, autocast_operand, register
from ._signature import NO_TABLES, Arguments, Names, OpSignature, out_schema


class Out(NamedTuple):
    """The ``.out`` overload, which writes into the caller's buffer.

    Attributes:
        rule: checks a call; takes those arguments of the op's rule that the overload has, and ``out``.
        rows, indexed: how ``out`` enters the key of remembered calls (``remembered.KINDS``).
    """

    rule: Callable[..., None]
    rows: str = "destination"
    indexed: str = "tokens"


class Casts(NamedTuple):
    """The autocast rule of a GEMM: operands are cast to the autocast dtype.

    Attributes:
        operands: names of positional arguments; the first one has rows.
        factor: the name of a factor of each row, such as routing probabilities, which keeps its own dtype if the op
            supports it: float32 or the dtype of the rows.
        like_result: whether the op supports a factor of the result's dtype instead of the rows' dtype.
    """

    operands: Names
    factor: str = ""
    like_result: bool = False

    def rule(self, names: Names) -> Callable[..., tuple[tuple, dict]]:
        """Return the argument ``autocast`` of ``register``, for positional arguments of these names."""
        first, like_result = names.index(self.operands[0]), self.like_result
        places = [(i, name == self.factor) for i, name in enumerate(names) if name in (*self.operands, self.factor)]

        def cast(dtype: torch.dtype, *args: Any, **keywords: Any) -> tuple[tuple, dict]:
            made = list(args)
            for i, is_factor in places:
                if i >= len(made) or made[i] is None:
                    continue
                if is_factor:
                    rows = (keywords.get("out_dtype") if like_result else None) or made[first].dtype
                    made[i] = autocast_factor(rows, made[i])
                else:
                    made[i] = autocast_operand(dtype, made[i])
            return tuple(made), keywords

        return cast


def define(
    schema: str,
    rule: Callable[..., Any],
    *,
    rows: Mapping[str, str] | None = None,
    indexed: Mapping[str, str] | None = None,
    moves: Callable[..., Any] | None = None,
    checked: Callable[..., Any] | None = None,
    options: Options | None = None,
    tables: Names = (),
    unseen: Names = (),
    values: Callable[..., None] | None = None,
    destinations: Names = (),
    results: Results | None = None,
    absent: Names = (),
    masked: bool = False,
    zero_tail: bool = False,
    kernel: Callable | None = None,
    adapt: Adapt | None = None,
    out: Out | None = None,
    formula: Formula | None = None,
    autocast: Callable | Casts | None = None,
    no_derivative: str = "",
) -> torch._ops.OpOverload:
    """Register an op whose implementations get its positional arguments, options and destinations; return it.

    Args:
        schema: see ``register``; a named output is a destination of that name, an unnamed one is ``out``.
        rule: the shape rule: takes the positional arguments and those keywords that it has parameters for, raises for
            bad ones, and returns the spec of the output or a tuple of specs.
        rows: for a rule whose results may be remembered: how tensors of T rows enter the key (``remembered``).
        indexed: the same for calls with a table of ``tables``, where T is the length of an index.
        moves: see ``remembered``.
        checked: the rule for real tensors, if it is not remembered by ``rows``, ``indexed`` and ``moves``: takes the
            op's arguments, and returns what ``remembered`` does.
        options: splits the keywords, which must be hashable; default: implementations get all of them except
            ``out_dtype``, which the destination has.
        tables: positional arguments that implementations get by keyword, and only if they are not None.
        unseen: positional arguments that implementations do not get. Both follow the operands, and are two at most.
        values: checks the values of a call inside ``debug_checks()``; takes the name of the op and its arguments.
            Default: ``offs`` and ``rows`` fit the rows of the first argument.
        destinations: names of the rule's specs, if they are not the op's outputs.
        results: makes the op's outputs from the destination of another name, or from a dict of them.
        absent: destinations that this op never requests: implementations get None.
        masked: whether the rule may return ``Unasked`` specs, for outputs that a call does not request:
            implementations get None.
        zero_tail: whether implementations get ``zero_tail``: they zero the tail of outputs that the op allocates, and
            leave that of the caller's buffer.
        kernel: the kernel of an op that does more than pass on its arguments; any ``tables`` are then allowed.
        adapt: changes operands and options of a call before implementations get them. With ``kernel``, which does so
            itself, it is for ``explain``, and has the destinations among the options.
        out: the ``.out`` overload.
        formula, no_derivative: see ``register``.
        autocast: see ``register``, or the operands that are cast.
    """
    signature = OpSignature.of(schema)
    signature.matches(rule)
    if destinations:
        signature = signature._replace(outputs=destinations)
    split = options or _split(signature, rule, {TAIL: True} if zero_tail else {})
    look = values or _ends(signature)

    floats = frozenset(name for name, default in signature.keywords.items() if isinstance(default, float))

    def called(
        name: str, check: Callable[..., Any], split: Options, of_rows: dict[str, str], of_indexed: dict[str, str]
    ) -> Rule:
        if rows is None:
            plain = checked or _with_options(check, split)
            return Rule(False, plain, plain)
        once = remembered(check, {**rows, **of_rows}, moves, split, floats, name)
        if indexed is None:
            return Rule(True, once, once)
        by_index = remembered(check, {**indexed, **of_indexed}, None, split, floats, name)
        return Rule(True, once, by_index, frozenset(indexed).intersection(tables))

    if isinstance(autocast, Casts):
        autocast = autocast.rule(signature.names)
    arguments = Arguments(tables, unseen)
    if kernel is None:
        once = called(signature.name, rule, split, {}, {})
        kernel = kernel_of(signature, once, arguments, look, absent, masked, adapt, results)
    fake = _fake(signature, rule, split, results)
    op = register(schema, kernel, fake, formula=formula, autocast=autocast, no_derivative=no_derivative)
    if out is not None:
        text = out_schema(schema, out.rule)
        written = called(text.partition("(")[0], out.rule, _written(split), {"out": out.rows}, {"out": out.indexed})
        register(
            text,
            kernel_out_of(OpSignature.of(text), written, arguments, look),
            out.rule,
            no_derivative=no_derivative,
            autocast=None if formula is not None else autocast,
        )
    backends.describe_op(signature.name, describe(signature, rule, split, arguments, absent, adapt, out))
    return op


# --- what follows from schema and rule --------------------------------------------------------------------------------


def _split(signature: OpSignature, rule: Callable[..., Any], constants: dict[str, Any]) -> Options:
    """Return the default of ``options``."""
    taken = set(inspect.signature(rule).parameters).intersection(signature.keywords)
    passed = {name: default for name, default in signature.keywords.items() if name != "out_dtype"} | constants

    def split(**keywords: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        given = passed | keywords
        given.pop("out_dtype", None)
        return {name: value for name, value in keywords.items() if name in taken}, given

    return split


def _with_options(check: Callable[..., Any], split: Options) -> Callable[..., Any]:
    """Return ``check`` for the keywords of an op, with the results of ``remembered``."""

    def checked(*args: Any, **keywords: Any) -> tuple[Any, dict[str, Any], None]:
        for_check, given = split(**keywords)
        return check(*args, **for_check), given, None

    return checked


def _written(split: Options) -> Options:
    """Return ``split`` for a call with the caller's buffer, whose tail is not written."""

    def written(*, out: Tensor, **keywords: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        for_check, given = split(**keywords)
        return {**for_check, "out": out}, given | {TAIL: False} if TAIL in given else given

    return written


def _ends(signature: OpSignature) -> Callable[..., None]:
    """Return the default of ``values``: checks of ``offs`` and ``rows``."""
    names = signature.names[1:]
    if "offs" not in names:
        return lambda op, *args, **_: None

    def values(op: str, t: Tensor, *args: Any, **_: Any) -> None:
        given = dict(zip(names, args))
        offs, rows = given["offs"], given.get("rows")
        debug.check_offs(op, offs, (t if rows is None else rows).shape[0])
        debug.check_rows(op, "rows", rows, offs, t)

    return values


def _fake(
    signature: OpSignature, rule: Callable[..., Any], split: Options, results: Results | None
) -> Callable[..., Any]:
    outputs = signature.outputs

    def fake(*args: Any, **keywords: Any) -> Any:
        specs = rule(*args, *signature.defaults[len(args) :], **split(**keywords)[0])
        if len(outputs) == 1:
            return specs.empty() if results is None else results(specs.empty())
        made = tuple(spec.empty() for spec in specs)
        return made if results is None else results(dict(zip(outputs, made)))

    return fake


def describe(
    signature: OpSignature,
    rule: Callable[..., Any],
    split: Options,
    arguments: Arguments = NO_TABLES,
    absent: Names = (),
    adapt: Adapt | None = None,
    out: Out | None = None,
) -> Callable[..., tuple[torch.device, tuple, dict[str, Any]]]:
    """Return the function for ``backends.describe_op``, which takes a call of either overload."""
    names, outputs, parameters = signature.names, signature.outputs, list(signature.parameters)
    if out is not None:
        parameters.append(inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None))
    signed = inspect.Signature(parameters)

    def described(*args: Any, **keywords: Any) -> tuple[torch.device, tuple, dict[str, Any]]:
        bound = signed.bind(*args, **keywords).arguments
        values = [bound.pop(n, default) for n, default in zip(names, signature.defaults)]
        buffer = bound.pop("out", None)
        for_rule, given = split(**bound)
        operands, tables = arguments.of(names, values)
        given = {**given, **tables, **dict.fromkeys(absent)}
        if out is not None and buffer is not None:
            taken = inspect.signature(out.rule).parameters
            out.rule(*values, **{name: value for name, value in for_rule.items() if name in taken}, out=buffer)
            given |= {"out": buffer, **({TAIL: False} if TAIL in given else {})}
        else:
            specs = rule(*values, **for_rule)
            for output, spec in zip(outputs, (specs,) if len(outputs) == 1 else specs):
                given[output] = None if type(spec) is Unasked else spec.meta()
        if adapt is not None:
            operands, given = adapt(operands, given)
        return values[0].device, tuple(operands), given

    described.__signature__ = signed  # type: ignore[attr-defined]
    return described


def describe_in_place(
    schema: str, rule: Callable[..., Any], destination: str, tables: Names, options: Options
) -> Callable[..., tuple[torch.device, tuple, dict[str, Any]]]:
    """Return the function for ``backends.describe_op`` of an op that writes into its argument ``destination``.

    Implementations get it as ``out``, the arguments ``tables`` by keyword, and the result of ``options``.
    """
    signature = OpSignature.of(schema)
    arguments, signed = Arguments(tables, (destination,)), inspect.Signature(signature.parameters)

    def described(*args: Any, **keywords: Any) -> tuple[torch.device, tuple, dict[str, Any]]:
        bound = signed.bind(*args, **keywords).arguments
        values = {n: bound.pop(n, default) for n, default in zip(signature.names, signature.defaults)}
        for_rule, given = options(**bound)
        rule(*values.values(), **for_rule)
        operands, named = arguments.of(signature.names, tuple(values.values()))
        return operands[0].device, tuple(operands), {**given, "out": values[destination], **named}

    described.__signature__ = signed  # type: ignore[attr-defined]
    return described
