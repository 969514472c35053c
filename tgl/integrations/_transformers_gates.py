"""The mapping from an experts class of transformers to the ``grouped_activation`` between its two projections."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import warnings
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..meta import activations
from ..meta.table import OnePerName
from ..nn._submodules import hooked


class GateActivation(NamedTuple):
    """The arguments of ``grouped_activation`` for the function that an experts class computes between its projections.

    Attributes:
        kind: as in ``grouped_activation``.
        interleaved: as in ``grouped_activation``.
        limit, alpha, offset: constants that the activation depends on: a number, or the name of the module's attribute.
    """

    kind: str
    interleaved: bool = False
    limit: float | str = 7.0
    alpha: float | str = 1.702
    offset: float | str = 1.0

    def parameters(self, experts: nn.Module) -> dict[str, Any]:
        """Return the keyword arguments of ``grouped_activation`` for one module."""
        given: dict[str, Any] = {"kind": self.kind, "interleaved": self.interleaved}
        for name in activations.named(self.kind).constants:
            value = getattr(self, name)
            given[name] = float(getattr(experts, value) if isinstance(value, str) else value)
        return given


_OSS = GateActivation("clamped_qgeglu", limit="limit", alpha="alpha")
_SILU_CLAMPED = GateActivation("clamped_qgeglu", limit="swiglu_limit", alpha=1.0, offset=0.0)

# Gates of model authors that are exactly one of our activations, by the digest of their code: a class's name would
# still match after its code has changed. The flag: this holds only if ``act_fn`` is SiLU.
_KNOWN_GATES: dict[str, tuple[GateActivation, bool]] = {
    "e039896ebc06a9f1": (_OSS._replace(interleaved=True), False),  # gpt_oss
    "3b8ad4835c2d3166": (_OSS, False),  # openai_privacy_filter
    "2c22b75bc99d5739": (_OSS._replace(limit="swiglu_limit", alpha="swiglu_alpha"), False),  # minimax_m3_vl
    "04ba4e2f1a2dd0d2": (_SILU_CLAMPED, False),  # glm5_next, hy_v4
    "0ba53b7e8ab0a564": (_SILU_CLAMPED._replace(limit="limit"), True),  # deepseek_v4
    "5dabfe75f4c66c22": (GateActivation("swiglu"), True),  # beam, whose float32 detour is ours anyway
}

# The gate of ``FP8Experts`` is every model's: what it computes follows from the attributes that are not None. With none
# of them it is the default gate. The digests are of its code in 5.7, 5.17 and 5.24.
_FP8_GATE_CODE = frozenset({"0e3cb141c99bc097", "246a6e764241c11b", "134913c7bcd5f8e2"})
_FP8_ATTRIBUTES = ("gate_softcap", "swiglu_alpha", "limit")
_FP8_GATE: dict[tuple[str, ...], tuple[GateActivation, bool]] = {
    ("swiglu_alpha", "limit"): (_OSS._replace(alpha="swiglu_alpha"), False),
    ("limit",): (_SILU_CLAMPED._replace(limit="limit"), True),
}


# The elementwise functions that are a gate of ours, by its name: classes of ``torch.nn`` and of transformers, some of
# them not in every version. ``torch.nn.GELU`` is two functions, told apart by its argument.
_FUNCTIONS = OnePerName(
    {known.gate.name for known in activations.TABLE.values()},
    "functions of gates, integrations/_transformers_gates.py",
    {
        "silu": ("SiLU", "SiLUActivation"),
        "clamped_silu": (),  # part of gates of the models' own
        "gelu": ("GELUActivation",),
        "gelu_pytorch_tanh": (
            "GELUTanh",
            "PytorchGELUTanh",
            "NewGELUActivation",
            "FastGELUActivation",
            "AccurateGELUActivation",
        ),
        "relu": ("ReLU",),
        "relu2": ("ReLUSquaredActivation",),
    },
)
for _known, _ in (*_KNOWN_GATES.values(), *_FP8_GATE.values()):
    activations.named(_known.kind)


def activation(experts: nn.Module) -> GateActivation | None:
    """The fused activation that serves ``experts``, or None: then the module's own gate or ``act_fn`` runs."""
    kind: Any = type(experts)
    if experts.has_gate and _is_replaced(experts, "_apply_gate"):
        return _unknown(kind, "an instance")  # a gate of this instance alone, which may read anything
    act_fn = getattr(experts, "act_fn", None)
    function: Any = act_fn if isinstance(act_fn, FunctionType | BuiltinFunctionType) else type(act_fn)
    if isinstance(act_fn, nn.Module) and (hooked(act_fn) or _is_replaced(act_fn, "forward")):
        function = _Changed
    variant = act_fn.approximate if isinstance(act_fn, nn.GELU) else None
    given = tuple([name for name in _FP8_ATTRIBUTES if getattr(experts, name, None) is not None])
    return _activation(kind, kind._apply_gate if experts.has_gate else None, function, variant, given)


def _is_replaced(module: nn.Module, name: str) -> bool:
    """Return whether an instance overrides a method of its class.

    Dynamo guards on a method that is read, and not on a look into ``vars`` alone.
    """
    getattr(module, name)
    return name in vars(module)


class _Changed:
    """The type of an ``act_fn`` whose call does more than its class's forward."""


@torch.compiler.assume_constant_result
def _activation(
    experts: Any, gate: Any, function: Any, variant: str | None, given: tuple[str, ...]
) -> GateActivation | None:
    return _recognise(experts, gate, function, variant, given)


@functools.cache
def _recognise(
    experts: Any, gate: Any, function: Any, variant: str | None, given: tuple[str, ...]
) -> GateActivation | None:
    """Return the activation of a class with such attributes; the first time that there is none, a warning reports it.

    ``gate`` is the class's ``_apply_gate``, part of the key because it may be replaced; None for plain experts.
    """
    name = _gate_name(function, variant)
    code = _digest(gate) if gate is not None and gate is not default_gate() else None
    if code is None or (code in _FP8_GATE_CODE and not given):
        found = next(
            (GateActivation(a.name) for a in activations.TABLE.values() if _is(a, name, gate is not None)), None
        )
    else:
        known = _FP8_GATE.get(given) if code in _FP8_GATE_CODE else _KNOWN_GATES.get(code)
        fused, needs_silu = known or (None, False)
        found = fused if name == activations.SILU.name or not needs_silu else None
    if found is None:
        _warn(experts, experts.__name__)
    return found


@torch.compiler.assume_constant_result
def _unknown(experts: Any, subject: str) -> None:
    _warn(experts, subject)


@functools.cache
def _warn(experts: Any, subject: str) -> None:
    """Warn, once for each class and subject, that code of the model's own runs between the projections."""
    who = subject if subject == experts.__name__ else f"{subject} of {experts.__name__}"
    warnings.warn(
        f"tgl: no activation of tgl computes what {who} does between its projections; its own code runs there, which "
        "is slower",
        stacklevel=4,
    )


def _is(found: activations.Activation, gate: str | None, gated: bool) -> bool:
    """Return whether ``found`` is that function of its gate alone, times the plain linear half if ``gated``."""
    return found.gate.name == gate and found.linear is (activations.IDENTITY if gated else None)


def _gate_name(function: Any, variant: str | None) -> str | None:
    """Return the name of our gate that a class or function is, else None; ``variant`` is that of ``torch.nn.GELU``."""
    from transformers import activations as theirs

    if function is nn.GELU:
        return {"none": activations.GELU, "tanh": activations.GELU_TANH}[variant or ""].name
    for found in (activations.SILU, activations.GELU, activations.RELU):
        if function is getattr(nn.functional, found.name):
            return found.name
    for name, classes in _FUNCTIONS.items():
        if any(function in (getattr(nn, known, None), getattr(theirs, known, None)) for known in classes):
            return name
    return None


def _digest(function: Any) -> str:
    """Return a digest of a function's source without comments and layout; empty if there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def default_gate() -> Any:
    """Return the gate that ``use_experts_implementation`` gives a class without one."""
    from transformers.integrations import moe

    return moe._default_apply_gate
