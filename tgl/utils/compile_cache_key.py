"""Compiled graphs on disk that belong to the sources of this package that they were traced with.

Inductor's and AOTAutograd's caches know an op of ``torch.ops.tgl`` by its name alone: neither its derivative, nor its
shape rule or lowering is in their keys. ``torch.compiler.config.cache_key_tag`` is in every one, so reading it gives
the user's own tag and the fingerprint of this package.
"""

from __future__ import annotations

import functools
import uuid
from types import ModuleType
from typing import Any

from . import source_fingerprint
from .post_import import after_import

_MARK = "[tgl "  # begins what is added to the user's tag


@functools.cache
def _unshared() -> str:
    """Return a part of keys that no other process has, for one whose sources have changed since the import."""
    return uuid.uuid4().hex


def _own() -> str:
    try:
        return f"{_MARK}{source_fingerprint.of()}]"
    except source_fingerprint.SourcesChangedError:
        return f"{_MARK}{_unshared()}]"


def _compose(config: ModuleType) -> None:
    """Have ``config.cache_key_tag`` end in the fingerprint, whatever it is set to and whenever."""
    base: Any = type(config)
    before: property | None = vars(base).get("cache_key_tag")  # of another copy of this package, which has its own ops

    class Config(base):  # type: ignore[misc]
        """The settings of ``torch.compiler``."""

        @property
        def cache_key_tag(self) -> str:
            """The tag that is set, with the fingerprint."""
            tag = base.__getattr__(self, "cache_key_tag") if before is None else before.__get__(self)
            return f"{tag}{_own()}"

        def __setattr__(self, name: str, value: object) -> None:
            if name == "cache_key_tag" and isinstance(value, str):
                value = value.partition(_MARK)[0]  # a tag that was read here and is put back
            super().__setattr__(name, value)

    ModuleType.__setattr__(config, "__class__", Config)


after_import("torch.compiler.config", _compose)
