"""Checks that need not be made again for a call like one before, whatever its number of rows.

The number of rows T changes with every step of a training run, and nothing that a check looks at depends on it but
sizes of other tensors. So a call is looked up by everything else, and T is compared: with what other tensors have, and
with what the specs found were made for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from .components import SizedComponents
from .specs import RowsSpec, TensorSpec, pair_for_rows

Check = TypeVar("Check", bound=Callable[..., Any])
MADE: list[Any] = []  # every check that is remembered, for who counts what they hold or empties them
LIMIT = 1024  # calls remembered per check; those of a model are few


class _Kind(NamedTuple):
    """How a tensor takes part in a look-up; expressions of a tensor ``t``.

    Attributes:
        key: what another call must have in common with one that passed.
        plain: what must hold for a call to be looked up at all, ``_rows`` being T.
        moving: what depends on T and is compared with the last call of this key.
    """

    key: str
    plain: str = ""
    moving: str = ""


KINDS = {
    "tensor": _Kind("t.shape, t.stride(), t.dtype, t.device"),
    # [T, columns] in any layout with a unit stride, so that the other one, which may be T, need not be looked at
    "rows": _Kind("t.shape[1:], t.dtype, t.device", "t.shape[0] == _rows and 1 in t.stride()"),
    "contiguous rows": _Kind("t.shape[1:], t.dtype, t.device", "t.shape[0] == _rows and t.is_contiguous()"),
    # [T]
    "vector": _Kind("t.stride(), t.dtype, t.device", "t.shape[0] == _rows"),
    # [T, columns] to be written, with the pitch of its rows, which of a single row means nothing
    "destination": _Kind("t.shape[1:], t.stride(), t.dtype, t.device", "t.shape[0] == _rows > 1"),
    # [features, tokens]; as many tokens as follow from T, which stand for T
    "transposed": _Kind("t.shape[0], t.dtype, t.device", "t.shape[1] == _rows and t.is_contiguous()"),
    # of sizes that follow from T otherwise
    "tokens": _Kind("t.dtype, t.device", "", "t.shape, t.stride()"),
}


SIZE = {"rows": "shape[0]", "contiguous rows": "shape[0]", "transposed": "shape[1]"}
"""What T is, by the kind of the first tensor that says it."""

Moves = Callable[[int], tuple | None]
"""What ``_Kind.moving`` of a call is for T, behind T itself; None where that has to be checked."""


def remembered(
    check: Check, kinds: Mapping[str, str] | None = None, moves: Callable[..., Moves] | None = None
) -> Check:
    """``check``, which maps tensors and options to output specs, at the price of a look-up for what it has passed.

    For real tensors alone: sizes of traced ones are symbols. What raises is not remembered. Between the products of a
    layer an op finds the processor's caches cold, and a dozen checks then cost twice what one look-up does. The
    function that makes the look-up is written out for the parameters of ``check``: a loop over them would cost as much
    as the checks.

    Args:
        check: takes tensors or None (annotated so) and what can be hashed; looks at the tensors' shapes, strides,
            dtypes and devices and at nothing else. Of a ``RowsSpec`` that it returns the first size is T.
        kinds: of parameters (``KINDS``), where T has a part in them; the first one of ``SIZE`` is never None.
        moves: for the arguments of a call that has passed, what a call with another T must have in common with it to
            pass too, where there is more than T; without it, such calls are checked.
    """
    kinds = kinds or {}
    key, plain, moving, parameters, given = [], [], [], [], []
    for name, parameter in inspect.signature(check).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            parameters.append(f"*{name}")
            given.append(f"*{name}")
            kind = KINDS[kinds.get(name, "tensor")]
            key.append(f"*[({kind.key}) for t in {name}]")
            moving += [f"[({kind.moving}) for t in {name}]"] if kind.moving else []
            continue
        by_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if by_keyword and not any(text.startswith("*") for text in parameters):
            parameters.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parameters.append(name + default)
        given.append(f"{name}={name}" if by_keyword else name)
        if "Tensor" not in str(parameter.annotation):
            key.append(name)
            continue
        kind = _Kind(*(part.replace("t.", f"{name}.") for part in KINDS[kinds.get(name, "tensor")]))
        optional = "None" in str(parameter.annotation)
        key.append(f"None if {name} is None else ({kind.key})" if optional else kind.key)
        if kind.plain:
            plain.append(f"({name} is None or {kind.plain})" if optional else kind.plain)
        if kind.moving:
            moving.append(f"None if {name} is None else ({kind.moving})" if optional else f"({kind.moving})")
    first = next((name for name, kind in kinds.items() if kind in SIZE), None)
    size = f"{first}.{SIZE[kinds[first]]}" if first else None
    plain = [text.replace(f"{size} == _rows and ", "", 1) for text in plain]  # it says what T is
    call = f"_check({', '.join(given)})"
    moved = ("_moves_to(_rows) == _moving" if moves else False) if moving else True
    source = f"""
def once({", ".join(parameters)}):
    try:
        _rows = {size}
        if not ({" and ".join(plain) or True}):
            return {call}
        _key = ({", ".join(key)},)
    except IndexError:  # a tensor of no dimensions
        return {call}
    _moving = {f"(_rows, {', '.join(moving)})" if moving else "_rows"}
    _found = _passed.get(_key)
    if _found is None:
        _result = {call}
        if len(_passed) >= _limit():
            _passed.clear()
        _passed[_key] = [(_moving, _result), _remaking(_result), {f"_moves({', '.join(given)})" if moves else None}]
        return _result
    _last, _remake, _moves_to = _found
    if _last[0] == _moving:
        return _last[1]
    _result = _remake(_rows) if {moved} else {call}
    _found[0] = _moving, _result  # in one step, for other threads
    return _result
"""
    passed: dict[tuple, list] = {}
    space: dict[str, Any] = {"_check": check, "_moves": moves, "_remaking": _remaking}
    space |= {"_passed": passed, "_limit": lambda: LIMIT}
    exec(compile(source, f"<remembered {check.__name__}>", "exec"), space)
    once: Any = functools.wraps(check)(space["once"])
    once.passed = passed
    MADE.append(once)
    return once


def _remaking(result: Any) -> Callable[[int], Any]:
    """What makes a check's result for another number of rows."""
    if type(result) is tuple:
        if [type(spec) for spec in result] == [RowsSpec, RowsSpec]:
            return pair_for_rows(result)
        made = [_remaking(spec) for spec in result]
        if len(made) == 2:  # most of them; a loop over two costs twice what they do
            first, second = made
            return lambda rows: (first(rows), second(rows))
        return lambda rows: tuple([make(rows) for make in made])
    return result.for_rows() if isinstance(result, TensorSpec | SizedComponents) else lambda rows: result
