"""``GroupedMLP``: the feed-forward network of a Mixture-of-Experts layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..meta.specs import ACTIVATIONS, GATED
from ..ops.grouped_activation import grouped_activation
from .grouped_linear import GroupedLinear, MSplits, offsets_on


class GroupedMLP(nn.Module):
    """G expert MLPs on G groups of rows: FC1, activation times a probability per row, FC2.

    Args:
        num_gemms: G, the number of experts on this rank.
        hidden_size: H, width of the input and the output.
        ffn_hidden_size: I, width of the activation. FC1 has ``2 I`` outputs for gated activations, gate first.
        activation: ``"swiglu"``, ``"clamped_qgeglu"`` or ``"srelu"``; see ``tgl.grouped_activation``.
        interleaved: whether the gate and linear rows of FC1's weight alternate instead of standing side by side.
        bias: whether FC1 and FC2 have biases.
        params_dtype, device, init_method, state_dict_format: see ``GroupedLinear``.

    Attributes:
        fc1: ``GroupedLinear`` ``H -> 2 I`` or ``H -> I``.
        fc2: ``GroupedLinear`` ``I -> H``.
    """

    def __init__(
        self,
        num_gemms: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str = "swiglu",
        interleaved: bool = False,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        state_dict_format: str = "packed",
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"`activation` must be one of {', '.join(ACTIVATIONS)}, but got {activation!r}")
        self.num_gemms, self.activation, self.interleaved = num_gemms, activation, interleaved
        options: dict[str, Any] = {
            "params_dtype": params_dtype,
            "device": device,
            "init_method": init_method,
            "state_dict_format": state_dict_format,
        }
        width = 2 * ffn_hidden_size if activation in GATED else ffn_hidden_size
        self.fc1 = GroupedLinear(num_gemms, hidden_size, width, bias, **options)
        self.fc2 = GroupedLinear(num_gemms, ffn_hidden_size, hidden_size, bias, **options)

    def reset_parameters(self) -> None:
        """Initialise both layers."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def forward(self, inp: Tensor, m_splits: MSplits, probs: Tensor | None = None) -> Tensor:
        """Run the experts.

        Args:
            inp: ``[T, H]`` rows grouped by expert.
            m_splits: ``[G]``, any integer dtype, on the device of ``inp``: rows of each expert; see ``GroupedLinear``.
            probs: ``[T]``: routing probability of every row. It multiplies the activation and FC2's bias, which is the
                expert's whole answer times the probability.

        Returns:
            ``[T, H]``; rows past the sum of ``m_splits`` are zero.
        """
        return self.forward_offsets(inp, offsets_on(m_splits, self.num_gemms, inp.device), probs)

    def forward_offsets(self, inp: Tensor, offs: Tensor, probs: Tensor | None = None) -> Tensor:
        """The same for cumulative ends ``offs``, int32 ``[G]``."""
        hidden = self.fc1.forward_offsets(inp, offs)
        hidden = grouped_activation(hidden, offs, probs, kind=self.activation, interleaved=self.interleaved)
        return self.fc2.forward_offsets(hidden, offs, probs if self.fc2.bias is not None else None)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, interleaved={self.interleaved}"
