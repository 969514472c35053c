"""``GroupedMLP``: the feed-forward network of a Mixture-of-Experts layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import offload
from ..meta.specs import ACTIVATIONS, GATED
from ..ops.grouped_mlp import grouped_mlp
from ..recipes import DelayedScaling, Recipe
from ._activation import activate, is_one_op
from ._buffers import check_buffer, check_disjoint
from ._scaled_gemms import ScaledGemms
from .grouped_linear import GroupedLinear, MSplits, offsets_on, result_dtype


class GroupedMLP(nn.Module):
    """G expert MLPs on G groups of rows: FC1, activation times a probability per row, FC2.

    Without a recipe or another option below that steps in between, that is ``tgl.grouped_mlp``, one op forward and one
    backward, except in a graph compiled for a CPU: there the compiler fuses the activation with its neighbours.

    Args:
        num_gemms: G, the number of experts on this rank.
        hidden_size: H, width of the input and the output.
        ffn_hidden_size: I, width of the activation. FC1 has ``2 I`` outputs for gated activations, gate first.
        activation: ``"swiglu"``, ``"clamped_qgeglu"`` or ``"srelu"``; see ``tgl.grouped_activation``.
        interleaved: whether the gate and linear rows of FC1's weight alternate instead of standing side by side.
        bias: whether FC1 and FC2 have biases.
        recompute_activation: keep what goes into the activation for the backward, which forms its result again.
        params_dtype, device, init_method, state_dict_format, single_grouped_weight, fuse_wgrad_accumulation,
            delay_wgrad_compute, save_original_input, recipe: see ``GroupedLinear``; they hold for both layers.

    Attributes:
        fc1: ``GroupedLinear`` ``H -> 2 I`` or ``H -> I``.
        fc2: ``GroupedLinear`` ``I -> H``.
    """

    buffers_taken = frozenset(("output", "grad_input"))  # by ``Sequential``'s names

    def __init__(
        self,
        num_gemms: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str = "swiglu",
        interleaved: bool = False,
        bias: bool = False,
        recompute_activation: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        state_dict_format: str | None = None,
        single_grouped_weight: bool = True,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"`activation` must be one of {', '.join(ACTIVATIONS)}, but got {activation!r}")
        if recompute_activation and isinstance(recipe, DelayedScaling):
            raise ValueError(
                "`recompute_activation` must be False for DelayedScaling, whose scale has moved on by then"
            )
        self.num_gemms, self.activation, self.interleaved = num_gemms, activation, interleaved
        self.in_features = self.out_features = hidden_size
        self.recompute_activation = recompute_activation
        options: dict[str, Any] = {
            "params_dtype": params_dtype,
            "device": device,
            "init_method": init_method,
            "state_dict_format": state_dict_format,
            "single_grouped_weight": single_grouped_weight,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "delay_wgrad_compute": delay_wgrad_compute,
            "save_original_input": save_original_input,
            "recipe": recipe,
        }
        width = 2 * ffn_hidden_size if activation in GATED else ffn_hidden_size
        self.fc1 = GroupedLinear(num_gemms, hidden_size, width, bias, **options)
        self.fc2 = GroupedLinear(num_gemms, ffn_hidden_size, hidden_size, bias, **options)

    def reset_parameters(self) -> None:
        """Initialise both layers."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def forward(
        self,
        inp: Tensor,
        m_splits: MSplits,
        probs: Tensor | None = None,
        is_first_microbatch: bool | Tensor | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor:
        """Run the experts.

        Args:
            inp: ``[T, H]`` rows grouped by expert.
            m_splits: ``[G]``, any integer dtype, on the device of ``inp``: rows of each expert; see ``GroupedLinear``.
            probs: ``[T]``: routing probability of every row. It multiplies the activation and FC2's bias, which is the
                expert's whole answer times the probability.
            is_first_microbatch, out, dgrad_out: see ``GroupedLinear``: buffers for the result and for the gradient of
                ``inp``, both ``[T, H]``.

        Returns:
            ``[T, H]``; rows past the sum of ``m_splits`` are zero. The memory of ``out`` if given.
        """
        offs = offsets_on(m_splits, self.num_gemms, inp.device)
        return self.forward_offsets(
            inp, offs, probs, is_first_microbatch=is_first_microbatch, out=out, dgrad_out=dgrad_out
        )

    def forward_offsets(
        self,
        inp: Tensor,
        offs: Tensor,
        probs: Tensor | None = None,
        *,
        is_first_microbatch: bool | Tensor | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor:
        """The same for cumulative ends ``offs``, int32 ``[G]``."""
        if out is not None or dgrad_out is not None:
            if out is not None:
                check_buffer("out", out, (*inp.shape[:-1], self.out_features), result_dtype(inp), inp.device)
            if dgrad_out is not None:
                check_buffer("dgrad_out", dgrad_out, inp.shape, inp.dtype, inp.device)
            check_disjoint({"out": out, "dgrad_out": dgrad_out}, {"inp": inp})
        if out is None and dgrad_out is None and self._is_one_op(inp.device):
            return self._forward_one_op(inp, offs, probs)
        activation = {"kind": self.activation, "interleaved": self.interleaved}
        prepared = None
        if isinstance(self.fc2.gemms, ScaledGemms) and self.fc2.gemms.fuses_product:
            hidden, prepared = self.fc1.forward_quantizing(
                inp,
                offs,
                probs,
                activation,
                self.fc2,
                recompute=self.recompute_activation,
                is_first_microbatch=is_first_microbatch,
                dgrad_out=dgrad_out,
            )
        else:
            hidden = self.fc1.forward_offsets(inp, offs, is_first_microbatch=is_first_microbatch, dgrad_out=dgrad_out)
        bias_scale = probs if self.fc2.has_bias else None
        if self.recompute_activation or self.fc2.gemms.fuses_activation or offload.in_graph():
            return self.fc2.forward_activated(
                hidden,
                offs,
                probs,
                activation,
                recompute=self.recompute_activation,
                is_first_microbatch=is_first_microbatch,
                out=out,
                prepared=prepared,
            )
        hidden = activate(hidden, offs, probs, **activation)
        return self.fc2.forward_offsets(hidden, offs, bias_scale, is_first_microbatch=is_first_microbatch, out=out)

    def _is_one_op(self, device: torch.device) -> bool:
        layers = (self.fc1, self.fc2)
        return all(type(layer) is GroupedLinear and layer.plain for layer in layers) and is_one_op(
            device, self.fc1.weight, self.fc2.weight
        )

    def _forward_one_op(self, inp: Tensor, offs: Tensor, probs: Tensor | None) -> Tensor:
        rows = inp.reshape(-1, inp.shape[-1]) if inp.dim() != 2 else inp
        w1, w2 = (layer.weight.transpose(1, 2) for layer in (self.fc1, self.fc2))
        y = grouped_mlp(
            rows,
            w1,
            w2,
            offs,
            probs,
            self.fc1.bias,
            self.fc2.bias,
            kind=self.activation,
            interleaved=self.interleaved,
            recompute=self.recompute_activation,
        )
        return y if inp.dim() == 2 else y.view(*inp.shape[:-1], self.out_features)

    def reserve_delayed_wgrad(self, max_rows: int, microbatches: int = 1, *, dtype: torch.dtype | None = None) -> None:
        """``GroupedLinear.reserve_delayed_wgrad`` of both layers."""
        self.fc1.reserve_delayed_wgrad(max_rows, microbatches, dtype=dtype)
        self.fc2.reserve_delayed_wgrad(max_rows, microbatches, dtype=dtype)

    def backward_dw(self) -> None:
        """``GroupedLinear.backward_dw`` of both layers, in the order of the backward."""
        self.fc2.backward_dw()
        self.fc1.backward_dw()

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, interleaved={self.interleaved}"
