"""Experts of gpt-oss whose weights stay in MXFP4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..meta.specs import accumulator
from ..nn._activation import activate
from ..nn._low_rank import LowRank, add_low_rank
from ..nn.grouped_packed_linear import options_of, weight_on
from ..nn.layouts import mxfp4_from_gpt_oss
from ..nn.routing import Routing, combine, dispatch_both, route
from ..ops import grouped_gemm_packed
from ._transformers_gates import activation

OPTIONS = options_of("mxfp4")
FORMAT = OPTIONS.description
PROJECTIONS = "gate_up_proj", "down_proj"
PARTS = "blocks", "scales"  # of a projection in a checkpoint


class PackedExperts(nn.Module):
    """Experts of gpt-oss with weights in MXFP4, by the names, shapes and bytes of a checkpoint until ``join``.

    The arithmetic is that of the dense experts with the decoded weights, which ``grouped_gemm_packed`` decodes in
    pieces of bounded size at most, in the backward too. Weights are frozen; tokens, routing weights and biases have
    gradients, and so have low-rank updates of the weights, which adapters of PEFT are.

    Args:
        dense: the ``GptOssExperts`` of which shapes, constants of the gate, dtype and device are taken.
    """

    is_transposed = False  # PEFT reads the order of a matrix' dimensions here: [G, out, in]

    def __init__(self, dense: nn.Module) -> None:
        super().__init__()
        flags: Any = dense
        found = activation(dense)
        if found is None:
            raise NotImplementedError(f"tgl: no activation of tgl computes the gate of {type(dense).__name__}")
        self.num_experts, self.gate = flags.num_experts, found.parameters(dense)
        for name in PROJECTIONS:
            depth, width = getattr(flags, name).shape[1:]
            if depth % FORMAT.block:
                raise ValueError(f"tgl: `{name}` must have a multiple of {FORMAT.block} inputs for MXFP4, not {depth}")
            shape = (self.num_experts, width, depth // FORMAT.block)
            bias = getattr(flags, f"{name}_bias")
            for part, t in {
                "blocks": torch.empty(*shape, FORMAT.block // FORMAT.per_byte, dtype=torch.uint8, device=bias.device),
                "scales": torch.empty(shape, dtype=torch.uint8, device=bias.device),
                "bias": torch.empty_like(bias),
            }.items():
                self.register_parameter(f"{name}_{part}", nn.Parameter(t, requires_grad=t.is_floating_point()))

    def join(self) -> None:
        """Combine the blocks and scales of each projection, on their memory, into one parameter ``[G, N, K]``."""
        for name in PROJECTIONS:
            blocks, scales = (self._parameters.pop(f"{name}_{part}") for part in PARTS)
            assert blocks is not None
            assert scales is not None
            data, scale = mxfp4_from_gpt_oss(blocks, scales)
            shape = (*data.shape[:2], data.shape[2] * FORMAT.per_byte)
            parts, dtype = {"rowwise_data": data, "rowwise_scale": scale}, self.get_parameter(f"{name}_bias").dtype
            self.register_parameter(name, weight_on(parts, shape, OPTIONS, dtype))

    def forward(
        self,
        hidden_states: Tensor,
        router_indices: Tensor,
        routing_weights: Tensor,
        *,
        low_rank: Mapping[str, Sequence[LowRank]] | None = None,
    ) -> Tensor:
        """Return ``[S, H]`` in the dtype of ``hidden_states``, from ``[S, H]``, integer ``[S, k]`` and ``[S, k]``.

        Indices of ``num_experts`` and more are skipped. ``low_rank`` has updates of the weights by their names.
        """
        dtype, updates = self.get_parameter("down_proj_bias").dtype, low_rank or {}
        routing = route(router_indices, self.num_experts, sentinels=True)
        weights = routing_weights if routing_weights.dtype == dtype else routing_weights.to(accumulator(dtype))
        rows, probs = dispatch_both(hidden_states.to(dtype), weights, routing)
        rows = self._linear("gate_up_proj", rows, routing, None, updates)
        if "_apply_gate" in self.__dict__:  # this instance has a gate of its own
            rows = (self._apply_gate(rows) * probs[:, None]).to(dtype)  # type: ignore[operator]
        else:
            rows = activate(rows, routing.offs, probs, **self.gate)
        rows = self._linear("down_proj", rows, routing, probs, updates)
        return combine(rows, routing).to(hidden_states.dtype)

    def _linear(
        self,
        name: str,
        rows: Tensor,
        routing: Routing,
        probs: Tensor | None,
        updates: Mapping[str, Sequence[LowRank]],
    ) -> Tensor:
        weight: Any = self.get_parameter(name)
        data, scale, *_ = weight.components()
        bias = self.get_parameter(f"{name}_bias")
        y = grouped_gemm_packed(rows, data, scale, routing.offs, None, bias, probs, format=FORMAT.name)
        for update in updates.get(name, ()):
            y = add_low_rank(y, rows, update, routing.offs)
        return y
