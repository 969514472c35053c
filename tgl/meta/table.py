"""Tables with exactly one entry for every name of an axis, checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn, TypeVar

V = TypeVar("V")


class OnePerName(dict[str, V]):
    """A dict with one entry for every name of an axis; a look-up that misses raises ``ValueError``.

    Args:
        axis: the names, such as ``formats.FORMATS``.
        what: what the entries are and where they stand, for the message.
        entries: by name.

    Raises:
        ValueError: a name of the axis without an entry, or an entry without a name.
    """

    def __init__(self, axis: Iterable[str], what: str, entries: Mapping[str, V]) -> None:
        super().__init__(entries)
        self.what = what
        names = list(axis)
        for name in names:
            if name not in entries:
                self.__missing__(name)
        for name in entries:
            if name not in names:
                raise ValueError(f"tgl: {what} must be of {', '.join(names)}, but there is one of {name!r}")

    def __missing__(self, name: str) -> NoReturn:
        raise ValueError(f"tgl: {self.what} must have an entry for {name!r}, but has only {', '.join(self)}")
