"""``GroupedLoRALinear``: a frozen ``GroupedLinear`` with a trainable low-rank update for each group."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..tensor import GroupedTensor
from ._activation import activate
from ._arguments import check_dtype, check_flags, check_number, check_size
from ._errors import fail, not_a_microbatch, not_a_tensor
from ._external_quantization import PLAIN, is_quantized_elsewhere, values_of
from ._inputs import MSplits, check_input_dtype, offsets_on, result_dtype
from ._low_rank import LowRank, activated_product_and_low_rank, add_low_rank, product_and_low_rank
from ._submodules import given, splits_of, to_be_called
from .grouped_linear import GroupedLinear


class GroupedLoRALinear(nn.Module):
    """A frozen ``GroupedLinear`` with a low-rank update per group: ``y[t] = base(x)[t] + scaling * B[g] A[g] x[t]``.

    It wraps a layer instead of being an option of ``GroupedLinear``, so that one class supports every kind of base:
    packed or discrete parameters, any recipe, weights that ``quantize_weight`` has packed. Assign it where the layer
    was; one assignment restores the base::

        mlp.fc1 = tgl.GroupedLoRALinear(mlp.fc1, rank=16)
        mlp.fc1 = mlp.fc1.base                          # still frozen; with the update: mlp.fc1.merge()

    ``GroupedMLP``, ``MoE`` and ``Sequential`` then call the layer, the activation and the other layer one after the
    other, with the usual gradients of routing weights, and ``recompute_activation`` has no effect. In ``GroupedMLP``
    and ``MoE`` such an ``fc1`` fuses the activation into its op.

    The parameters of the base are frozen at construction. The backward forms no gradient of them and the forward saves
    no activation for one: ``x`` is saved once, for the gradient of ``A``, and ``[T, r]`` for that of ``B``. No further
    ``[G, N, K]`` is allocated.

    With a base that has one packed weight and no recipe, the update is a grouped GEMM to ``[T, r]`` followed by
    ``tgl.grouped_gemm_low_rank``, which accumulates base and update in one product, or
    ``tgl.grouped_gemm_low_rank_activation``. With other bases it is two grouped GEMMs and one addition.

    Args:
        base: the layer to adapt. Its parameters are frozen.
        rank: r, at least 1. In 16-bit dtypes the GPU kernels read ranks that are multiples of 8 without a copy.
        alpha: the update is scaled by ``alpha / rank``, or ``alpha / sqrt(rank)``; default: ``rank``.
        rank_stabilized: divide ``alpha`` by ``sqrt(rank)`` instead of ``rank`` (rsLoRA).
        params_dtype: floating dtype of ``lora_A`` and ``lora_B``; default that of the base's weight. They are cast to
            the dtype of the computation in every call.

    Attributes:
        base: the ``GroupedLinear``.
        lora_A: parameter ``[G, r, K]``, initialised like the weight of ``nn.Linear``.
        lora_B: parameter ``[G, N, r]``, zeros, so that a new layer has the results of its base.
        scaling: the factor of the update.

    ``tgl.nn.layouts.lora_to_peft`` and ``lora_from_peft`` convert the parameters to the layout of PEFT's files.

    Raises:
        TypeError: ``base`` is no ``GroupedLinear``, or ``params_dtype`` is not floating.
        ValueError: ``rank`` is less than 1.
    """

    lora_A: Tensor
    lora_B: Tensor

    def __init__(
        self,
        base: GroupedLinear,
        rank: int,
        alpha: float | None = None,
        *,
        rank_stabilized: bool = False,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(base, GroupedLinear):
            raise TypeError(f"`base` must be a GroupedLinear, but got a {type(base).__name__}")
        rank = check_size("rank", rank, 1)
        check_number("alpha", alpha)
        check_flags(rank_stabilized=rank_stabilized)
        check_dtype("params_dtype", params_dtype)
        weight = base.group_parameters("weight")[0]
        dtype, device = params_dtype or weight.dtype, weight.device
        self.base = base.requires_grad_(False)
        self.num_gemms, self.in_features, self.out_features = base.num_gemms, base.in_features, base.out_features
        self.rank = rank
        self.scaling = (rank if alpha is None else alpha) / (math.sqrt(rank) if rank_stabilized else rank)
        self.lora_A = nn.Parameter(torch.empty(base.num_gemms, rank, base.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.empty(base.num_gemms, base.out_features, rank, dtype=dtype, device=device))
        if weight.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values of ``lora_A`` and set ``lora_B`` to zeros; the base keeps its values."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        with torch.no_grad():
            self.lora_A.uniform_(-bound, bound)
            self.lora_B.zero_()

    @property
    def has_bias(self) -> bool:
        """Whether the base has a bias."""
        return self.base.has_bias

    def forward(
        self,
        inp: Tensor,
        m_splits: MSplits,
        is_first_microbatch: bool | Tensor | None = None,
        bias_scale: Tensor | None = None,
    ) -> Tensor:
        """Run the layer.

        Args:
            inp: ``[..., K]``; the leading dimensions flatten to T rows, grouped as in ``GroupedLinear``. A
                ``GroupedTensor`` is an error, since the update reads the rows themselves.
            m_splits: ``[G]``: rows of each group; see ``GroupedLinear``. Rows past their sum come out as zeros.
            is_first_microbatch, bias_scale: see ``GroupedLinear``; passed to the base.

        Returns:
            ``[..., N]`` in the dtype of ``inp`` (of autocast, where active).

        Raises:
            ValueError, TypeError: arguments that do not fit.
            tgl.GraphCaptureError: ``m_splits`` is not on the device of ``inp`` while a CUDA graph is captured.
        """
        if not isinstance(inp, Tensor):
            not_a_tensor("`inp`", inp)
        offs = offsets_on(m_splits, self.num_gemms, inp.device)
        return self.forward_offsets(inp, offs, bias_scale, is_first_microbatch=is_first_microbatch)

    def forward_offsets(
        self,
        inp: Tensor,
        offs: Tensor,
        bias_scale: Tensor | None = None,
        *,
        is_first_microbatch: bool | Tensor | None = None,
    ) -> Tensor:
        """``forward`` for cumulative ends ``offs``, int32 ``[G]``; ``bias_scale [T]`` scales the bias of each row."""
        if not isinstance(inp, Tensor):
            not_a_tensor("`inp`", inp)
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, (bool, Tensor)):
            not_a_microbatch(is_first_microbatch)
        rows, update = self._operands(inp)
        base, options = self.base, given(is_first_microbatch=is_first_microbatch)
        if self._is_one_product(rows):
            weight = base.weight if type(base.weight) in PLAIN else values_of(base.weight)
            y = product_and_low_rank(rows, weight.transpose(1, 2), update, offs, base.bias, bias_scale)
        else:
            if to_be_called(base):
                y = base(inp, splits_of(offs), bias_scale=bias_scale, **options)
            else:
                y = base.forward_offsets(inp, offs, bias_scale, **options)
            flat = y.reshape(-1, y.shape[-1]) if y.dim() != 2 else y
            y = add_low_rank(flat, rows, update, offs)
        return y if inp.dim() == 2 else y.view(*inp.shape[:-1], self.out_features)

    def _activated(
        self,
        inp: Tensor,
        offs: Tensor,
        probs: Tensor | None,
        activation: dict[str, Any],
        *,
        is_first_microbatch: bool | Tensor | None = None,
    ) -> Tensor:
        """Return the activation of ``forward_offsets`` times ``probs [T]``; one op if the base is plain."""
        rows, update = self._operands(inp)
        if self._is_one_product(rows):
            weight, bias = self.base.weight, self.base.bias
            weight = (weight if type(weight) in PLAIN else values_of(weight)).transpose(1, 2)
            y = activated_product_and_low_rank(rows, weight, update, offs, bias, probs, **activation)
        else:
            hidden = self.forward_offsets(inp, offs, is_first_microbatch=is_first_microbatch)
            y = activate(hidden.reshape(-1, self.out_features), offs, probs, **activation)
        return y if inp.dim() == 2 else y.view(*inp.shape[:-1], y.shape[-1])

    def _operands(self, inp: Tensor) -> tuple[Tensor, LowRank]:
        """Return the input as ``[T, K]``, and the update in the dtype of the computation."""
        if isinstance(inp, GroupedTensor):
            fail(f"`inp` must be a plain tensor for the low-rank update, but got a {type(inp).__name__}", TypeError)
        dtype = result_dtype(inp)
        update = LowRank(self.lora_A.to(dtype), self.lora_B.to(dtype), self.scaling)
        return inp.reshape(-1, inp.shape[-1]) if inp.dim() != 2 else inp, update

    def _is_one_product(self, rows: Tensor) -> bool:
        """Return whether the update is accumulated in the base's product instead of being added to its result."""
        if not self.base.plain or to_be_called(self.base):
            return False
        if rows.dtype != self.base.weight.dtype:
            check_input_dtype(rows.dtype, self.base.weight.dtype, rows.device)
        return True

    def _check_call(self, is_first_microbatch: bool | Tensor | None = None) -> None:
        """Call ``GroupedLinear._check_call`` of the base."""
        if not to_be_called(self.base):
            self.base._check_call(is_first_microbatch)

    @torch.no_grad()
    def merge(self) -> GroupedLinear:
        """Add the update to the base's weight, in place and without another ``[G, N, K]``.

        Replace this layer by the base afterwards; this layer would add the update once more.

        Returns:
            The base.

        Raises:
            ValueError: the weight of ``base`` is quantised, or computed by a parametrization.
        """
        base = self.base
        weights = base.group_parameters("weight")
        quantized = isinstance(weights[0], GroupedTensor) or is_quantized_elsewhere(weights[0])
        if quantized or not all(isinstance(w, nn.Parameter) for w in weights):
            raise ValueError(
                f"`base` must have a weight of plain parameters to merge into, but it is a {type(weights[0]).__name__}"
            )
        a, b = (p.to(weights[0].dtype) for p in (self.lora_A, self.lora_B))
        if base.single_grouped_weight:
            weights[0].baddbmm_(b, a, alpha=self.scaling)
        else:
            for weight, of_group_a, of_group_b in zip(weights, a, b):
                weight.addmm_(of_group_b, of_group_a, alpha=self.scaling)
        return base

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scaling={self.scaling:g}"
