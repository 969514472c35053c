"""The Mixture-of-Experts block behind the router: tokens to rows of experts, the experts, and their weighted sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import offload
from ..ops._hidden import backward_may_follow
from ..ops._library import unobserved_call
from ..ops.grouped_gemm import grouped_gemm
from ..ops.moe import moe as one_op
from . import routing as _routing
from ._activation import activate, is_one_op
from ._errors import fail, not_a_microbatch, not_a_tensor, shown
from ._inputs import check_input_dtype
from ._modules import to_be_called
from ._places import Places
from ._transforms import compiled_for_cpu
from .grouped_mlp import GroupedMLP
from .routing import Routing, combine, dispatch, dispatch_weights, route

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def moe(
    x: Tensor,
    routing: Routing | Tensor,
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
    """Run a Mixture-of-Experts block behind its router: ``dispatch``, ``grouped_mlp`` and ``combine`` as one op.

    For token ``s`` the sum over its choices ``j``, with ``g`` the expert chosen, of
    ``weights[s, j] * (activation(x[s] @ w1[g] + bias1[g]) @ w2[g] + bias2[g])``, with the bits of ``dispatch``,
    ``grouped_mlp`` with the weights as ``probs``, and ``combine``. Differentiable in all floating arguments, twice. The
    backward is two ops. It holds ``x``, what goes into the activation ``[T, N]``, the weights and the routing; the
    rows ``[T, H]`` and the activation's result ``[T, I]`` are formed again. Where no backward can follow, what goes
    into the activation is not written. In a graph compiled for a CPU the GEMMs are ops of their own, and the compiler
    fuses the rest and decides what is held.

    Args:
        x: ``[S, H]``, float64, float32, bfloat16 or float16, at any strides.
        routing: from ``route``, or the experts chosen by each token, integer ``[S, k]``, as ``route`` takes them.
        weights: ``[S, k]``: routing weights, dtype of ``x`` or float32; None for ones.
        w1: ``[G, H, N]`` of the dtype of ``x``, at any strides; ``N = 2 I`` for the gated kinds, ``I`` for the others.
        w2: ``[G, I, O]`` of the dtype of ``x``, at any strides.
        bias1, bias2: ``[G, N]`` and ``[G, O]``, dtype of ``x`` or float32.
        kind, interleaved, limit, alpha, offset: the activation, see ``grouped_activation``.
        expected_rows: how many rows all experts have, about, at least 1; for a ``routing`` with room for more (``rows``
            of ``route``). On a GPU tilings of GEMMs, and whether they read tokens by an index, then follow from this
            number and not from the room. It limits nothing: results are right for any number of rows. None: as many as
            there is room for.

    Returns:
        ``[S, O]`` in the dtype of ``x``.

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
    direct = _is_direct(routing, x, weights, w1, w2, bias1, bias2)
    routing = routed(routing, w1.shape[0], direct)
    _routing.check_rows("moe", "x", x, routing, "[S, H]")
    if weights is not None:
        _routing.check_weights("moe", weights, routing)
    activation: dict[str, Any] = {"kind": kind, "interleaved": interleaved}
    for name, value in (("limit", limit), ("alpha", alpha), ("offset", offset), ("expected_rows", expected_rows)):
        if value is not None:  # otherwise see ``grouped_activation``
            if isinstance(value, bool) or not isinstance(value, _NUMBERS):
                fail(f"tgl::moe: `{name}` must be a number or None, but got {shown(value)}", TypeError)
            activation[name] = value
    if direct or is_one_op(x.device, w1, w2):
        return _by_one_op(direct, routing, x, weights, w1, w2, bias1, bias2, **activation)
    _check_expected(activation.pop("expected_rows", None))
    probs = None if weights is None else dispatch_weights(weights, routing)
    hidden = grouped_gemm(dispatch(x, routing), w1, routing.offs, bias1)
    hidden = activate(hidden, routing.offs, probs, **activation)
    rows = grouped_gemm(hidden, w2, routing.offs, bias2, None if bias2 is None else probs)
    return combine(rows, routing)


def _check_expected(rows: int | None) -> None:
    """What the op checks, where it is not what runs."""
    if rows is None:
        return
    if not isinstance(rows, (int, torch.SymInt)):
        fail(f"tgl::moe: `expected_rows` must be an integer or None, but got {rows!r}", TypeError)
    if rows < 1:
        fail(f"tgl::moe: `expected_rows` must be at least 1, but got {int(rows)}")


class MoE(GroupedMLP):
    """A Mixture-of-Experts block behind its router: a ``GroupedMLP`` from tokens to tokens.

    Arguments, parameters, state dicts and what training loops call are those of ``GroupedMLP``. Its ``forward_offsets``
    runs the experts on rows that are grouped already, as behind the exchange of expert parallelism.

    The block holds for its backward the tokens ``[S, H]``, what goes into the activation ``[T, N]``, the routing and
    its weights: no rows. (And what a recipe has made of the weights, with ``DelayedScaling`` the scales ``[G]`` of the
    forward.) The backward forms the activation's result again in any case, so that ``recompute_activation`` and
    ``save_original_input`` change nothing.

    A plain block is ``tgl.moe``: one op forward and two backward. With a recipe, weights per expert,
    ``fuse_wgrad_accumulation`` or ``delay_wgrad_compute`` it is one node of autograd, with the values of ``dispatch``,
    ``GroupedMLP`` and ``combine``; what reads quantised rows quantises tokens by an index. The block is these three,
    and holds what they hold, with hooks of ``fc1`` or ``fc2`` or other modules in their place, under ``torch.func``,
    and without a recipe in a graph compiled for a CPU. ``delay_wgrad_compute`` holds from the backward to
    ``backward_dw`` what it does in a ``GroupedMLP``, rows among it.
    """

    buffers_taken: frozenset[str] = frozenset()
    _expected_rows: int | None = None  # of ``tgl.moe``
    _fewest = 1

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        routing: Routing | Tensor,
        weights: Tensor | None = None,
        is_first_microbatch: bool | Tensor | None = None,
    ) -> Tensor:
        """Run the block.

        Args:
            x: ``[S, H]`` tokens, or ``[..., H]``.
            routing: from ``route``, or the experts chosen by each token, integer ``[S, k]``, as ``route`` takes them.
            weights: ``[S, k]``: routing weights, dtype of ``x`` or float32; None for ones. They multiply the activation
                and FC2's bias, which is the expert's whole result times the weight.
            is_first_microbatch: see ``GroupedLinear``.

        Returns:
            The shape and dtype of ``x``: for every token the weighted sum of what its experts answer.

        Raises:
            TypeError, ValueError: an argument does not fit.
        """
        if not isinstance(x, Tensor):
            not_a_tensor("`x`", x)
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, (bool, Tensor)):
            not_a_microbatch(is_first_microbatch)
        routing = routed(routing, self.num_gemms)
        tokens = x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x
        _routing.check_rows("MoE", "x", tokens, routing, "[S, H]")
        if weights is not None:
            _routing.check_weights("MoE", weights, routing)
        fc1, fc2 = self.fc1, self.fc2
        layers_called = to_be_called(fc1) or to_be_called(fc2)
        if not layers_called and self._is_one_op(fc1, fc2, x.device):
            w1, w2 = fc1.weight.transpose(1, 2), fc2.weight.transpose(1, 2)
            if x.dtype != w1.dtype:
                check_input_dtype(x.dtype, w1.dtype, x.device, "`x`")
            options: dict[str, Any] = {"kind": self.activation, "interleaved": self.interleaved}
            if self._expected_rows is not None:
                options["expected_rows"] = self._expected_rows
            biases = fc1.bias, fc2.bias
            direct = _is_direct(routing, tokens, weights, w1, w2, *biases)
            y = _by_one_op(direct, routing, tokens, weights, w1, w2, *biases, **options)
        else:
            probs, offs = None if weights is None else dispatch_weights(weights, routing), routing.offs
            if not layers_called and self._is_one_function(tokens):
                fc1._check_input(tokens.shape[1], tokens.dtype, tokens.device, "`x`")
                y = self._by_one_function(tokens, offs, probs, is_first_microbatch, places=Places.of(routing))
            else:
                rows = dispatch(tokens, routing)
                y = combine(self.forward_offsets(rows, offs, probs, is_first_microbatch=is_first_microbatch), routing)
        return y if x.dim() == 2 else y.view(x.shape)

    def _is_one_function(self, x: Tensor) -> bool:
        """Whether to run ``ExpertFunction`` on tokens, if nothing stands between its parts.

        Plain layers that are not one op keep their second order, and a graph compiled for a CPU fuses what lies between
        GEMMs on tensors as they are: these go by the pieces. Sharded tokens are placed part by part.
        """
        if type(x) not in (Tensor, nn.Parameter) or torch._C._are_functorch_transforms_active():
            return False
        if self.recompute_activation or self.fc2.gemms.fuses_activation or offload.in_graph():
            return True  # as in ``GroupedMLP``
        return not ((self.fc1.plain and self.fc2.plain) or compiled_for_cpu(x.device))


def _is_direct(routing: Routing | Tensor, x: Tensor, *operands: Tensor | None) -> bool:
    """Whether nothing observes the calls of the block's ops, which then go past the dispatcher."""
    if isinstance(routing, Routing):
        return unobserved_call(x, *operands, routing.source, routing.position, routing.token, routing.offs)
    return unobserved_call(x, *operands, routing)


def _by_one_op(
    direct: bool, routing: Routing, x: Tensor, weights: Tensor | None, *parameters: Tensor | None, **options: Any
) -> Tensor:
    """The op ``moe`` of ``parameters`` w1, w2, bias1 and bias2; ``options``: the activation and ``expected_rows``."""
    w1, w2, *biases = parameters
    source, position, offs, top_k, token = routing
    call = one_op if direct else torch.ops.tgl.moe.default
    operands = x, w1, w2, source, position, token, offs, weights, *biases
    if direct:  # in no trace or transform, and without a helper's call
        keeps = torch.is_grad_enabled() and torch._C._any_requires_grad(*operands)
    else:
        keeps = backward_may_follow(x, w1, w2, weights, *biases)
    y: Tensor = call(*operands, top_k=top_k, compute_h=keeps, **options)[0]
    return y


def routed(routing: Routing | Tensor, num_experts: int, direct: bool = False) -> Routing:
    """``routing``, or that of the experts that it chooses; ``direct``: it is known that nothing observes the call."""
    if not isinstance(routing, Tensor):
        return routing
    return _routing.route_directly(routing, num_experts) if direct else route(routing, num_experts)
