"""Hugging Face transformers: run a model's experts on the grouped ops.

Two lines switch a model, or one when it is loaded::

    tgl.integrations.transformers.register()
    model.set_experts_implementation("tgl")
    # or: AutoModelForCausalLM.from_pretrained(name, experts_implementation="tgl")

Every experts class that carries transformers' ``use_experts_implementation`` decorator is served: gated or plain, with
or without biases, weights ``[G, out, in]`` or transposed, gates side by side, interleaved or of the model's own making,
a norm after each expert, and expert parallelism, whose sentinels (indices of ``num_experts`` and more) cost no GEMM.
Experts of FP8 checkpoints are served as well: weights in blocks of 128 x 128 or 1 x 32, or with one scale per matrix,
and tokens quantised dynamically or with static scales. Those of MXFP4 checkpoints of gpt-oss stay packed when a model
is loaded with ``experts_implementation="tgl"``. Weights that torchao has quantised by a weight-only configuration are
decoded by every call.

``layer_options``, ``to_layer`` and ``from_layer`` make a ``tgl.MoELayer`` of a layer of Mixtral, Qwen3-MoE, DeepSeek-V3
or gpt-oss, router and shared expert included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..meta.specs import accumulator
from ..nn._activation import activate
from ..nn._errors import fail
from ..nn._expert_path import ONE_OP, weights_path
from ..nn._external_quantization import PLAIN, values_of
from ..nn._low_rank import LowRank, activated_product_and_low_rank, add_low_rank, product_and_low_rank
from ..nn.moe import moe
from ..nn.routing import combine, dispatch, dispatch_both, route
from ..ops import grouped_gemm
from . import _transformers_fp8 as fp8
from ._packed_experts import PackedExperts
from ._transformers_gates import activation
from ._transformers_layers import from_layer, layer_options, to_layer

__all__ = ["NAME", "activation", "experts_forward", "from_layer", "layer_options", "register", "serves", "to_layer"]

NAME = "tgl"

OLDEST = (5, 7)  # the first whose models take a registered implementation
_functions: Any = {}  # transformers' experts implementations by name, once one of them is tgl's
_NEEDS = (
    "tgl.integrations.transformers needs transformers 5.7 or later; install it with "
    "`pip install torch-grouped-linear[transformers]`"
)


def register(name: str = NAME) -> None:
    """Make the grouped ops available to transformers models as an experts implementation, of quantised experts too.

    Args:
        name: its name for ``set_experts_implementation`` and ``experts_implementation=``.

    Raises:
        ImportError: transformers is not installed, or older than 5.7, whose models take no registered implementation.
    """
    global _functions
    experts_module = _experts_module()
    import transformers

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < OLDEST:
        raise ImportError(_NEEDS + f", but {transformers.__version__} is installed")
    experts_module.ExpertsInterface.register(name, experts_forward)
    _functions = experts_module.ALL_EXPERTS_FUNCTIONS
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface

    from . import _transformers_mxfp4

    FP8ExpertsInterface.register(name, experts_forward)
    _transformers_mxfp4.register(name)


def experts_forward(
    experts: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    num_rows: int | None = None,
    low_rank: Mapping[str, Sequence[LowRank]] | None = None,
) -> Tensor:
    """Run a transformers experts module; most callers use ``register`` instead.

    Args:
        experts: module of a class decorated with ``use_experts_implementation``, ``FP8Experts`` included. Those have
            frozen weights: the gradients are of ``hidden_states`` and ``top_k_weights``, through the dequantised
            weights. Their backward holds a projection's ``[G, N, K]`` in the dtype of ``hidden_states`` for a while.
        hidden_states: ``[S, H]``; of float32, bfloat16 or float16 for ``FP8Experts``.
        top_k_index: integer ``[S, k]``: experts of each token. Entries of ``num_experts`` and more are skipped: what
            their weights and the token's row hold, NaN included, reaches neither output nor gradients.
        top_k_weights: ``[S, k]``: routing weights.
        num_rows: see ``tgl.route``.
        low_rank: updates of the matrices, by the names of their parameters; passed by ``tgl.integrations.peft``.

    Returns:
        ``[S, H]`` in the dtype of ``hidden_states``.

    Raises:
        TypeError, ValueError, NotImplementedError: ``FP8Experts`` in a form that is not served; the message names it.
    """
    if fp8.is_quantized(experts):
        if low_rank:
            fail(f"`low_rank` must be None for FP8 experts, but got updates of {', '.join(low_rank)}")
        return fp8.forward(experts, hidden_states, top_k_index, top_k_weights, num_rows)
    flags: Any = experts
    routing = route(top_k_index, flags.num_experts, num_rows, sentinels=True)
    up_name = "gate_up_proj" if flags.has_gate else "up_proj"
    up, down = getattr(flags, up_name), flags.down_proj
    if type(up) not in PLAIN or type(down) not in PLAIN:
        up, down = values_of(up), values_of(down)
    # Unless something nonlinear follows, the routing weight multiplies the activation: free where it is fused, and the
    # backward then needs no copy of the experts' answers.
    early = not getattr(flags, "has_post_expert_norm", False)  # older versions know of no such experts
    hidden, probs, weights = hidden_states.to(up.dtype), None, None
    if early:
        weights = top_k_weights if top_k_weights.dtype == up.dtype else top_k_weights.to(accumulator(up.dtype))
    fused = activation(experts)
    whole = early and not low_rank and up.dtype == down.dtype
    if whole and fused is not None and weights_path(up.device, up, down).taken == ONE_OP:
        biases = (getattr(flags, f"{up_name}_bias"), flags.down_proj_bias) if flags.has_bias else (None, None)
        matrices = (_matrices(flags, up), _matrices(flags, down))
        return moe(hidden, routing, weights, *matrices, *biases, **fused.parameters(experts)).to(hidden_states.dtype)
    if weights is not None:
        rows, probs = dispatch_both(hidden, weights, routing)
    else:
        rows = dispatch(hidden, routing)
    updates = low_rank or {}
    first = updates.get(up_name, ())
    if fused is not None and len(first) == 1:
        bias = getattr(flags, f"{up_name}_bias") if flags.has_bias else None
        operands = rows.to(up.dtype), _matrices(flags, up), first[0], routing.offs, bias, probs
        rows = activated_product_and_low_rank(*operands, **fused.parameters(experts))
    else:
        rows = _linear(flags, rows, up_name, up, routing.offs, first)
        if fused is not None:
            rows = activate(rows, routing.offs, probs, **fused.parameters(experts))
        else:
            rows = flags._apply_gate(rows) if flags.has_gate else flags.act_fn(rows)
            rows = rows * probs[:, None] if probs is not None else rows
    rows = _linear(flags, rows, "down_proj", down, routing.offs, updates.get("down_proj", ()), probs)
    if early:
        return combine(rows, routing).to(hidden_states.dtype)
    late = top_k_weights.masked_fill(top_k_index >= flags.num_experts, 0)
    return combine(flags.post_expert_norm(rows), routing, late).to(hidden_states.dtype)


def serves(experts: nn.Module) -> bool:
    """Return whether tgl runs a transformers experts module, with its low-rank updates.

    Nothing is imported, since Dynamo of PyTorch 2.11 traces no import from a package that loads its modules lazily.
    """
    if isinstance(experts, PackedExperts):
        return True
    name = experts.config._experts_implementation  # type: ignore[union-attr]
    return _functions.get(name) is experts_forward


def _linear(
    flags: Any,
    rows: Tensor,
    name: str,
    weight: Tensor,
    offs: Tensor,
    updates: Sequence[LowRank],
    probs: Tensor | None = None,
) -> Tensor:
    bias = getattr(flags, f"{name}_bias") if flags.has_bias else None
    scale = probs if bias is not None else None
    rows = rows.to(weight.dtype)
    if not updates:
        return grouped_gemm(rows, _matrices(flags, weight), offs, bias, scale)
    y = product_and_low_rank(rows, _matrices(flags, weight), updates[0], offs, bias, scale)
    for update in updates[1:]:
        y = add_low_rank(y, rows, update, offs)
    return y


def _matrices(flags: Any, weight: Tensor) -> Tensor:
    return weight if flags.is_transposed else weight.transpose(1, 2)


def _experts_module() -> Any:
    try:
        from transformers.integrations import moe
    except ImportError as error:
        raise ImportError(_NEEDS) from error
    return moe
