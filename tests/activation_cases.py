"""Every activation of the table, for tests to run through."""

from __future__ import annotations

from typing import Any

from tgl import backends
from tgl.meta.activations import TABLE
from tgl.meta.specs import TensorSpec, accumulator
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


def back_to_hidden(operands, act, *, params):
    """What serves ``grouped_gemm_dactivation``, with the activation's own result if ``act`` is its spec.

    Returns ``dh``, ``dprobs`` and that result or None.
    """
    h, probs = operands[2], operands[4]
    sums = TensorSpec((0 if probs is None else h.shape[0],), accumulator(h.dtype), h.device)
    wanted = {"dh": TensorSpec(tuple(h.shape), h.dtype, h.device), "dprobs": sums, "act": act}
    made = backends.produce("grouped_gemm_dactivation", h.device, wanted, operands, params=params)
    return made["dh"], made["dprobs"], made["act"]
