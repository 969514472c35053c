"""Run a function after a module is imported, without importing an expensive module for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def after_import(name: str, work: Callable[[Any], None]) -> None:
    """Call ``work(module)`` once the module ``name`` is loaded: now if it is, else when it is first imported."""
    if name in sys.modules:
        work(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, work))


class _Finder(MetaPathFinder):
    """Finder that delegates to the other finders and calls ``work`` after the module is executed."""

    def __init__(self, name: str, work: Callable[[Any], None]) -> None:
        self._name, self._work = name, work

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader, load = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._work(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
