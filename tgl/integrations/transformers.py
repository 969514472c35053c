"""Hugging Face transformers: run a model's experts on the grouped ops.

Two lines switch a model, or one when it is loaded::

    tgl.integrations.transformers.register()
    model.set_experts_implementation("tgl")
    # or: AutoModelForCausalLM.from_pretrained(name, experts_implementation="tgl")

Every experts class that carries transformers' ``use_experts_implementation`` decorator is served: gated or plain, with
or without biases, weights ``[G, out, in]`` or transposed, gates side by side, interleaved or of the model's own making,
a norm after each expert, and expert parallelism, whose sentinels (indices of ``num_experts`` and more) cost no GEMM.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..meta import activations
from ..meta.specs import accumulator
from ..meta.table import OnePerName
from ..nn._activation import activate, is_one_op
from ..nn.moe import moe
from ..nn.routing import combine, dispatch, dispatch_both, route
from ..ops import grouped_gemm

NAME = "tgl"

OLDEST = (5, 7)  # the first whose models take a registered implementation
_NEEDS = (
    "tgl.integrations.transformers needs transformers 5.7 or later; install it with "
    "`pip install torch-grouped-linear[transformers]`"
)


def register(name: str = NAME) -> None:
    """Make the grouped ops available to transformers models as an experts implementation.

    Args:
        name: what ``set_experts_implementation`` and ``experts_implementation=`` will call it.

    Raises:
        ImportError: transformers is not installed, or older than 5.7, whose models take no registered implementation.
    """
    experts_module = _experts_module()
    import transformers

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise ImportError(_NEEDS + f", but {transformers.__version__} is installed")
    experts_module.ExpertsInterface.register(name, experts_forward)


def experts_forward(
    experts: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    num_rows: int | None = None,
) -> Tensor:
    """The forward of a transformers experts module; ``register`` is what most callers want.

    Args:
        experts: module of a class decorated with ``use_experts_implementation``.
        hidden_states: ``[S, H]``.
        top_k_index: integer ``[S, k]``: experts of each token. Entries of ``num_experts`` and more are skipped: what
            their weights and the token's row hold, NaN included, reaches neither output nor gradients.
        top_k_weights: ``[S, k]``: routing weights.
        num_rows: see ``tgl.route``.

    Returns:
        ``[S, H]`` in the dtype of ``hidden_states``.
    """
    flags: Any = experts
    routing = route(top_k_index, flags.num_experts, num_rows)
    up, up_bias = (flags.gate_up_proj, "gate_up_proj_bias") if flags.has_gate else (flags.up_proj, "up_proj_bias")
    down = flags.down_proj
    # Unless something nonlinear follows, the routing weight multiplies the activation: free where it is fused, and the
    # backward then needs no copy of the experts' answers.
    early = not getattr(flags, "has_post_expert_norm", False)  # older versions know of no such experts
    hidden, probs, weights = hidden_states.to(up.dtype), None, None
    if early:
        weights = top_k_weights if top_k_weights.dtype == up.dtype else top_k_weights.to(accumulator(up.dtype))
    fused = activation(experts)
    if early and fused is not None and up.dtype == down.dtype and is_one_op(up.device, up, down):
        biases = (getattr(flags, up_bias), flags.down_proj_bias) if flags.has_bias else (None, None)
        matrices = (_matrices(flags, up), _matrices(flags, down))
        return moe(hidden, routing, weights, *matrices, *biases, **fused.parameters(experts)).to(hidden_states.dtype)
    if weights is not None:
        rows, probs = dispatch_both(hidden, weights, routing)
    else:
        rows = dispatch(hidden, routing)
    rows = _linear(flags, rows, up, up_bias, routing.offs)
    if fused is not None:
        rows = activate(rows, routing.offs, probs, **fused.parameters(experts))
    else:
        rows = flags._apply_gate(rows) if flags.has_gate else flags.act_fn(rows)
        rows = rows * probs[:, None] if probs is not None else rows
    rows = _linear(flags, rows, down, "down_proj_bias", routing.offs, probs)
    if early:
        return combine(rows, routing).to(hidden_states.dtype)
    late = top_k_weights.masked_fill(top_k_index >= flags.num_experts, 0)
    return combine(flags.post_expert_norm(rows), routing, late).to(hidden_states.dtype)


def _linear(
    flags: Any, rows: Tensor, weight: Tensor, bias_name: str, offs: Tensor, probs: Tensor | None = None
) -> Tensor:
    bias = getattr(flags, bias_name) if flags.has_bias else None
    scale = probs if bias is not None else None
    return grouped_gemm(rows.to(weight.dtype), _matrices(flags, weight), offs, bias, scale)


def _matrices(flags: Any, weight: Tensor) -> Tensor:
    return weight if flags.is_transposed else weight.transpose(1, 2)


# --- activations ------------------------------------------------------------------------------------------------------


class Activation(NamedTuple):
    """The arguments of ``grouped_activation`` for what an experts class computes between its two projections.

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
        """Keyword arguments of ``grouped_activation`` for one module."""
        given: dict[str, Any] = {"kind": self.kind, "interleaved": self.interleaved}
        for name in activations.named(self.kind).constants:
            value = getattr(self, name)
            given[name] = float(getattr(experts, value) if isinstance(value, str) else value)
        return given


_OSS = Activation("clamped_qgeglu", limit="limit", alpha="alpha")
_SILU_CLAMPED = Activation("clamped_qgeglu", limit="swiglu_limit", alpha=1.0, offset=0.0)

# Gates written by model authors that are exactly one of our activations, by the digest of their code: a class's name
# would go on matching after the code behind it has changed. The flag: this holds only if ``act_fn`` is SiLU.
_KNOWN_GATES: dict[str, tuple[Activation, bool]] = {
    "e039896ebc06a9f1": (_OSS._replace(interleaved=True), False),  # gpt_oss
    "3b8ad4835c2d3166": (_OSS, False),  # openai_privacy_filter
    "2c22b75bc99d5739": (_OSS._replace(limit="swiglu_limit", alpha="swiglu_alpha"), False),  # minimax_m3_vl
    "04ba4e2f1a2dd0d2": (_SILU_CLAMPED, False),  # glm5_next, hy_v4
    "0ba53b7e8ab0a564": (_SILU_CLAMPED._replace(limit="limit"), True),  # deepseek_v4
    "5dabfe75f4c66c22": (Activation("swiglu"), True),  # beam, whose float32 detour is ours anyway
}


# The elementwise functions that are a gate of ours, by its name: classes of ``torch.nn`` and of transformers, some of
# them not in every version. ``torch.nn.GELU`` is two functions, told apart by its argument.
_FUNCTIONS = OnePerName(
    {known.gate.name for known in activations.TABLE.values()},
    "functions of gates, integrations/transformers.py",
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
for _known, _ in _KNOWN_GATES.values():
    activations.named(_known.kind)


def activation(experts: nn.Module) -> Activation | None:
    """The fused activation that serves ``experts``, or None: then the module's own gate or ``act_fn`` runs."""
    act_fn = getattr(experts, "act_fn", None)
    function = act_fn if isinstance(act_fn, FunctionType | BuiltinFunctionType) else type(act_fn)
    variant = act_fn.approximate if isinstance(act_fn, nn.GELU) else None
    return _activation(type(experts), bool(experts.has_gate), function, variant)


@torch.compiler.assume_constant_result
def _activation(experts: Any, has_gate: bool, function: Any, variant: str | None) -> Activation | None:
    return _recognise(experts, has_gate, function, variant)


@functools.cache
def _recognise(experts: Any, has_gate: bool, function: Any, variant: str | None) -> Activation | None:
    name = _gate_name(function, variant)
    if has_gate and experts._apply_gate is not _experts_module()._default_apply_gate:
        known, needs_silu = _KNOWN_GATES.get(_digest(experts._apply_gate), (None, False))
        return known if name == activations.SILU.name or not needs_silu else None
    return next((Activation(a.name) for a in activations.TABLE.values() if _is(a, name, has_gate)), None)


def _is(found: activations.Activation, gate: str | None, gated: bool) -> bool:
    """Whether ``found`` is that function of its gate alone, times the linear half as it is if ``gated``."""
    return found.gate.name == gate and found.linear is (activations.IDENTITY if gated else None)


def _gate_name(function: Any, variant: str | None) -> str | None:
    """The gate of ours that a class or a function is; None for others. ``variant`` is ``torch.nn.GELU``'s argument."""
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
    """Digest of what a function computes: its source without comments and layout; empty if there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def _experts_module() -> Any:
    try:
        from transformers.integrations import moe
    except ImportError as error:
        raise ImportError(_NEEDS) from error
    return moe
