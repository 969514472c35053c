"""The Mixture-of-Experts block after the router: dispatch tokens, run the experts, combine their weighted results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.layer_path import LayerPath
from ..ops._library import unobserved_call
from ..ops._preactivation import backward_may_follow
from ..ops.grouped_gemm import grouped_gemm
from ..ops.moe import moe as one_op
from . import routing as _routing
from ._activation import activate
from ._errors import fail, not_a_microbatch, not_a_tensor, shown
from ._expert_path import LAYERS, ONE_OP, expert_path, op_parameters, weights_path
from ._inputs import check_input_dtype, check_row_factor_dtype
from ._token_permutation import LocalPermutation
from .grouped_linear import GroupedLinear
from .grouped_mlp import GroupedMLP
from .router import RouterOutput
from .routing import Routing, combine, dispatch, dispatch_weights, route

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def moe(
    x: Tensor,
    routing: Routing | RouterOutput | Tensor,
    weights: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    kind: str = "swiglu",
    interleaved: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    offset: float | None = None,
    expected_rows: int | None = None,
) -> Tensor:
    """Run a Mixture-of-Experts block after its router: ``dispatch``, ``grouped_mlp`` and ``combine`` as one op.

    The result of token ``s`` is the sum over its top-k slots ``j``, with ``g`` the slot's expert, of
    ``weights[s, j] * (activation(x[s] @ w1[g] + bias1[g]) @ w2[g] + bias2[g])``, with the bits of ``dispatch``,
    ``grouped_mlp`` with the weights as ``probs``, and ``combine``. Differentiable in all floating arguments, twice. The
    backward is two ops. Saved for it are ``x``, the pre-activation ``[T, N]``, the weights and the routing; the rows
    ``[T, H]`` and the activation ``[T, I]`` are recomputed. Where no backward can follow, the pre-activation is not
    written. In a graph compiled for a CPU each GEMM is a separate op, and the compiler fuses the rest and decides what
    is saved.

    Args:
        x: ``[S, H]`` or ``[..., H]``, float64, float32, bfloat16 or float16, at any strides.
        routing: from ``route``, or from ``topk_router``, or the experts chosen by each token, integer ``[S, k]``, as
            ``route`` takes them.
        weights: ``[S, k]``: routing weights, dtype of ``x`` or float32; None for ones, and for those of a
            ``RouterOutput``.
        w1: ``[G, H, N]`` of the dtype of ``x``, at any strides; ``N = 2 I`` for the gated kinds, ``I`` for the others.
        w2: ``[G, I, O]`` of the dtype of ``x``, at any strides.
        bias1, bias2: ``[G, N]`` and ``[G, O]``, dtype of ``x`` or float32.
        kind, interleaved, limit, alpha, offset: the activation, see ``grouped_activation``.
        expected_rows: approximate number of rows of all experts, at least 1; a hint for a ``routing`` with a larger
            capacity (``num_rows`` of ``route``). On a GPU the tile sizes of GEMMs, and whether they gather tokens, then
            follow from this number instead of the capacity. It is no limit: results are right for any number of rows.
            None: the capacity.

    Returns:
        ``[S, O]`` or ``[..., O]`` in the dtype of ``x``.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes, layouts or devices that do not fit.
        RuntimeError: a forward-mode derivative is requested.
    """
    if not isinstance(x, Tensor):
        not_a_tensor("tgl::moe: `x`", x)
    if not isinstance(w1, Tensor):
        not_a_tensor("tgl::moe: `w1`", w1)
    if not isinstance(w2, Tensor):
        not_a_tensor("tgl::moe: `w2`", w2)
    if not isinstance(kind, str):
        fail(f"tgl::moe: `kind` must be the name of an activation, but got {shown(kind)}", TypeError)
    if not isinstance(interleaved, bool):
        fail(f"tgl::moe: `interleaved` must be True or False, but got {shown(interleaved)}", TypeError)
    shape = x.shape
    if len(shape) > 2:
        x = x.flatten(0, -2)
    if isinstance(routing, RouterOutput):
        routing, weights = route_and_weights(routing, weights, w1.shape[0], "tgl::moe: ")
    elif isinstance(weights, Tensor) and weights.dim() > 2:
        weights = weights.flatten(0, -2)
    routing, direct = _routed("moe", x, routing, weights, w1.shape[0], (w1, w2, bias1, bias2))
    activation: dict[str, Any] = {"kind": kind, "interleaved": interleaved}
    for name, value in (("limit", limit), ("alpha", alpha), ("offset", offset), ("expected_rows", expected_rows)):
        if value is not None:  # otherwise see ``grouped_activation``
            if isinstance(value, bool) or not isinstance(value, _NUMBERS):
                fail(f"tgl::moe: `{name}` must be a number or None, but got {shown(value)}", TypeError)
            activation[name] = value
    if direct or weights_path(x.device, w1, w2).taken == ONE_OP:
        y = _by_one_op(direct, routing, x, weights, w1, w2, bias1, bias2, **activation)
        return y if len(shape) == 2 else y.unflatten(0, shape[:-1])
    _check_expected(activation.pop("expected_rows", None))
    if weights is not None:
        check_row_factor_dtype("tgl::moe: `weights`", weights, x)
    probs = None if weights is None else dispatch_weights(weights, routing)
    hidden = grouped_gemm(dispatch(x, routing), w1, routing.offs, bias1)
    hidden = activate(hidden, routing.offs, probs, **activation)
    rows = grouped_gemm(hidden, w2, routing.offs, bias2, None if bias2 is None else probs)
    y = combine(rows, routing)
    return y if len(shape) == 2 else y.unflatten(0, shape[:-1])


def _explain_moe(
    x: Tensor, routing: Routing | Tensor, weights: Tensor | None, w1: Tensor, w2: Tensor, *_: Any, **__: Any
) -> LayerPath:
    """Return the path of a call of ``moe``; ``tgl.explain`` calls this."""
    return weights_path(x.device, w1, w2)


moe.__explain__ = _explain_moe  # type: ignore[attr-defined]


def _check_expected(rows: int | None) -> None:
    """Check ``expected_rows`` as the op does, for calls that run other ops."""
    if rows is None:
        return
    if not isinstance(rows, (int, torch.SymInt)):
        fail(f"tgl::moe: `expected_rows` must be an integer or None, but got {rows!r}", TypeError)
    if rows < 1:
        fail(f"tgl::moe: `expected_rows` must be at least 1, but got {int(rows)}")


class MoE(GroupedMLP):
    """A Mixture-of-Experts block after its router: a ``GroupedMLP`` from tokens to tokens.

    Arguments, parameters, state dicts and the methods for training loops are those of ``GroupedMLP``. Its
    ``forward_offsets`` runs the experts on rows that are already grouped, as after the exchange of expert parallelism.

    The block saves for its backward the tokens ``[S, H]``, the pre-activation ``[T, N]``, the routing and its weights,
    but no rows. (With a recipe also the quantised weights, with ``DelayedScaling`` the scales ``[G]`` of the forward.)
    The backward always recomputes the activation, so that ``recompute_activation`` and ``save_original_input`` change
    nothing.

    A plain block is ``tgl.moe``: one op forward and two backward. With a recipe, weights per expert,
    ``fuse_wgrad_accumulation`` or ``delay_wgrad_compute`` it is one autograd node, with the values of ``dispatch``,
    ``GroupedMLP`` and ``combine``; tokens are gathered while they are quantised. With hooks of ``fc1`` or ``fc2``,
    other modules instead of them, under ``torch.func``, and without a recipe in a graph compiled for a CPU, the block
    runs these three and saves what they save. ``tgl.explain(block, x, ...)`` names the path and the reasons.
    ``delay_wgrad_compute`` holds the same tensors from the backward to ``backward_dw`` as in a ``GroupedMLP``,
    including rows.
    """

    buffers_taken: frozenset[str] = frozenset()
    _expected_rows: int | None = None  # argument of ``tgl.moe``
    _fewest = 1

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        routing: Routing | RouterOutput | Tensor,
        weights: Tensor | None = None,
        is_first_microbatch: bool | Tensor | None = None,
    ) -> Tensor:
        """Run the block.

        Args:
            x: ``[S, H]`` tokens, or ``[..., H]``.
            routing: from ``route``, or from ``topk_router``, or the experts chosen by each token, integer ``[S, k]``
                or ``[..., k]``, as ``route`` takes them.
            weights: ``[S, k]`` or ``[..., k]``: routing weights, dtype of ``x`` or float32; None for ones, and for
                those of a ``RouterOutput``. They multiply the activation and FC2's bias, which equals multiplying the
                expert's result.
            is_first_microbatch: see ``GroupedLinear``.

        Returns:
            The weighted sum of its experts' results for every token, of the shape and dtype of ``x``.

        Raises:
            TypeError, ValueError: an argument does not fit.
        """
        if not isinstance(x, Tensor):
            not_a_tensor("`x`", x)
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, (bool, Tensor)):
            not_a_microbatch(is_first_microbatch)
        if isinstance(routing, RouterOutput):
            routing, weights = route_and_weights(routing, weights, self.num_gemms)
        elif isinstance(weights, Tensor) and weights.dim() > 2:
            weights = weights.flatten(0, -2)
        tokens = x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x
        path = expert_path(self, tokens, tokens=True)
        if path.taken == ONE_OP:
            y = self._by_moe_op(tokens, routing, weights)
        else:
            routing, _ = _routed("MoE", tokens, routing, weights, self.num_gemms)
            probs, offs = None if weights is None else dispatch_weights(weights, routing), routing.offs
            if path.permutes:
                if path.taken == LAYERS and type(self.fc1) is GroupedLinear:
                    self.fc1._check_input(tokens.shape[1], tokens.dtype, tokens.device, "`x`")
                if weights is not None:
                    check_row_factor_dtype("tgl::moe: `weights`", weights, tokens)
                rows = dispatch(tokens, routing)
                y = combine(self.forward_offsets(rows, offs, probs, is_first_microbatch=is_first_microbatch), routing)
            else:
                self.fc1._check_input(tokens.shape[1], tokens.dtype, tokens.device, "`x`")
                y = self._by_one_function(tokens, offs, probs, is_first_microbatch, places=LocalPermutation.of(routing))
        return y if x.dim() == 2 else y.view(x.shape)

    def __explain__(  # type: ignore[override]
        self,
        x: Tensor,
        routing: Routing | RouterOutput | Tensor | None = None,
        weights: Tensor | None = None,
        is_first_microbatch: bool | Tensor | None = None,
    ) -> LayerPath:
        return expert_path(self, x, tokens=True)

    def _by_moe_op(self, tokens: Tensor, routing: Routing | Tensor, weights: Tensor | None) -> Tensor:
        parameters = op_parameters(self)
        routing, direct = _routed("MoE", tokens, routing, weights, self.num_gemms, parameters)
        if tokens.dtype != parameters[0].dtype:
            check_input_dtype(tokens.dtype, parameters[0].dtype, tokens.device, "`x`")
        options: dict[str, Any] = {"kind": self.activation, "interleaved": self.interleaved}
        if self._expected_rows is not None:
            options["expected_rows"] = self._expected_rows
        return _by_one_op(direct, routing, tokens, weights, *parameters, **options)


def _by_one_op(
    direct: bool, routing: Routing, x: Tensor, weights: Tensor | None, *parameters: Tensor | None, **options: Any
) -> Tensor:
    """Call the op ``moe``; ``parameters``: w1, w2, bias1, bias2; ``options``: the activation and ``expected_rows``."""
    w1, w2, *biases = parameters
    source, position, offs, top_k, token = routing
    call = one_op if direct else torch.ops.tgl.moe.default
    operands = x, w1, w2, source, position, token, offs, weights, *biases
    if direct:  # inlined `backward_may_follow`: no trace or transform is active
        keeps = torch.is_grad_enabled() and torch._C._any_requires_grad(*operands)
    else:
        keeps = backward_may_follow(x, w1, w2, weights, *biases)
    y: Tensor = call(*operands, top_k=top_k, compute_h=keeps, **options)[0]
    return y


def flat_choices(router: RouterOutput, weights: Tensor | None, where: str = "") -> tuple[Tensor, Tensor]:
    """Return the experts and the weights of ``router``, both ``[S, k]``; ``weights``, the caller's, must be None."""
    if weights is not None:
        fail(
            f"{where}`weights` must be None beside a RouterOutput, which has them, but got {shown(weights)}", TypeError
        )
    if router.weights.dim() == 2:
        return router.top_k_index, router.weights
    return router.top_k_index.flatten(0, -2), router.weights.flatten(0, -2)


def route_and_weights(
    router: RouterOutput, weights: Tensor | None, num_experts: int, where: str = ""
) -> tuple[Routing, Tensor]:
    """Return the routing and the weights of ``router``; its dropped slots are intended."""
    top_k_index, weights = flat_choices(router, weights, where)
    return route(top_k_index, num_experts, sentinels=True), weights


def _routed(
    where: str,
    x: Tensor,
    routing: Routing | Tensor,
    weights: Tensor | None,
    num_experts: int,
    parameters: tuple[Tensor | None, ...] | None = None,
) -> tuple[Routing, bool]:
    """Return ``routing``, computed with ``route`` if it is a tensor of experts, which must fit ``x`` and ``weights``.

    Also return whether ops of ``parameters`` can bypass the dispatcher, because nothing observes their calls.
    """
    direct = False
    if parameters is not None:
        tensors = (*routing[:3], routing.token) if isinstance(routing, Routing) else (routing,)
        direct = unobserved_call(x, weights, *parameters, *tensors)
    if isinstance(routing, Tensor):
        if direct and routing.dim() == 2:
            routing = _routing.route_directly(routing, num_experts)
        else:
            routing = route(routing, num_experts)
    _routing.check_rows(where, "x", x, routing, "[S, H]")
    if weights is not None:
        _routing.check_weights(where, weights, routing)
    return routing, direct
