"""Every activation of the table, for tests to run through."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgl import backends
from tgl.meta.activations import TABLE
from tgl.meta.specs import TensorSpec, accumulator
from tgl.meta.table import OnePerName
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


UNIT = 2.0**-24  # what one rounding to float32 changes, relative


class Roundings(NamedTuple):
    """Roundings to float32 on the way from ``g`` to ``p A(g) L(u)``, each of one unit at most.

    Attributes:
        results: those that change the result by as much. L's own sum and the products with L and p are three of them.
            A sigmoid is an exponential (1 unit of the emulator, 2 of a vector library on a CPU), a sum and a quotient;
            GELU's tail is a polynomial of 4 units, an exponential and two products, or an ``erfc`` of 3.
        argument: those that change the argument of an exponential, by as much; None: there is no exponential. A
            constant that is no float32 counts.
    """

    results: int
    argument: int | None


ROUNDINGS = OnePerName(
    dict.fromkeys(activation.gate.name for activation in TABLE.values()),
    "ROUNDINGS in tests/activation_cases.py",
    {
        "silu": Roundings(4 + 1 + 2, 0),
        "clamped_silu": Roundings(4 + 1 + 3, 2),  # alpha, and its product with g
        "gelu": Roundings(7 + 1 + 2, 2),  # g^2, or sqrt(1/2) and its product with g
        "gelu_pytorch_tanh": Roundings(4 + 1 + 2, 5),  # (TANH_CUBIC g^2 + TANH_LINEAR) g, all of them along the cubic
        "relu": Roundings(2, None),
        "relu2": Roundings(1 + 2, None),
    },
)
"""By the name of the gate."""


def relative_error(params: Params, g: Tensor, a: Tensor, a1: Tensor, *, fast: bool = False) -> Tensor:
    """Bound the relative error of ``p A(g) L(u)`` from roundings to float32; A and A' are ``a`` and ``a1``.

    A is g times a function F of an argument z(g), or has no z. A relative error of z changes F by that times
    ``z F'(z) / F``. That is at most ``g A' / A - 1`` by its amount, as z grows as g or faster: GELU's ``g^2`` twice as
    fast, with half the effect, and a cubic up to three times.

    Args:
        fast: the argument of the exponential is a product with a rounded constant, for results of 16 bits.
    """
    results, argument = ROUNDINGS[params.activation.gate.name]
    if argument is None:
        return torch.full_like(a, UNIT * results)
    condition = (g * a1 / a).abs().nan_to_num(nan=1.0, posinf=1.0)
    return UNIT * (results + (argument + 2 * fast) * (condition + 1))


def width(kind: str, columns: int) -> int:
    """Columns that go into an activation, for those that come out."""
    return TABLE[kind].width(columns)


def back_to_hidden(operands, act, *, params):
    """Run ``grouped_gemm_dactivation``, with the activation's own result if ``act`` is its spec.

    Returns ``dh``, ``dprobs`` and that result or None.
    """
    h, probs = operands[2], operands[4]
    sums = TensorSpec((0 if probs is None else h.shape[0],), accumulator(h.dtype), h.device)
    wanted = {"dh": TensorSpec(tuple(h.shape), h.dtype, h.device), "dprobs": sums, "act": act}
    made = backends.produce("grouped_gemm_dactivation", h.device, wanted, operands, params=params)
    return made["dh"], made["dprobs"], made["act"]
