"""``GroupedMLP``: the feed-forward network of a Mixture-of-Experts layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..backends.layer_path import LayerPath
from ..meta import activations
from ..ops._engine import in_dynamo
from ..ops.grouped_mlp import grouped_mlp
from ..recipes import Recipe
from ._activation import activate
from ._arguments import check_flags, check_size, dtype_of_parameters, one_of
from ._buffers import check_buffer, check_disjoint
from ._errors import fail, not_a_microbatch, not_a_tensor
from ._expert_function import Expert, ExpertFunction, expert_function
from ._expert_function import forward as expert_forward
from ._expert_path import KINDS, MODULES, ONE_FUNCTION, ONE_OP, expert_path, op_parameters
from ._inputs import MSplits, check_input_dtype, needs_grad, offsets_on, result_dtype
from ._scaled_gemms import fuse_product
from ._submodules import check_takes, given, has_own_forward, linears, splits_of, to_be_called
from ._token_permutation import TokenPermutation
from .grouped_linear import GroupedLinear
from .grouped_lora_linear import GroupedLoRALinear


class GroupedMLP(nn.Module):
    """G expert MLPs on G groups of rows: FC1, activation times a probability per row, FC2.

    Input and output rows are grouped by expert. The subclass ``MoE`` takes and returns tokens and has the same
    parameters.

    A plain layer is ``tgl.grouped_mlp``: one op forward and one backward. A recipe, hooks of ``fc1`` or ``fc2`` and the
    options for training loops take several ops. In a graph compiled for a CPU each GEMM is a separate op, and the
    compiler fuses the activation with its neighbours.

    Args:
        num_gemms, num_experts: G, the number of experts on this rank, by either name.
        hidden_size: H, width of the input and the output.
        ffn_hidden_size, intermediate_size: I, width of the activation, by either name. FC1 has ``2 I`` outputs for
            gated activations, gate first.
        activation: name of the activation; see ``tgl.grouped_activation``.
        interleaved: whether the gate and linear rows of FC1's weight alternate instead of standing side by side.
        bias: whether FC1 and FC2 have biases.
        recompute_activation: save only the pre-activation; the backward recomputes the activation.
        params_dtype, dtype, device, init_method, state_dict_format: see ``GroupedLinear``, for both layers.
        single_grouped_weight, fuse_wgrad_accumulation, delay_wgrad_compute: see ``GroupedLinear``, for both layers.
        save_original_input, recipe: see ``GroupedLinear``, for both layers.

    Attributes:
        fc1: ``GroupedLinear`` ``H -> 2 I`` or ``H -> I``.
        fc2: ``GroupedLinear`` ``I -> H``.

    Hooks of ``fc1`` and ``fc2`` fire. With any hook the layers are called one after the other, no op spans them, and
    ``recompute_activation`` has no effect. Another module may replace either layer. It is called as
    ``module(inp, m_splits)``, with ``is_first_microbatch``, ``out`` (``fc2``) or ``dgrad_out`` (``fc1``) by name if
    they are given; ``probs`` then multiplies the result of such an ``fc2``. A ``GroupedLoRALinear`` instead of a layer
    gets the layer's arguments except buffers, which it does not support.
    """

    buffers_taken = frozenset(("output", "grad_input"))  # names as in ``Sequential``
    _fewest = 0  # lower bound of sizes: a rank may have no experts

    def __init__(
        self,
        num_gemms: int | None = None,
        hidden_size: int | None = None,
        ffn_hidden_size: int | None = None,
        *,
        num_experts: int | None = None,
        intermediate_size: int | None = None,
        activation: str = "swiglu",
        interleaved: bool = False,
        bias: bool = False,
        recompute_activation: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        state_dict_format: str | None = None,
        single_grouped_weight: bool = True,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        recipe: Recipe | str | None = None,
    ) -> None:
        super().__init__()
        found = activations.named(activation, "activation")
        num_gemms = one_of(num_gemms=num_gemms, num_experts=num_experts)
        ffn_hidden_size = one_of(ffn_hidden_size=ffn_hidden_size, intermediate_size=intermediate_size)
        num_gemms = check_size("num_gemms", num_gemms, self._fewest)
        hidden_size = check_size("hidden_size", one_of(hidden_size=hidden_size), self._fewest)
        ffn_hidden_size = check_size("ffn_hidden_size", ffn_hidden_size, self._fewest)
        check_flags(interleaved=interleaved, bias=bias, recompute_activation=recompute_activation)
        self.num_gemms, self.activation, self.interleaved = num_gemms, activation, interleaved
        self.in_features = self.out_features = hidden_size
        self.recompute_activation = recompute_activation
        options: dict[str, Any] = {
            "params_dtype": dtype_of_parameters(params_dtype, dtype),
            "device": device,
            "init_method": init_method,
            "state_dict_format": state_dict_format,
            "single_grouped_weight": single_grouped_weight,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "delay_wgrad_compute": delay_wgrad_compute,
            "save_original_input": save_original_input,
            "recipe": recipe,
        }
        width = found.width(ffn_hidden_size)
        self.fc1 = GroupedLinear(num_gemms, hidden_size, width, bias, **options)
        self.fc2 = GroupedLinear(num_gemms, ffn_hidden_size, hidden_size, bias, **options)

    def reset_parameters(self) -> None:
        """Initialise both layers."""
        for layer in linears(self.fc1, self.fc2):
            layer.reset_parameters()

    def quantize_weight(self) -> None:
        """Call ``GroupedLinear.quantize_weight`` of both layers."""
        for layer in linears(self.fc1, self.fc2):
            layer.quantize_weight()

    def _check_call(self, is_first_microbatch: bool | Tensor | None = None) -> None:
        """Call ``GroupedLinear._check_call`` of both layers."""
        for layer in (self.fc1, self.fc2):
            if not to_be_called(layer, kinds=KINDS):
                layer._check_call(is_first_microbatch)  # type: ignore[operator]

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
            probs: ``[T]``: routing probability of every row. It multiplies the activation and FC2's bias, which equals
                multiplying the expert's result.
            is_first_microbatch, out, dgrad_out: see ``GroupedLinear``: buffers for the result and for the gradient of
                ``inp``, both ``[T, H]``.

        Returns:
            ``[T, H]``; rows past the sum of ``m_splits`` are zero. The memory of ``out`` if given.
        """
        if not isinstance(inp, Tensor):
            not_a_tensor("`inp`", inp)
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
        """``forward`` for cumulative ends ``offs``, int32 ``[G]``."""
        if not isinstance(inp, Tensor):
            not_a_tensor("`inp`", inp)
        if probs is not None and not isinstance(probs, Tensor):
            not_a_tensor("`probs`", probs, "a tensor or None")
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, (bool, Tensor)):
            not_a_microbatch(is_first_microbatch)
        if out is not None or dgrad_out is not None:
            if out is not None:
                check_buffer("out", out, (*inp.shape[:-1], self.out_features), result_dtype(inp), inp.device)
            if dgrad_out is not None:
                check_buffer("dgrad_out", dgrad_out, inp.shape, inp.dtype, inp.device)
            check_disjoint({"out": out, "dgrad_out": dgrad_out}, {"inp": inp})
        path = expert_path(self, inp, buffers=out is not None or dgrad_out is not None).taken
        if path == ONE_OP:
            return self._by_one_op(inp, offs, probs)
        if path == ONE_FUNCTION:
            return self._by_one_function(inp, offs, probs, is_first_microbatch, out, dgrad_out)
        return self._by_layers(inp, offs, probs, is_first_microbatch, out, dgrad_out, called=path == MODULES)

    def __explain__(
        self,
        inp: Tensor,
        m_splits: MSplits | None = None,
        probs: Tensor | None = None,
        is_first_microbatch: bool | Tensor | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> LayerPath:
        """Return the path of a call with the arguments of ``forward``; ``tgl.explain`` calls this."""
        return expert_path(self, inp, buffers=out is not None or dgrad_out is not None)

    def _by_layers(
        self,
        inp: Tensor,
        offs: Tensor,
        probs: Tensor | None,
        is_first_microbatch: bool | Tensor | None,
        out: Tensor | None,
        dgrad_out: Tensor | None,
        *,
        called: bool,
    ) -> Tensor:
        """Run the layers one after the other, with autograd between them.

        ``called``: call them as modules, because of hooks or because another module replaces a layer.
        """
        fc1, fc2 = self.fc1, self.fc2
        options1 = given(is_first_microbatch=is_first_microbatch, dgrad_out=dgrad_out)
        options2 = given(is_first_microbatch=is_first_microbatch, out=out)
        replaced = has_own_forward(fc2, kinds=KINDS)
        if replaced and probs is not None and out is not None:
            fail(
                "`out` must be None when `probs` is given and `fc2` is another module, whose result the probabilities "
                "multiply"
            )
        for name, layer, options in (("fc1", fc1, options1), ("fc2", fc2, options2)):
            if has_own_forward(layer):  # the arguments of ``GroupedLinear`` are known
                check_takes(name, layer, options)
        first, second = (layer if called else layer.forward_offsets for layer in (fc1, fc2))
        groups = splits_of(offs) if called else offs
        activation = {"kind": self.activation, "interleaved": self.interleaved}
        if isinstance(fc1, GroupedLoRALinear) and not called:
            hidden = fc1._activated(inp, offs, probs, activation, **options1)
        else:
            hidden = first(inp, groups, **options1)
            rows = hidden.reshape(-1, hidden.shape[-1]) if hidden.dim() != 2 else hidden
            hidden = activate(rows, offs, None if replaced else probs, **activation)
            hidden = hidden if rows.dim() == inp.dim() else hidden.view(*inp.shape[:-1], -1)
        if not replaced and probs is not None and fc2.has_bias:
            options2["bias_scale"] = probs
        y = second(hidden, groups, **options2)
        return (y * probs.view(*y.shape[:-1], 1)).to(y.dtype) if replaced and probs is not None else y

    def _by_one_function(
        self,
        inp: Tensor,
        offs: Tensor,
        probs: Tensor | None,
        is_first_microbatch: bool | Tensor | None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
        places: TokenPermutation | None = None,
    ) -> Tensor:
        """Run ``ExpertFunction``, on tokens if their permutation ``places`` is given. Both calls are checked first."""
        fc1, fc2 = self.fc1, self.fc2
        parts1, parts2 = fc1._parts_of_call(), fc2._parts_of_call()
        rows, out_dtype = fc1._matrix(inp), result_dtype(inp)
        if out is not None:
            out = out.view(-1, self.out_features)
        if dgrad_out is not None:
            _, dgrad_out = fc1._checked_buffers(inp, None, dgrad_out, out_dtype)
        needs_wgrad1, needs_wgrad2 = needs_grad(parts1[0]), needs_grad(parts2[0])
        fc2._check_call(is_first_microbatch)  # before the first call has prepared its weight
        first = fc1._call(
            parts1,
            rows,
            out_dtype,
            is_first_microbatch=is_first_microbatch,
            needs_dgrad=rows.requires_grad and torch.is_grad_enabled(),
            needs_wgrad=needs_wgrad1,
            dgrad_out=dgrad_out,
            again=places is not None,
        )
        rows, offs = fc1._input(rows, offs, out_dtype)
        second = fc2._call(
            parts2,
            rows,
            out_dtype,
            is_first_microbatch=is_first_microbatch,
            needs_dgrad=needs_wgrad1 or needs_grad((rows, probs, *parts1[1])),
            needs_wgrad=needs_wgrad2,
            out=out,
            again=self.recompute_activation or places is not None,
        )
        activation = {"kind": self.activation, "interleaved": self.interleaved}
        expert = Expert(first, second, activation, fuse_product(first.gemms, second.gemms), places)
        edges = first.gradients.edge, second.gradients.edge
        tensors = (rows, probs, *parts1[0], *parts1[1], *edges[0], *parts2[0], *parts2[1], *edges[1])
        if not needs_grad(tensors):
            y = expert_forward(expert, offs, rows, probs).y
        elif in_dynamo():
            y = ExpertFunction.apply(expert, offs, *tensors)
        else:
            y = expert_function(expert, offs, *tensors)[0]
        return y if inp.dim() == 2 else y.view(*inp.shape[:-1], self.out_features)

    def _by_one_op(self, inp: Tensor, offs: Tensor, probs: Tensor | None) -> Tensor:
        rows = inp.reshape(-1, inp.shape[-1]) if inp.dim() != 2 else inp
        w1, w2, *biases = op_parameters(self)
        if rows.dtype != w1.dtype:
            check_input_dtype(rows.dtype, w1.dtype, rows.device)
        options: dict[str, Any] = {"kind": self.activation, "interleaved": self.interleaved}
        options["recompute"] = self.recompute_activation
        y = grouped_mlp(rows, w1, w2, offs, probs, *biases, **options)
        return y if inp.dim() == 2 else y.view(*inp.shape[:-1], self.out_features)

    def reserve_delayed_wgrad(self, max_rows: int, microbatches: int = 1, *, dtype: torch.dtype | None = None) -> None:
        """Call ``GroupedLinear.reserve_delayed_wgrad`` of both layers."""
        for layer in linears(self.fc1, self.fc2):
            layer.reserve_delayed_wgrad(max_rows, microbatches, dtype=dtype)

    def need_backward_dw(self) -> bool:
        """Return whether ``GroupedLinear.need_backward_dw`` is true for either layer."""
        return any(layer.need_backward_dw() for layer in linears(self.fc1, self.fc2))

    def backward_dw(self) -> None:
        """Call ``GroupedLinear.backward_dw`` of both layers, in the order of the backward."""
        for layer in linears(self.fc2, self.fc1):
            layer.backward_dw()

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, interleaved={self.interleaved}"
