"""``GroupedLinear``: G linear layers on G groups of rows, as one module."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.grouped_gemm import grouped_gemm
from ..ops.splits_to_offsets import splits_to_offsets

MSplits = Tensor | Sequence[int]


def offsets_on(m_splits: MSplits, num_gemms: int, device: torch.device) -> Tensor:
    """int32 ``[G]`` cumulative group ends on ``device``, without a host read if ``m_splits`` is there already."""
    if isinstance(m_splits, Tensor):
        if m_splits.shape != (num_gemms,):
            raise ValueError(
                f"`m_splits` must be of shape [num_gemms] = ({num_gemms},), but got {tuple(m_splits.shape)}"
            )
        if m_splits.device == device:
            return splits_to_offsets(m_splits)
    elif len(m_splits) != num_gemms:
        raise ValueError(f"`m_splits` must have num_gemms = {num_gemms} entries, but got {len(m_splits)}")
    warnings.warn(
        "m_splits as a list, or on another device than the input, costs a blocking copy and cannot be captured in a "
        "CUDA graph; pass a tensor on the input's device",
        DeprecationWarning,
        stacklevel=5,  # the caller of the module: forward, _call_impl and _wrapped_call_impl lie between
    )
    return splits_to_offsets(torch.as_tensor(m_splits).to(device))


class GroupedLinear(nn.Module):
    """Apply G independent linear layers, each to its own group of rows: ``y[t] = weight[g] x[t] + bias[g]``.

    Args:
        num_gemms: G, the number of groups (experts on this rank).
        in_features: K.
        out_features: N.
        bias: whether to add a bias.
        params_dtype: dtype of the parameters; default ``torch.get_default_dtype()``.
        device: device of the parameters; ``"meta"`` defers initialisation to ``reset_parameters``.
        init_method: called with the weight ``[G, N, K]`` to fill it in place; default: every expert as ``nn.Linear``
            does.
        state_dict_format: ``"packed"`` saves ``weight [G, N, K]`` and ``bias [G, N]``; ``"discrete"`` saves
            TransformerEngine's ``weight0, weight1, ...`` and ``bias0, ...``. Either form loads, whatever this says.

    Attributes:
        weight: parameter ``[G, N, K]``.
        bias: parameter ``[G, N]``, or None.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        state_dict_format: str = "packed",
    ) -> None:
        super().__init__()
        if state_dict_format not in ("packed", "discrete"):
            raise ValueError(f"`state_dict_format` must be 'packed' or 'discrete', but got {state_dict_format!r}")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.init_method = init_method
        self.state_dict_format = state_dict_format
        options: dict[str, Any] = {"dtype": params_dtype, "device": device}
        self.bias: nn.Parameter | None
        self.weight = nn.Parameter(torch.empty(num_gemms, out_features, in_features, **options))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_gemms, out_features, **options)) if bias else None)
        if self.weight.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters, for instance after ``to_empty`` on a module made on the meta device."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        with torch.no_grad():
            if self.init_method is not None:
                self.init_method(self.weight)
            else:
                self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    def forward(self, inp: Tensor, m_splits: MSplits) -> Tensor:
        """Run the layer.

        Args:
            inp: ``[..., K]``; the leading dimensions flatten to T rows, grouped by expert.
            m_splits: ``[G]``, any integer dtype, on the device of ``inp``: rows of each group. Their sum may be less
                than T: the rows past it are not read and come out as zeros. A list, or a tensor elsewhere, is copied at
                the price of a synchronisation, with a ``DeprecationWarning``.

        Returns:
            ``[..., N]`` in the dtype of ``inp`` (of autocast, where active).
        """
        return self.forward_offsets(inp, offsets_on(m_splits, self.num_gemms, inp.device))

    def forward_offsets(self, inp: Tensor, offs: Tensor, bias_scale: Tensor | None = None) -> Tensor:
        """The same for cumulative ends ``offs``, int32 ``[G]``, and a bias scaled per row by ``bias_scale [T]``."""
        rows = inp.reshape(-1, inp.shape[-1]) if inp.dim() != 2 else inp
        y = grouped_gemm(rows, self.weight.transpose(1, 2), offs, self.bias, bias_scale)
        return y if inp.dim() == 2 else y.view(*inp.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )

    # --- state dicts --------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.state_dict_format == "discrete":
            for name in ("weight", "bias"):
                packed = destination.pop(prefix + name, None)
                if packed is not None:
                    destination.update({f"{prefix}{name}{i}": part for i, part in enumerate(packed)})

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        packed = dict(state_dict)
        for name in ("weight", "bias"):
            keys = [f"{prefix}{name}{i}" for i in range(self.num_gemms)]
            if getattr(self, name) is not None and keys and all(key in packed for key in keys):
                packed[prefix + name] = torch.stack([packed.pop(key) for key in keys])
        super()._load_from_state_dict(packed, prefix, *args, **kwargs)
