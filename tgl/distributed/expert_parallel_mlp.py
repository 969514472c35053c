"""``ExpertParallelMLP``: a Mixture-of-Experts block whose experts are spread over ranks, in static sizes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..backends.layer_path import LayerPath
from ..meta.expert_parallel import ALL_TO_ALL, ENGINES, SYMMETRIC_MEMORY
from ..nn._arguments import check_flags
from ..nn._errors import fail, not_a_tensor, shown
from ..nn._expert_path import ONE_OP, expert_path
from ..nn._inputs import result_dtype
from ..nn._linear_function import result
from ..nn._token_permutation import LocalPermutation
from ..nn.grouped_mlp import GroupedMLP
from ..nn.moe import MoE, flat_choices
from ..nn.router import RouterOutput
from ..nn.routing import dispatch_weights, route
from ..ops._preactivation import backward_may_follow
from ..recipes import RECIPES, named
from ._agreement import check_agreement
from ._exchange import Exchange, Sizes
from ._partial_sums import Block, SummedFunction
from ._symmetric_memory import reserve
from ._wire_format import DENSE, Wire, WireFormat, check_wire


class ExpertParallelMLP(MoE):
    """The experts of a Mixture-of-Experts layer over W ranks, from this rank's tokens to their weighted sums.

    Rank r holds experts ``r L`` to ``(r + 1) L - 1`` of E, where ``L = E / W``. A call sends every token once to each
    rank that holds one of its experts, runs the experts there, sums a rank's answers to a token in the order of its
    top-k slots, and adds the sums of the ranks in their order. All sizes follow from the arguments below and no count
    is read on the host: one graph of ``torch.compile`` serves all routings, and nothing is dropped silently. All ranks
    of the group make the calls of the layer, and its backwards, in one order; each may have any number of tokens up to
    ``max_tokens``.

    Between ranks, tokens, answers and their gradients have the dtype of ``x`` (of autocast where active) unless
    ``wire`` or ``wire_dtype`` say otherwise: sums are formed in float32 (float64 for float64) and rounded once on every
    rank, and once more at home. Routing weights are sent in their own dtype.

    **Capacity.** The rows that arrive have ``W pair_rows`` places, those of the experts ``expert_rows``. A step that
    needs more on any rank has NaN in all its outputs and gradients, on all ranks. The number that was needed stays on
    the device: ``found_inf`` reports whether it was too large, and ``check()`` and the next eager call raise. On a GPU
    the tilings of a plain block's GEMMs are chosen for the even load of ``max_tokens`` tokens, whatever the capacity.

    Args:
        num_experts: E, over all ranks, a multiple of W.
        hidden_size: H, width of tokens.
        ffn_hidden_size: I, width of the activation.
        group: the ranks: a ``ProcessGroup``, or a ``DeviceMesh`` of one dimension, such as ``mesh["ep"]``.
        top_k: k, experts of each token.
        max_tokens: the most tokens of any rank in a call; at least 1.
        capacity_factor: ``expert_rows`` over the even load of a rank, ``max_tokens k``; None for the worst case where
            the experts of a token differ, ``W max_tokens min(k, L)``.
        pair_capacity_factor: ``pair_rows`` over the even load of a pair of ranks, ``max_tokens min(k, W) / W``; None
            for the worst case, ``max_tokens``. All ``W pair_rows`` are sent, used or not.
        invariant: send an answer per top-k slot and sum at home in the order of slots. Outputs and gradients, those
            of weights too if the tokens are shared out in order, then have the bits of one rank with all tokens, for
            any W, if the GEMMs of a group do not depend on the other groups. Up to k times as many rows are sent: the
            even load of a pair is ``max_tokens k / W``, its worst case ``max_tokens k``.
        engine: how rows move between ranks. ``"all_to_all"``: collectives of static sizes of the group's backend,
            on any devices. ``"symmetric_memory"``: kernels that write to the memory of the other ranks, which have to
            reach each other's (GPUs of one NVLink domain); the memory lies on the current CUDA device, and all layers
            of the group use it in turn. Both give equal bits.
        wire: the format of rows sent to the experts. ``"dense"``: tokens, and in the backward gradients of outputs, in
            the dtype of ``x``. ``"quantized"``: both are quantised at home by ``recipe``, and their codes and scales
            are sent, 1.03 bytes an element, which the GEMMs read as they arrive. Recipes must scale blocks of one row:
            ``MXFP8BlockScaling`` and ``Float8BlockScaling``. Outputs have the bits of the dense wire, and so have the
            gradients of tokens, and of routing weights if ``fc2`` has no bias. Weight gradients read columnwise codes
            made from the rowwise ones, which rounds twice.
        wire_dtype: dtype of the partial sums sent back, of answers and of gradients of tokens. None: that of ``x``,
            one rounding on every rank. ``torch.float32``: none until home, for twice the bytes of bfloat16.
        recompute_dispatch: what is saved for the gradient of ``fc1.weight``. False: the rows that arrived,
            ``[W pair_rows, H]``. True: the tokens ``[S, H]``, which are sent again in the backward (quantised again,
            if they are), to the same bits. Ranks then agree on whether ``fc1.weight`` is frozen.
        name: the layer's name in errors.
        **options: those of ``GroupedMLP``.

    With another wire than the default, or ``recompute_dispatch``, a call is one node of autograd, of first order.
    ``fc1`` and ``fc2`` then have no hooks, and must not be replaced.

    Attributes:
        pair_rows: rows for each pair of ranks.
        expert_rows: rows of this rank's experts.

    Raises:
        ValueError: an argument does not fit, or the ranks do not agree on the arguments, of which ``device``,
            ``init_method``, ``state_dict_format`` and ``name`` alone may differ.
        RuntimeError: the ranks have no symmetric memory; it says why.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        group: dist.ProcessGroup | DeviceMesh,
        top_k: int,
        max_tokens: int,
        capacity_factor: float | None = 2.0,
        pair_capacity_factor: float | None = None,
        invariant: bool = False,
        engine: str = ALL_TO_ALL,
        wire: str = DENSE,
        wire_dtype: torch.dtype | None = None,
        recompute_dispatch: bool = False,
        name: str = "ExpertParallelMLP",
        **options: Any,
    ) -> None:
        group = _process_group(group)
        given: dict[str, Any] = {
            "num_experts": num_experts,
            "top_k": top_k,
            "max_tokens": max_tokens,
            "capacity_factor": capacity_factor,
            "pair_capacity_factor": pair_capacity_factor,
            "invariant": invariant,
        }
        # First, so that an argument that is invalid on one rank only is an error on all.
        agreement = check_agreement(
            group,
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_hidden_size,
            engine=engine,
            wire=wire,
            wire_dtype=wire_dtype,
            recompute_dispatch=recompute_dispatch,
            **given,
            **_agreed_options(options),
        )
        sizes = Sizes(ranks=group.size(), **given)
        check_flags(recompute_dispatch=recompute_dispatch)
        if engine not in ENGINES:
            raise ValueError(f"`engine` must be one of {', '.join(map(repr, ENGINES))}, but got {engine!r}")
        recipe = options["recipe"] = named(options.get("recipe"))
        check_wire(wire, wire_dtype, recipe)
        super().__init__(num_experts // sizes.ranks, hidden_size, ffn_hidden_size, **options)
        parameter = next(self.parameters())
        self.exchange = Exchange(group, sizes, name, parameter.device, agreement, engine)
        self.pair_rows, self.expert_rows = sizes.pair_rows, sizes.expert_rows
        self._expected_rows = sizes.expected_rows
        self.wire, self.form = wire, WireFormat.of(wire, wire_dtype, recipe, recompute_dispatch)
        if engine == SYMMETRIC_MEMORY:
            reserve(group, sizes.memory(hidden_size, parameter.dtype, self.form), name)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        top_k_index: Tensor | RouterOutput,
        weights: Tensor | None = None,
        is_first_microbatch: bool | Tensor | None = None,
        *,
        sentinels: bool = False,
    ) -> Tensor:
        """Run the block.

        Args:
            x: ``[S, H]`` or ``[..., H]``: this rank's tokens, from none to ``max_tokens``.
            top_k_index: integer ``[S, k]`` or ``[..., k]``: experts chosen by each token, counted over all ranks; out
                of range means none, which is an error inside ``tgl.debug_checks()`` unless ``sentinels``. Or the
                result of ``topk_router``, whose dropped slots are allowed.
            weights: ``[S, k]`` or ``[..., k]``: routing weights, dtype of ``x`` or float32; None for ones, and for
                those of a ``RouterOutput``.
            is_first_microbatch: see ``GroupedLinear``.
            sentinels: whether experts out of range are allowed and mean dropped slots.

        Returns:
            The shape and dtype of ``x``, for every token the weighted sum of its experts' answers.

        Raises:
            TypeError, ValueError: an argument does not fit, or the dtypes of ``x`` (of autocast where active) or
                ``weights`` are not those of the other ranks, which are compared in the first call with them.
            RuntimeError: a call since the last ``check()`` needed more rows than there are; or another rank did not
                take part in the exchange before the time-out of the group, which over symmetric memory may be that
                of an earlier call.
        """
        name = self.exchange.name
        if isinstance(top_k_index, RouterOutput):
            (top_k_index, weights), sentinels = flat_choices(top_k_index, weights, f"{name}: "), True
        for argument, t in (("x", x), ("top_k_index", top_k_index), ("weights", weights)):
            if not isinstance(t, Tensor) and (t is not None or argument != "weights"):
                not_a_tensor(f"{name}: `{argument}`", t)
        tokens = x.reshape(-1, x.shape[-1]) if x.dim() > 2 else x
        if top_k_index.dim() > 2:
            top_k_index = top_k_index.flatten(0, -2)
        if weights is not None and weights.dim() > 2:
            weights = weights.flatten(0, -2)
        if tokens.dim() != 2 or tokens.shape[1] != self.in_features:
            must = f"[S, H] with H = {self.in_features}"
            fail(f"{name}: `x` must be {must}, but got shape {tuple(x.shape)}")
        tokens = tokens.to(result_dtype(tokens))
        self.exchange.agree(tokens, weights)
        way = self._by_exchanges if self.form.as_always else self._by_wire
        y = self.exchange.watched(way, tokens, top_k_index, weights, is_first_microbatch, sentinels)
        return y if x.dim() == 2 else y.view(x.shape)

    def _by_exchanges(
        self,
        tokens: Tensor,
        top_k_index: Tensor,
        weights: Tensor | None,
        is_first_microbatch: bool | Tensor | None,
        sentinels: bool,
    ) -> Tensor:
        """Compute the tokens' sums by exchanges and ``GroupedMLP``, each with its own gradient."""
        arrived = self.exchange.arrive(tokens, top_k_index, weights, sentinels=sentinels)
        routing = route(arrived.choices, self.num_gemms, self.expert_rows, sentinels=True)
        answers = super().forward(arrived.rows, routing, arrived.weights, is_first_microbatch)
        return self.exchange.answer(answers, arrived)

    def _by_wire(
        self,
        tokens: Tensor,
        top_k_index: Tensor,
        weights: Tensor | None,
        is_first_microbatch: bool | Tensor | None,
        sentinels: bool,
    ) -> Tensor:
        """Compute the tokens' sums in one function, as no gradient of autograd has the format that is sent."""
        exchange, form = self.exchange, self.form
        path = self._path(tokens)
        self._check_wire(tokens, path)
        inputs, grads = form.codecs(self.in_features, tokens.dtype)
        packed = inputs.pack(tokens.detach())
        arrived = exchange.arrive(tokens, top_k_index, weights, packed, sentinels=sentinels)
        routing = route(arrived.choices, self.num_gemms, self.expert_rows, sentinels=True)
        local, home = LocalPermutation.of(routing), LocalPermutation(*arrived.places)
        way = Wire(
            local, home, arrived.rows, inputs, grads, form.sums, form.again, exchange.group_name, exchange.engine
        )
        if path.taken == ONE_OP:
            w1, w2 = (layer.weight.transpose(1, 2) for layer in (self.fc1, self.fc2))
            operands = inputs.values(arrived.rows), arrived.weights, w1, w2, self.fc1.bias, self.fc2.bias
            keeps = backward_may_follow(tokens, *operands)
            activation = {"kind": self.activation, "interleaved": self.interleaved}
            block = Block(way, routing, activation, self._expected_rows, keeps)
            return result(SummedFunction.apply(block, tokens, *operands))
        probs = dispatch_weights(arrived.weights, routing)
        return self._by_one_function(tokens, routing.offs, probs, is_first_microbatch, places=way)

    def __explain__(  # type: ignore[override]
        self,
        x: Tensor,
        top_k_index: Tensor | None = None,
        weights: Tensor | None = None,
        is_first_microbatch: bool | Tensor | None = None,
        *,
        sentinels: bool = False,
    ) -> LayerPath:
        return self._path(x.to(result_dtype(x)))

    def _path(self, tokens: Tensor) -> LayerPath:
        exchanged = None if self.form.as_always else "tokens" if self.form.inputs is None else "codes"
        return expert_path(self, tokens, tokens=True, exchanged=exchanged)

    def _check_wire(self, tokens: Tensor, path: LayerPath) -> None:
        """Check the tokens before any rank waits for this one."""
        name = self.exchange.name
        if path.permutes:
            options = f"wire={self.wire!r}, wire_dtype={self.form.sums} and recompute_dispatch={self.form.again}"
            must = {"`x`": "an ordinary tensor outside of torch.func"}
            subject, words = next(reason[1:] for reason in path.reasons if reason[0] != ONE_OP)
            layer = f"a GroupedLinear without hooks with {options}"
            fail(f"{name}: {subject} must be {must.get(subject, layer)}, but it {words}")
        self.fc1._check_input(tokens.shape[1], tokens.dtype, tokens.device, "`x`")
        if self.form.sums is not None and tokens.dtype.itemsize > self.form.sums.itemsize:
            fail(f"{name}: `x` must be no wider than wire_dtype={self.form.sums}, but got {tokens.dtype}", TypeError)

    def traffic(self, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes that this rank sends to all ranks in one forward with tokens and weights of ``dtype``: in all, and of
        them those that ``max_tokens`` tokens under an even load use, at most. A backward sends the last two of the
        three parts once more: choices, tokens with their weights, answers; and tokens another time to form what the
        forward did not hold (``recompute_dispatch``).
        """
        return self.exchange.sizes.traffic(self.in_features, dtype, self.form)

    @property
    def found_inf(self) -> Tensor:
        """Return float32 ``[]`` on the device: 1 on all ranks if a call since ``clear()`` exceeded a capacity, else 0.

        It is read as torch's fused optimizers read ``optimizer.found_inf``: they take no step where it is 1.
        """
        return self.exchange.found_inf

    def clear(self) -> None:
        """Reset the needed rows, on the device; for a loop that skips the steps reported by ``found_inf``."""
        self.exchange.clear()

    def check(self) -> None:
        """Raise if a call since the last ``check()`` or ``clear()`` exceeded a capacity; reads the device on the host.

        Raises:
            RuntimeError: it names the layer, the rows that were needed and those that there are; or the ranks that
                this one's device has waited for until the time-out.
        """
        self.exchange.check()

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertParallelMLP:
        super()._apply(fn, recurse)
        self.exchange.needed.to_device(fn)
        return self

    def reset_parameters(self) -> None:
        """Initialise both layers, and reset the needed rows."""
        super().reset_parameters()
        self.clear()

    def extra_repr(self) -> str:
        sizes = self.exchange.sizes
        given = f"num_experts={sizes.num_experts}, ranks={sizes.ranks}, max_tokens={sizes.max_tokens}"
        rows = f"pair_rows={self.pair_rows}, expert_rows={self.expert_rows}, invariant={sizes.invariant}"
        return f"{super().extra_repr()}, {given}, {rows}"


_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(GroupedMLP.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("num_experts", "intermediate_size")
}
_OF_ONE_RANK = ("device", "init_method", "state_dict_format")  # affect neither exchange nor results


def _agreed_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of ``GroupedMLP`` that have to be equal on all ranks."""
    agreed = {name: value for name, value in {**_DEFAULTS, **options}.items() if name not in _OF_ONE_RANK}
    dtype = agreed.pop("dtype")
    if agreed["params_dtype"] is None:
        agreed["params_dtype"] = dtype or torch.get_default_dtype()
    if isinstance(agreed["recipe"], str) and agreed["recipe"] in RECIPES:
        agreed["recipe"] = named(agreed["recipe"])
    return agreed


def _process_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    if isinstance(group, dist.ProcessGroup):
        return group
    if not isinstance(group, DeviceMesh):
        raise TypeError(f"`group` must be a ProcessGroup or a DeviceMesh, but got {shown(group)}")
    if group.ndim != 1:
        raise ValueError(f"`group` must be a DeviceMesh of one dimension, but got {group.ndim}; take one by its name")
    return group.get_group()
