"""Caching of checks, so that a call is not checked again if it differs from an earlier one only in its rows.

The number of rows T changes with every step of a training run, and only sizes of other tensors depend on it. So the
cache key contains everything else, and T is compared with the sizes of other tensors and with the T of the cached
specs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, overload

from .components import SizedComponents
from .specs import RowsSpec, TensorSpec, pair_for_rows

Check = TypeVar("Check", bound=Callable[..., Any])
MADE: list[Any] = []  # every remembered check, for code that counts or clears their caches
LIMIT = 1024  # cached calls per check; a model has few


class _Kind(NamedTuple):
    """A tensor's part of the cache key; expressions of a tensor ``t``.

    Attributes:
        key: the part of the key.
        plain: condition for using the cache at all; ``_rows`` is T.
        moving: values that depend on T, compared with the last call of the same key.
    """

    key: str
    plain: str = ""
    moving: str = ""


KINDS = {
    "tensor": _Kind("t.shape, t.stride(), t.dtype, t.device"),
    # [T, columns] in any layout with a unit stride, so that the other stride, which may be T, is not in the key
    "rows": _Kind("t.shape[1:], t.dtype, t.device", "t.shape[0] == _rows and 1 in t.stride()"),
    "contiguous rows": _Kind("t.shape[1:], t.dtype, t.device", "t.shape[0] == _rows and t.is_contiguous()"),
    # [T]
    "vector": _Kind("t.stride(), t.dtype, t.device", "t.shape[0] == _rows"),
    # [T, columns] to be written, with its row pitch, which has no meaning for a single row
    "destination": _Kind("t.shape[1:], t.stride(), t.dtype, t.device", "t.shape[0] == _rows > 1"),
    # [features, tokens]; the padded number of tokens is used as T
    "transposed": _Kind("t.shape[0], t.dtype, t.device", "t.shape[1] == _rows and t.is_contiguous()"),
    # sizes that depend on T in another way
    "tokens": _Kind("t.dtype, t.device", "", "t.shape, t.stride()"),
}


SIZE = {"rows": "shape[0]", "contiguous rows": "shape[0]", "transposed": "shape[1]"}
"""The dimension that T is read from, by the kind of the first tensor that has it."""

Moves = Callable[[int], tuple | None]
"""Maps T to a call's ``_Kind.moving``; None where the call must be checked."""

Split = Callable[..., tuple[dict[str, Any], dict[str, Any]]]
"""Maps an op's keywords to those of the check and those of implementations."""


@overload
def remembered(
    check: Check, kinds: Mapping[str, str] | None = None, moves: Callable[..., Moves] | None = None
) -> Check: ...


@overload
def remembered(
    check: Callable[..., Any],
    kinds: Mapping[str, str] | None = None,
    moves: Callable[..., Moves] | None = None,
    split: Split | None = None,
    floats: frozenset[str] = frozenset(),
    op: str = "",
) -> Callable[..., Any]: ...


def remembered(
    check: Callable[..., Any],
    kinds: Mapping[str, str] | None = None,
    moves: Callable[..., Moves] | None = None,
    split: Split | None = None,
    floats: frozenset[str] = frozenset(),
    op: str = "",
) -> Callable[..., Any]:
    """Return ``check``, which maps tensors and options to output specs, with a cache of calls that have passed.

    Only for real tensors: sizes of traced ones are symbolic. Calls that raise are not cached. Between the products of a
    layer the processor's caches are cold, and a dozen checks then cost twice as much as one look-up. The look-up is
    generated as source for the parameters of ``check``, because a loop over them would cost as much as the checks.

    Args:
        check: takes tensors or None (annotated so) and hashable values; depends only on the tensors' shapes, strides,
            dtypes and devices. The first size of a ``RowsSpec`` that it returns is T.
        kinds: kinds (``KINDS``) of parameters that depend on T; the first one of ``SIZE`` is never None.
        moves: returns, for the arguments of a call that has passed, the ``moving`` values that a call with another T
            must have to pass too, if more than T changes; without it, such calls are checked.
        split: splits the keywords of an op. One look-up then finds all that a call of the op needs: the specs, the
            keywords of implementations, and a list of one item, in which ``backends.produce`` keeps the implementations
            that it tries for such calls.
        floats: names of the op's keywords whose zeros differ by their signs.
        op: with ``split``, the name of the op, for calls that have None for a tensor.
    """
    kinds = kinds or {}
    signature = inspect.signature(check)
    required = {
        name: place
        for place, (name, p) in enumerate(signature.parameters.items())
        if _is_tensor(p) and "None" not in str(p.annotation) and p.kind is not p.VAR_POSITIONAL
    }

    def passing(*args: Any, **options: Any) -> Any:
        """Check a call, and return what ``once`` returns for it."""
        if split is None:
            return check(*args, **options)
        for name, place in required.items():
            if (args[place] if place < len(args) else options.get(name, required)) is None:
                raise TypeError(f"tgl::{op}: `{name}` must be a tensor, but got None")
        for_check, given = split(**options)
        return check(*args, **for_check), given, [(None, ())]

    def remember(key: tuple, moving: Any, *args: Any, **options: Any) -> Any:
        """Check a call whose key is new, and keep its result."""
        result = passing(*args, **options)
        moves_to = None
        if moves is not None:
            call = signature.bind(*args, **(options if split is None else split(**options)[0]))
            call.apply_defaults()
            moves_to = moves(*call.args, **call.kwargs)
        if len(passed) >= LIMIT:
            passed.clear()
        specs, *more = (result,) if split is None else result
        passed[key] = [(moving, result), _remaking(specs), moves_to, more]
        return result

    passed: dict[tuple, list] = {}
    space: dict[str, Any] = {"_passing": passing, "_remember": remember, "_passed": passed, "_floats": floats}
    source = _source(signature, kinds, split is not None, bool(floats), moves is not None)
    exec(compile(source, f"<remembered {check.__name__}>", "exec"), space)
    once: Any = functools.wraps(check)(space["once"])
    once.passed, once.kinds, once.moves = passed, kinds, moves
    MADE.append(once)
    return once


def _is_tensor(parameter: inspect.Parameter) -> bool:
    return "Tensor" in str(parameter.annotation)


def _source(
    signature: inspect.Signature, kinds: Mapping[str, str], of_op: bool, of_floats: bool, with_moves: bool
) -> str:
    """Return the source of the look-up; ``of_op``: with the keywords of the op instead of those of its check."""
    key, plain, moving, parameters, given = [], [], [], [], []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            parameters.append(f"*{name}")
            given.append(f"*{name}")
            kind = KINDS[kinds.get(name, "tensor")]
            key.append(f"*[({kind.key}) for t in {name}]")
            moving += [f"*[({kind.moving}) for t in {name}]"] if kind.moving else []
            continue
        by_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if by_keyword and of_op and not _is_tensor(parameter):
            continue
        if by_keyword and not any(text.startswith("*") for text in parameters):
            parameters.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parameters.append(name + default)
        given.append(f"{name}={name}" if by_keyword else name)
        if not _is_tensor(parameter):
            key.append(name)
            continue
        kind = _Kind(*(part.replace("t.", f"{name}.") for part in KINDS[kinds.get(name, "tensor")]))
        optional = "None" in str(parameter.annotation)
        key.append(f"None if {name} is None else ({kind.key})" if optional else kind.key)
        if kind.plain:
            plain.append(f"({name} is None or {kind.plain})" if optional else kind.plain)
        if kind.moving:
            moving.append(f"None if {name} is None else ({kind.moving})" if optional else f"({kind.moving})")
    if of_op:
        parameters.append("**_options")
        given.append("**_options")
        values = "_options.values()"
        if of_floats:
            same = "_floats.isdisjoint(_options) or 0.0 not in map(_options.get, _floats)"
            values = f"({values} if {same} else map(repr, {values}))"
        key.append(f"*_options, *{values}")
    first = next((name for name, kind in kinds.items() if kind in SIZE), None)
    size = f"{first}.{SIZE[kinds[first]]}" if first else None
    plain = [text.replace(f"{size} == _rows and ", "", 1) for text in plain]  # it says what T is
    moved = ("_moves_to(_rows) == _moving[1:]" if with_moves else False) if moving else True
    remade = "(_remake(_rows), *_more)" if of_op else "_remake(_rows)"
    call = ", ".join(given)
    return f"""
def once({", ".join(parameters)}):
    try:
        _rows = {size}
        _plain = {" and ".join(plain) or True}
        _key = ({", ".join(key)},)
    except (AttributeError, IndexError):  # None for a tensor, or a tensor of no dimensions
        _plain = False
    if not _plain:
        return _passing({call})
    _moving = {f"(_rows, {', '.join(moving)})" if moving else "_rows"}
    _found = _passed.get(_key)
    if _found is None:
        return _remember(_key, _moving, {call})
    _last, _remake, _moves_to, _more = _found
    if _last[0] == _moving:
        return _last[1]
    _result = {remade} if {moved} else _passing({call})
    _found[0] = _moving, _result  # in one step, for other threads
    return _result
"""


def _remaking(result: Any) -> Callable[[int], Any]:
    """Return a function from the number of rows to a check's result."""
    if type(result) is tuple:
        if [type(spec) for spec in result] == [RowsSpec, RowsSpec]:
            return pair_for_rows(result)
        made = [_remaking(spec) for spec in result]
        if len(made) == 2:  # the common case; a loop over two would double the cost
            first, second = made
            return lambda rows: (first(rows), second(rows))
        return lambda rows: tuple([make(rows) for make in made])
    return result.for_rows() if isinstance(result, TensorSpec | SizedComponents) else lambda rows: result
