"""Every activation of the table, for tests to run through."""

from __future__ import annotations

from typing import Any

from tgl.meta.activations import TABLE
from tgl.ops.grouped_activation import Params

CONSTANTS = {"limit": 2.0, "alpha": 1.5, "offset": 0.5}  # a limit that normal samples cross


def cases() -> dict[str, dict[str, Any]]:
    """Keyword arguments by name: every activation, and with alternating halves every gated one."""
    found: dict[str, dict[str, Any]] = {}
    for name, activation in TABLE.items():
        found[name] = {"kind": name, **{k: v for k, v in CONSTANTS.items() if k in activation.constants}}
        if activation.gated:
            found[f"{name} interleaved"] = {**found[name], "interleaved": True}
    return found


CASES = cases()
PARAMS = {name: Params(**options) for name, options in CASES.items()}


def width(kind: str, columns: int) -> int:
    """Columns that go into an activation, for those that come out."""
    return TABLE[kind].width(columns)
