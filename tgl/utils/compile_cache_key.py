"""Adds the fingerprint of this package's sources to the keys of torch's on-disk compile caches.

Inductor's and AOTAutograd's cache keys contain only the name of an op of ``torch.ops.tgl``, not its derivative, shape
rule or lowering. ``torch.compiler.config.cache_key_tag`` is part of every key, so it is made to return the user's tag
followed by the fingerprint of this package.
"""

from __future__ import annotations

import functools
import uuid
from types import ModuleType
from typing import Any

from . import source_fingerprint
from .post_import import after_import

_MARK = "[tgl "  # start of the suffix added to the user's tag


@functools.cache
def _unshared() -> str:
    """Return a key part unique to this process, for use when sources have changed since the import."""
    return uuid.uuid4().hex


def _own() -> str:
    try:
        return f"{_MARK}{source_fingerprint.of()}]"
    except source_fingerprint.SourcesChangedError:
        return f"{_MARK}{_unshared()}]"


def _compose(config: ModuleType) -> None:
    """Make ``config.cache_key_tag`` always end in the fingerprint, also when it is set later."""
    base: Any = type(config)
    before: property | None = vars(base).get("cache_key_tag")  # of another copy of this package, which has its own ops

    class Config(base):  # type: ignore[misc]
        """The settings of ``torch.compiler``."""

        @property
        def cache_key_tag(self) -> str:
            """The user's tag followed by the fingerprint."""
            tag = base.__getattr__(self, "cache_key_tag") if before is None else before.__get__(self)
            return f"{tag}{_own()}"

        def __setattr__(self, name: str, value: object) -> None:
            if name == "cache_key_tag" and isinstance(value, str):
                value = value.partition(_MARK)[0]  # a tag read from here and restored
            super().__setattr__(name, value)

    ModuleType.__setattr__(config, "__class__", Config)


after_import("torch.compiler.config", _compose)
